"""Async tools over the Realtime API: an extension of the session object, and no ``response.create`` for the result."""

from __future__ import annotations

import asyncio

import pytest
from support.inline_workers import inline
from support.live_server import live_server
from support.realtime_client import RealtimeClient, realtime_client
from support.scripted_engines import CapableEngine, Ears, FindingEngine

from omni_ws.core.chunks import FinishReason, ToolCallFragment, Usage
from omni_ws.engine.base import Finished, TextOutput, ToolCallOutput
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.service.conversation.unasked import WORKING

pytestmark = pytest.mark.virtual_clock

FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
LATER = {**FIND, "async": True}


async def told(client: RealtimeClient) -> str:
    created = (await client.until("response.created"))["response"]
    assert created["metadata"] == {"trigger": "telling"}
    assert created["conversation_id"] is not None
    done = await client.response()
    text: str = done["output"][0]["content"][0]["text"]
    return text


@pytest.mark.parametrize("of", ["session", "response"])
async def test_a_result_is_told_by_itself_while_the_talk_goes_on(of: str) -> None:
    engine = FindingEngine()
    async with live_server(engine) as server, realtime_client(server) as client:
        session = await client.update(tools=[LATER] if of == "session" else [], output_modalities=["text"])
        assert session["tools"] == ([LATER] if of == "session" else [])
        await client.say("Find it.")
        own = {"tools": [LATER]} if of == "response" else {}
        assert (await client.respond(**own))["output"][0]["type"] == "function_call"
        await client.say("hello")
        assert (await client.respond())["output"][0]["content"][0]["text"] == "hello"
        item = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
        await client.send("conversation.item.create", item=item)
        assert await told(client) == "found"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await client.until("response.created")
        await client.say("thanks")
        await client.respond()
    assert engine.requests[0].tools == (
        {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}},
    )
    results = [message.text for message in engine.requests[-1].history if message.role == "tool"]
    assert results == [WORKING]


async def test_a_result_is_told_where_turns_are_only_transcribed() -> None:
    called = ToolCallOutput(ToolCallFragment(0, id="call_1", name="find", arguments="{}"))
    llm = CapableEngine([called, Finished(FinishReason.TOOL_CALLS, Usage())])
    async with live_server(ComposedEngine(llm, asr=Ears())) as server, realtime_client(inline(server)) as client:
        detection = {"type": "server_vad", "create_response": False}
        await client.update(tools=[LATER], output_modalities=["text"], audio={"input": {"turn_detection": detection}})
        await client.say("Find it.")
        assert (await client.respond())["output"][0]["type"] == "function_call"
        llm.script = (TextOutput("found"),)
        item = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
        await client.send("conversation.item.create", item=item)
        assert await told(client) == "found"


async def test_async_is_yes_or_no() -> None:
    async with live_server(FindingEngine()) as server, realtime_client(server) as client:
        await client.send("session.update", session={"type": "realtime", "tools": [{**FIND, "async": "later"}]})
        assert (await client.until("error"))["error"]["param"] == "session.tools[0].async"
