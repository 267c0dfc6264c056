"""The limit on all input of one request of a WebSocket: that request ends alone, and the session goes on."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import pytest
from support.inline_workers import MS, InlineWorkers, loud, quiet
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, native_client
from support.parts_of_sessions import weighed
from support.realtime_client import realtime_client, text_of
from support.scripted_engines import CapableEngine

from omni_ws.core.chunks import ToolCallFragment
from omni_ws.engine.base import TextOutput, ToolCallOutput
from omni_ws.engine.fake import ScriptedEngine

pytestmark = pytest.mark.virtual_clock

LIMIT: Final = {"max_total_payload_per_session": 10}


async def told(client: NativeClient, **of_chunk: Any) -> None:
    """A request is refused, with its error and its final, and nothing more of it."""
    answer = await client.answer()
    assert (len(answer.errors), answer.reason) == (1, "error")
    error = {name: answer.errors[0].get(name) for name in ("code", "param", "request_id", *of_chunk)}
    request_id = answer.final["request_id"]
    assert error == {"code": "payload_too_large", "param": "payload", "request_id": request_id, **of_chunk}


async def holds_its_history(server: LiveServer) -> None:
    """Nothing else is held."""
    (conversation,) = server.app.sessions.conversations
    await server.until(lambda: server.held_bytes == weighed(conversation.ledger))


async def goes_on(server: LiveServer, client: NativeClient, text: str = "0123456789") -> None:
    """The next request is answered, at the limit, and nothing of the one before is held."""
    await client.say(text)
    answer = await client.answer()
    assert (answer.reason, answer.text, answer.errors) == ("stop", text, [])
    await holds_its_history(server)


@pytest.mark.parametrize("policy", ["on_first_chunk", "on_end_only"])
@pytest.mark.parametrize("after_start", ["extend", "snapshot"])
async def test_one_byte_past_it_ends_the_request(policy: str, after_start: str) -> None:
    async with live_server(streaming_input=LIMIT) as server, native_client(server) as client:
        await client.configure(start_policy=policy, after_start=after_start, modalities=["text"])
        await goes_on(server, client)
        for text in ("01234", "5678", "é", "dropped", "dropped too"):
            await client.chunk(text, ref=f"my {text}")
        await client.chunk(end=True)
        await told(client, sequence_id=3, ref="my é")
        await goes_on(server, client)
        assert client.seen("input_ack")[-1]["next_sequence_id"] == 8


async def test_the_last_chunk_that_is_too_much_ends_its_input_as_well() -> None:
    async with live_server(streaming_input=LIMIT) as server, native_client(server) as client:
        await client.say("0123456789a")
        await told(client, sequence_id=0)
        await goes_on(server, client)


async def test_what_fills_a_gap_is_told_apart_by_request() -> None:
    async with live_server(streaming_input=LIMIT) as server, native_client(server) as client:
        await client.chunk("a", number=2)
        await client.chunk("dropped", number=3)
        await client.chunk(end=True, number=4)
        await client.chunk("next", number=5, end=True)
        await client.chunk("56789", number=1)
        await client.chunk("01234", number=0)
        await told(client, sequence_id=2)
        assert (await client.answer()).text == "next"
        await goes_on(server, client)


async def test_a_request_that_waits_ends_at_once() -> None:
    answer_first = asyncio.Event()
    engine = ScriptedEngine([answer_first.wait, TextOutput("first")])
    async with live_server(engine, streaming_input=LIMIT) as server, native_client(server) as client:
        await client.say("one")
        await client.chunk("0123456789a")
        await told(client, sequence_id=1)
        answer_first.set()
        assert (await client.answer()).text == "first"
        await client.chunk(end=True)
        await client.barrier()
        await holds_its_history(server)


async def test_speech_counts_by_turn_and_silence_does_not() -> None:
    limit = {"max_total_payload_per_session": 3000 * MS}
    async with live_server(streaming_input=limit) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(turn_detection={"type": "server_vad"}, modalities=["text"])

            async def stream(audio: bytes) -> None:
                for start in range(0, len(audio), 20 * MS):
                    await client.binary(audio[start : start + 20 * MS])

            await stream(quiet(6000))
            for _ in range(2):
                await stream(loud(1500) + quiet(1000))
                assert (await client.answer()).reason == "stop"
            await stream(loud(4000) + quiet(1000))
            await told(client)
            await stream(loud(1500) + quiet(1000))
            assert (await client.answer()).reason == "stop"


async def test_the_result_of_a_tool_that_is_too_long_may_come_again() -> None:
    call = ToolCallOutput(ToolCallFragment(0, "call_0", "look", "{}"))
    engine = CapableEngine([call])
    async with live_server(engine, streaming_input=LIMIT) as server, native_client(server) as client:
        await client.configure(tools=[{"type": "function", "function": {"name": "look"}}], modalities=["text"])
        await client.say("look")
        await client.answer()
        await client.chunk("0123456789a", role="tool", tool_call_id="call_0")
        await client.chunk(end=True)
        await told(client)
        engine.script = ()
        await client.chunk("short", role="tool", tool_call_id="call_0", end=True)
        assert (await client.answer()).reason == "stop"


async def test_a_response_of_realtime() -> None:
    async with live_server(streaming_input=LIMIT) as server, realtime_client(server) as client:
        await client.update(output_modalities=["text"])
        item = await client.say("0123456789a")
        response = await client.respond()
        assert (response["status"], response["status_details"]["error"]["code"]) == ("failed", "payload_too_large")
        await client.send("conversation.item.delete", item_id=item["id"])
        await client.say("0123456789")
        assert text_of(await client.respond()) == "0123456789"
