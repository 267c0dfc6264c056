"""What is said while a tool works, over the Realtime API: nothing, unless the client asks for it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from support.live_server import live_server
from support.realtime_client import RealtimeClient, realtime_client
from support.scripted_engines import ActingEngine

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, ToolCallFragment, Usage
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, OutputWriter, TextOutput, ToolCallOutput
from omni_ws.service.conversation.unasked import phrases

pytestmark = pytest.mark.virtual_clock

TOOLS = [{"type": "function", "name": "find", "parameters": {"type": "object"}}]


class Finder(ActingEngine):
    """Calls a tool for a question, tells its result, and reads aloud."""

    def __init__(self) -> None:
        super().__init__(
            "finder",
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.TEXT, OutputModality.AUDIO}),
            tasks=frozenset({Task.CHAT, Task.SPEECH}),
            tools=True,
        )

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        (chunk,) = [chunk async for chunk in request.input]
        if request.task is Task.CHAT and chunk.tool_call_id is None:
            out.write(ToolCallOutput(ToolCallFragment(0, id="call_1", name="find", arguments="{}")))
            out.write(Finished(FinishReason.TOOL_CALLS, Usage()))
            return
        if request.task is Task.CHAT:
            out.write(TextOutput(chunk.payload.decode()))
        out.write(AudioOutput(np.full(24_000, 0.1, dtype=np.float32), 24_000))
        out.write(Finished(FinishReason.STOP, Usage()))


async def ask(client: RealtimeClient, **session: object) -> None:
    await client.update(tools=TOOLS, **session)
    await client.say("Find it.")
    assert (await client.respond())["output"][0]["type"] == "function_call"


async def result(client: RealtimeClient) -> str:
    """Tells the result. Returns the transcript of the answer to it."""
    item = {"type": "function_call_output", "call_id": "call_1", "output": "found"}
    await client.send("conversation.item.create", item=item)
    while not (done := await client.respond())["conversation_id"]:
        pass  # what was said meanwhile
    text: str = done["output"][0]["content"][0]["transcript"]
    return text


async def test_nothing_is_said_by_itself() -> None:
    async with live_server(Finder()) as server, realtime_client(server) as client:
        await ask(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await client.receive()
        assert await result(client) == "found"


async def test_a_client_may_have_it_said_as_responses_outside_of_the_conversation() -> None:
    engine = Finder()
    async with live_server(engine) as server, realtime_client(server) as client:
        await ask(client, tool_filler=True)
        created = (await client.until("response.created"))["response"]
        assert (created["conversation_id"], created["metadata"]) == (None, {"trigger": "filler"})
        done = await client.response()
        assert (done["id"], done["status"]) == (created["id"], "completed")
        assert done["output"][0]["content"][0]["transcript"] in phrases()["en"].filler
        await client.until("response.created")  # the next one, during which the result comes
        assert await result(client) == "found"
        assert [message.role for message in engine.requests[-1].history] == ["user", "assistant"]


async def test_the_session_shows_what_was_asked_for() -> None:
    async with live_server(Finder()) as server, realtime_client(server) as client:
        assert "tool_filler" not in await client.update()
        assert (await client.update(tool_filler=True))["tool_filler"] is True
        await client.send("session.update", session={"type": "realtime", "tool_filler": "yes"})
        assert (await client.until("error"))["error"]["param"] == "session.tool_filler"
