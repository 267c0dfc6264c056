"""All that a session holds is charged to it by what it takes in memory, on every front end, and given back."""

from __future__ import annotations

import asyncio
import gc
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from typing import Any

import orjson
import pytest
from support.inline_workers import InlineWorkers
from support.live_server import LiveServer, live_server
from support.mode_b_client import mode_b
from support.native_client import RawWebSocket, frame_bytes, native_client, raw_websocket, text
from support.raw_http import raw_client, websocket_upgrade
from support.realtime_client import failed, realtime_client
from support.scripted_engines import CapableEngine
from support.telephones import phone_gateway
from websockets.frames import Opcode

from omni_ws.core.chunks import CHUNK_OVERHEAD_BYTES
from omni_ws.core.json_values import MAX_MESSAGE_VALUES
from omni_ws.core.ledger_entry import MAX_KEPT_TEXT
from omni_ws.core.quota import ORDINARY_BYTES
from omni_ws.engine.base import GenerationRequest, OutputWriter
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.transport.native.connection import MAX_UNWRITTEN_BYTES
from omni_ws.transport.telephony.media_stream import MAX_STREAM_SID, StreamStart
from omni_ws.wire.server_frames import PongFrame

#: What one read of the server, or one event, may add before it notices that it is too much.
ONE_MORE = 1 << 20
#: With one character of four bytes, each of the others takes four.
WIDE = "a" * 500_000 + "\U0001f600"
WIDE_BYTES = 4 * len(WIDE)
#: With its UTF-8, which Python keeps beside it.
MOST_WIDE_BYTES = 5 * len(WIDE) + 1000


class Dozing(EchoEngine):
    """Echoes once it has woken up."""

    def __init__(self, settings: EchoSettings | None = None) -> None:
        super().__init__(settings)
        self.wake = asyncio.Event()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            await self.wake.wait()
            await super().generate(request, out)
        finally:
            self.active_requests -= 1


async def flood(server: LiveServer, peer: RawWebSocket, frame: bytes) -> int:
    """Send ``frame`` until the server reads no more, reading nothing. Returns how often."""
    (connection,) = server.connections
    sent = 0
    while connection.is_reading:
        if not peer.writer.transport.get_write_buffer_size():
            peer.send_now(frame)
            sent += 1
        assert sent < 2000, "the server reads on"
        await asyncio.sleep(0)
    return sent


# what is not read


@pytest.mark.virtual_clock
async def test_a_reader_of_mode_b_that_reads_no_pongs_is_charged_not_read_and_dropped() -> None:
    async with (
        live_server() as server,
        mode_b(server) as session,
        raw_websocket(server, query=f"?session_id={session.id}", read_ahead=1024) as peer,
    ):
        await server.until(lambda: len(server.connections) == 1)
        await flood(server, peer, text("ping", t="x" * 60_000))
        assert MAX_UNWRITTEN_BYTES < server.held_bytes < MAX_UNWRITTEN_BYTES + ONE_MORE
        await asyncio.sleep(31)
        assert await peer.close_code() in (4413, None)
        await server.until(lambda: not server.connections)
        assert (await session.status())["state"] == "open"
        assert server.held_bytes == 0


@pytest.mark.virtual_clock
async def test_a_client_that_takes_some_in_time_is_slow_and_stays() -> None:
    async with (
        live_server() as server,
        mode_b(server) as session,
        raw_websocket(server, query=f"?session_id={session.id}", read_ahead=1024) as peer,
    ):
        await server.until(lambda: len(server.connections) == 1)
        sent = await flood(server, peer, text("ping", t="x" * 60_000))
        for read in range(sent):
            if read % 20 == 19:
                await asyncio.sleep(29)
            assert orjson.loads((await peer.frame())[1])["type"] == "pong"
        await server.until(lambda: server.held_bytes == 0)
        assert server.connections


@pytest.mark.virtual_clock
async def test_events_of_realtime_that_are_not_read_are_charged_and_end_the_session() -> None:
    async with live_server() as server, raw_client(server.port, read_ahead=1024) as client:
        await client.send(websocket_upgrade("/v1/realtime"))
        assert (await client.head())[1] == 101
        (connection,) = server.connections
        for socket in (connection.transport.get_extra_info("socket"), client.writer.get_extra_info("socket")):
            for buffer in (SO_SNDBUF, SO_RCVBUF):  # what the kernel holds is held for nothing
                socket.setsockopt(SOL_SOCKET, buffer, 131_072)
        said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a" * 2_000_000}]}
        event = {"type": "conversation.item.create", "item": said}
        client.writer.write(frame_bytes(Opcode.TEXT, orjson.dumps(event)))
        await server.until(lambda: server.held_bytes > 7_000_000)  # the item, its input, and twice what shows it
        await asyncio.sleep(40)
        await server.until(lambda: not server.sessions)
        assert server.held_bytes == 0


async def test_what_a_pong_repeats_is_kept_as_it_was_sent() -> None:
    """Nine thousand empty lists are 27 KB of JSON, and 600 KB of objects."""
    empty: list[Any] = [[] for _ in range(9_000)]
    async with live_server() as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        await flood(server, peer, text("ping", t=empty))
        (conversation,) = server.app.sessions.conversations
        kept = [len(memoryview(pong.t)) for pong, *_ in conversation.outbox._messages if isinstance(pong, PongFrame)]
        assert len(kept) > 20
        assert 0 < conversation.outbox.queued - sum(kept) < 500 * len(kept)


# settings


@pytest.mark.parametrize("front", ["native", "realtime"])
async def test_settings_are_charged_by_what_they_take_while_they_are_held(front: str) -> None:
    async with live_server() as server:
        if front == "native":
            async with native_client(server) as client:
                for number in range(10):
                    await client.configure(instructions=f"{number}{WIDE}")
                await client.barrier()
                assert WIDE_BYTES < server.held_bytes < MOST_WIDE_BYTES
                await client.configure(instructions="short")
                await server.until(lambda: server.held_bytes == 0)
        else:
            async with realtime_client(server) as caller:
                for number in range(10):
                    await caller.update(type="realtime", instructions=f"{number}{WIDE}")
                assert 2 * WIDE_BYTES < server.held_bytes < 2 * MOST_WIDE_BYTES  # as they were sent, and as they count
                await caller.update(type="realtime", instructions="short")
                await server.until(lambda: server.held_bytes == 0)


async def test_words_to_expect_are_charged_as_all_settings_are() -> None:
    async with live_server(CapableEngine()) as server, native_client(server) as client:
        await client.configure(input_audio={"keywords": ["\U0001f600" * 64] * 100, "prompt": "\U0001f600" * 4096})
        await client.barrier()
        least = 4 * 4096  # the same word is held once
        assert least - ORDINARY_BYTES < server.held_bytes < 10 * least
        await client.configure(input_audio=None)
        await server.until(lambda: server.held_bytes == 0)


async def test_a_lexicon_is_charged_as_all_settings_are() -> None:
    async with live_server(CapableEngine()) as server, native_client(server) as client:
        lexicon = {f"{number:\U0001f600<64}": f"{number:\U0001f600<128}" for number in range(500)}
        await client.configure(tts={"lexicon": lexicon})
        await client.barrier()
        least = 4 * 500 * (64 + 128)
        assert least - ORDINARY_BYTES < server.held_bytes < 3 * least
        await client.configure(tts=None)
        await server.until(lambda: server.held_bytes == 0)


async def test_settings_that_a_request_holds_are_charged_until_it_is_over() -> None:
    """Each request goes on with the settings of its beginning, however often they are replaced."""
    engine = Dozing()
    async with live_server(engine) as server, native_client(server) as client:
        for number in range(4):
            await client.configure(instructions=f"{number}{WIDE}", history=False)
            await client.say("hello")
        await client.configure(instructions="short")
        await client.barrier()
        assert 4 * WIDE_BYTES < server.held_bytes < 4 * MOST_WIDE_BYTES
        engine.wake.set()
        for _ in range(4):
            assert (await client.answer()).text == "hello"
        await server.until(lambda: server.held_bytes < 20_000)


async def test_settings_for_which_the_server_has_no_room_are_refused_and_change_nothing() -> None:
    # 3 MB: room for the settings, not for them and those that replace them.
    async with live_server(limits={"max_held_bytes": 3_000_000}) as server:
        async with native_client(server) as client:
            await client.configure(instructions="a" * 900_000)
            await client.send("session_config", instructions=WIDE)
            assert (await client.error())["code"] == "engine_overloaded"
            assert (await client.configure(speed=1))["instructions"] == "a" * 900_000
            await client.say("hello")
            assert (await client.answer()).text == "hello"
        await server.until(lambda: server.held_bytes == 0)
        async with realtime_client(server) as caller:
            error = await failed(caller, "session.update", session={"type": "realtime", "instructions": WIDE})
            assert error["code"] == "engine_overloaded"
            assert (await caller.update(type="realtime"))["instructions"] == ""


async def test_settings_have_a_limit_of_values_over_all_frames() -> None:
    """A frame may have so many, and later ones are merged into the same settings."""
    first, second = 25_000, MAX_MESSAGE_VALUES - 25_024  # without the six objects and lists around them, and a comma
    async with live_server() as server, native_client(server) as client:
        await client.configure(stage_params=nested(a=[0] * first))
        await client.send("session_config", stage_params=nested(b=[0] * (second + 1)))
        assert (await client.error())["code"] == "invalid_value"
        updated = await client.configure(stage_params=nested(b=[0] * second))
        assert list(updated["stage_params"]["fake"]["fail_after_chunks"]) == ["a", "b"]


def nested(**fields: Any) -> dict[str, Any]:
    return {"fake": {"fail_after_chunks": fields}}


# items


async def test_an_item_of_realtime_is_charged_for_each_of_its_parts() -> None:
    parts = [{"type": "input_text", "text": ""}] * 8000 + [{"type": "input_text", "text": "a"}]
    async with live_server() as server, realtime_client(server) as client:
        await client.send("conversation.item.create", item={"type": "message", "role": "user", "content": parts})
        await client.until("conversation.item.done")
        assert server.held_bytes > 8000 * (CHUNK_OVERHEAD_BYTES + 184)


async def test_the_whole_input_of_a_response_is_charged_until_it_is_answered() -> None:
    engine = Dozing(EchoSettings(reply="yes"))
    said = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": WIDE}]}
    async with live_server(engine) as server, realtime_client(server) as client:
        for _ in range(3):
            await client.send("response.create", response={"conversation": "none", "input": [said]})
            await client.until("response.created")
        kept = 3 * MAX_KEPT_TEXT
        assert server.held_bytes > 3 * len(WIDE) + kept
        engine.wake.set()
        for _ in range(3):
            await client.until("response.done")
        await server.until(lambda: server.held_bytes < kept + 50_000)


# input


async def test_tiny_chunks_are_charged_for_what_holds_them() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only", history=False)
        for _ in range(3000):
            await client.chunk("x")
        await client.barrier()
        assert server.held_bytes > 3000 * CHUNK_OVERHEAD_BYTES
        await client.chunk(end=True)
        assert (await client.answer()).text == "x" * 3000
        await server.until(lambda: server.held_bytes < 20_000)


async def test_the_names_of_requests_are_charged_with_the_history() -> None:
    async with live_server() as server, native_client(server) as client:
        for number in range(60):
            await client.say("a", ref=f"{number}\U0001f600" + "b" * 60)
            await client.answer()
        assert server.held_bytes > 60 * 600 - 4096


async def test_a_call_keeps_none_of_the_parameters_that_began_it() -> None:
    async with live_server(telephony={"enabled": True}) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with phone_gateway(server) as gateway:
            await gateway.start(customParameters={"note": "x" * 50_000})
            await server.until(lambda: server.sessions == 1)
            await server.until(lambda: not any(type(one) is StreamStart for one in gc.get_objects()))
            await gateway.stop()


@pytest.mark.parametrize("more", [0, 1])
async def test_the_id_of_a_stream_which_each_message_repeats_has_a_limit(more: int) -> None:
    async with live_server(telephony={"enabled": True}) as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with phone_gateway(server) as gateway:
            await gateway.start(streamSid="M" * (MAX_STREAM_SID + more))
            if more:
                await gateway.connection.wait_closed()
                assert gateway.connection.close_code == 1008
            else:
                await server.until(lambda: server.sessions == 1)
                await gateway.stop()


# others have their turn


async def test_others_have_their_turn_between_settings_that_are_much_work() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        passes = 0

        def count() -> None:
            nonlocal passes
            passes += 1
            asyncio.get_running_loop().call_soon(count)

        frames = [text("session_config", instructions=f"{number}") for number in range(40)]
        peer.send_now(*frames)
        count()
        begun = passes
        while (await peer.until("session_updated"))["instructions"] != "39":
            pass
        assert passes - begun >= 40
