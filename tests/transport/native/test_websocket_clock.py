"""Every time-out and every pace of a session, on a clock that jumps."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NativeClient, RawWebSocket, frame_bytes, native_client, raw_websocket, text
from support.virtual_clock import VirtualClockLoop
from websockets.frames import Opcode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import AudioOutput, EngineOutput, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.transport.native.connection import MAX_CLOSE_REASON_BYTES
from omni_ws.wire.frames import encode_input

pytestmark = pytest.mark.virtual_clock

#: Timers are armed in the virtual instant in which the client acts, or a few passes of the loop later.
JUST = 0.2


def now() -> float:
    return asyncio.get_running_loop().time()


async def expect_timeout(client: NativeClient, *, begin: float, after: float) -> None:
    closing = await client.until("session_closing")
    assert (closing["reason"], closing["retryable"], closing["time_left_ms"]) == ("session_timeout", False, 0)
    assert now() - begin == pytest.approx(after, abs=JUST)
    assert await client.closed() == 4408
    assert "session_timeout" not in {frame["error"]["code"] for frame in client.seen("error")}


# nothing to do


@pytest.mark.parametrize("turns", [None, {"type": "server_vad"}])
async def test_sessions_that_wait_wake_nobody(turns: dict[str, Any] | None) -> None:
    """Neither one that has said nothing, nor one whose input is acknowledged."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualClockLoop)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(live_server())
        clients = [await stack.enter_async_context(native_client(server)) for _ in range(4)]
        for client in clients[::2]:
            await client.configure(start_policy="on_end_only", turn_detection=turns)
            await client.chunk("a beginning")
            await client.until("input_ack")
        await asyncio.sleep(JUST)
        before = loop.jumps
        await asyncio.sleep(15)
        assert loop.jumps - before == 1, "the test's own timer, before the first ping is due"


# silence


@pytest.mark.parametrize("pings", [0, 20])
async def test_silent_client(pings: int) -> None:
    """Answering pings of the connection is no sign of a user."""
    async with live_server(streaming_input={"ping_interval_sec": pings}) as server, native_client(server) as client:
        await expect_timeout(client, begin=0, after=300)


@pytest.mark.parametrize("frame", ["ping", "speak", "garbage", "finish", "cancel", "session_config"])
async def test_any_frame_ends_the_silence(frame: str) -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server, native_client(server) as client:
        for _ in range(3):
            await asyncio.sleep(49)
            await client.raw("garbage") if frame == "garbage" else await client.send(frame)
        await expect_timeout(client, begin=147, after=50)


async def test_open_request_of_a_silent_client_is_cancelled() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server, native_client(server) as client:
        await client.chunk("half a")
        final = await client.answer()
        assert final.reason == "cancelled"
        await expect_timeout(client, begin=0, after=50)


@pytest.mark.parametrize("pings", [0, 20])
@pytest.mark.parametrize("snapshot", [False, True])
async def test_nothing_times_out_while_an_answer_is_owed(pings: int, snapshot: bool) -> None:
    script: list[Any] = [lambda: asyncio.sleep(1000), TextOutput("at last")]
    fields = {"session_timeout_sec": 50, "ping_interval_sec": pings}
    async with live_server(ScriptedEngine(script), streaming_input=fields) as server, native_client(server) as client:
        if snapshot:
            await client.configure(after_start="snapshot")
        await client.chunk("hello", end=not snapshot)
        assert (await client.until("output_chunk"))["text"] == "at last"
        assert now() == pytest.approx(1000, abs=JUST)
        # The silence is counted from the end of the answer, though the input of a snapshot is still open.
        assert (await client.answer()).reason == ("cancelled" if snapshot else "stop")
        await expect_timeout(client, begin=1000, after=50)


async def test_answer_over_open_input_does_not_keep_a_silent_client() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 50}) as server, native_client(server) as client:
        await client.chunk("hello")
        assert (await client.until("output_chunk"))["text"] == "hello"
        assert (await client.answer()).reason == "cancelled"
        await expect_timeout(client, begin=0, after=50)


async def test_waiting_requests_are_owed_too() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=40_000))
    async with (
        live_server(engine, streaming_input={"session_timeout_sec": 50}) as server,
        native_client(server) as client,
    ):
        for _ in range(4):
            await client.say("x")
        assert [(await client.answer()).reason for _ in range(4)] == ["stop"] * 4
        assert now() == pytest.approx(160, abs=JUST)
        await expect_timeout(client, begin=160, after=50)


# keep-alive


async def test_silent_peer_is_pinged_and_dropped() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        assert await peer.frame() == (Opcode.PING, b"")
        assert now() == pytest.approx(20, abs=JUST)
        opcode, data = await peer.frame()
        assert (opcode, data[:2]) == (Opcode.CLOSE, (1011).to_bytes(2))
        assert now() == pytest.approx(40, abs=JUST)
        await server.check_empty()
        assert now() < 50


async def test_peer_that_pongs_is_kept() -> None:
    async with live_server(streaming_input={"session_timeout_sec": 100}) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        for _ in range(2):
            assert await peer.frame() == (Opcode.PING, b"")
            await asyncio.sleep(19)
            await peer.send(frame_bytes(Opcode.PONG))
        assert (await peer.until("session_closing"))["reason"] == "session_timeout"
        assert now() == pytest.approx(100, abs=JUST)


async def test_fragments_and_parts_of_frames_are_signs_of_life() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        message = text("ping", t="slow")
        for byte in range(len(message)):
            await asyncio.sleep(15)
            await peer.send(message[byte : byte + 1])
            if byte == 15:  # a frame that takes five minutes is cut off by the session's own clock
                break
        assert now() == pytest.approx(240, abs=JUST)
        await asyncio.sleep(1)
        await peer.send(message[16:])
        assert (await peer.until("pong"))["t"] == "slow"


async def test_peer_that_we_do_not_read_is_kept() -> None:
    """The engine is behind, so the socket rests: then silence says nothing, neither of the peer nor of the client."""
    resume = asyncio.Event()

    class Slow(EchoEngine):
        async def generate(self, request: Any, out: OutputWriter) -> None:
            self.active_requests += 1
            try:
                await resume.wait()
                async for _ in request.input:
                    pass
                out.write(TextOutput("heard"))
            finally:
                self.active_requests -= 1

    fields = {"session_timeout_sec": 60}
    async with live_server(Slow(), streaming_input=fields) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(text("session_config", start_policy="on_first_chunk"))
        await peer.until("session_updated")
        for number in range(3):
            await peer.send(
                frame_bytes(Opcode.BINARY, encode_input(InputChunk(Modality.AUDIO, bytes(1 << 19), number)))
            )
        begin = now()
        pings = 0
        while now() - begin < 250:
            opcode, _ = await peer.frame()
            pings += opcode is Opcode.PING
            assert opcode is not Opcode.CLOSE
        assert pings == pytest.approx(12, abs=2)
        resume.set()
        await peer.send(text("finish"))
        assert (await peer.until("output_chunk"))["text"] == "heard"


# a client that does not read


# the server itself does not read


async def _stuck_behind_its_output(server: LiveServer, peer: RawWebSocket) -> None:
    """The client asks for a long answer, which it does not read, and sends a chunk behind a gap: that is the last one
    that the server reads."""
    await peer.until("session_created")
    await peer.send(text("input_chunk", sequence_id=0, text="talk", end_of_input=True))
    (connection,) = server.connections
    await server.until(lambda: connection.paused)
    await asyncio.sleep(1)  # the outbox is full, too
    await peer.send(text("input_chunk", sequence_id=2, text="two"))
    await server.until(lambda: not connection.is_reading)


@pytest.mark.parametrize("sent", [True, False])
async def test_a_gap_has_no_time_while_the_server_does_not_read(sent: bool) -> None:
    """What fills it may lie in the socket."""
    engine = ScriptedEngine([TextOutput("x" * 60_000)] * 400)
    fields = {"write_timeout_sec": 60}
    async with (
        live_server(engine, expect_errors=not sent, streaming_input=fields) as server,
        raw_websocket(server, read_ahead=1024) as peer,
    ):
        await _stuck_behind_its_output(server, peer)
        (connection,) = server.connections
        if sent:
            await peer.send(text("input_chunk", sequence_id=1, text="one"))
        await asyncio.sleep(50)
        frames = 0
        while not connection.is_reading:
            await peer.frame()
            frames += 1
        assert frames  # it did not read
        began = now()
        if sent:
            while (await peer.until("input_ack"))["next_sequence_id"] < 3:
                pass
            assert now() == began
            return
        error = (await peer.until("error"))["error"]
        assert error["code"] == "sequence_gap"
        assert now() - began == pytest.approx(10, abs=JUST)


# credit


@pytest.mark.parametrize("missing", [0, 1])
async def test_credit_that_returns_is_acknowledged_at_once(missing: int) -> None:
    """Also for a request that waits for the answer before it. Who was told of enough for a chunk waits for nothing."""
    gate = asyncio.Event()
    limits = {"max_payload_per_session": 1 << 20, "max_chunk_bytes": 1 << 18}
    engine = ScriptedEngine([gate.wait, TextOutput("done")])
    async with live_server(engine, streaming_input=limits) as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        await client.say("first")
        await client.until("response_started")
        for size in (1 << 18, 1 << 18, (1 << 18) + missing - 1024, 1024):
            await client.binary(bytes(size), Modality.TEXT)
        while (ack := await client.until("input_ack"))["next_sequence_id"] < 5:
            pass
        assert ack["credit_bytes"] == (1 << 18) - missing
        await client.barrier()
        before = len(client.seen("input_ack"))
        gate.set()
        await client.answer()
        assert len(client.seen("input_ack")) == before
        await client.send("cancel")  # whose bytes are free again
        await client.answer()
        await client.barrier()
        later = client.seen("input_ack")[before:]
        assert [ack["credit_bytes"] for ack in later] == [1 << 20] * missing


async def test_credit_returns_while_the_request_waits() -> None:
    gate = asyncio.Event()
    limits = {"max_payload_per_session": 1 << 20, "max_chunk_bytes": 1 << 18}
    engine = ScriptedEngine([gate.wait, TextOutput("done")])
    async with live_server(engine, streaming_input=limits) as server, native_client(server) as client:
        await client.configure(start_policy="on_first_chunk")
        await client.say("first")
        await client.until("response_started")
        for _ in range(4):
            await client.binary(bytes(1 << 18), Modality.TEXT)
        while (ack := await client.until("input_ack"))["next_sequence_id"] < 5:
            pass
        assert ack["credit_bytes"] == 0
        gate.set()
        while (ack := await client.until("input_ack"))["credit_bytes"] < 1 << 18:
            pass
        assert ack["next_sequence_id"] == 5


@pytest.mark.parametrize("pings", [0, 20])
async def test_slow_consumer(pings: int) -> None:
    piece = np.zeros(24_000, dtype=np.float32)
    script: list[EngineOutput] = [AudioOutput(piece, 24_000)] * 400
    engine = ScriptedEngine(script)
    fields = {"max_output_bytes": 200_000, "ping_interval_sec": pings}
    async with live_server(engine, streaming_input=fields) as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        await peer.send(text("input_chunk", sequence_id=0, text="go", end_of_input=True))
        begin = now()
        await server.until(lambda: engine.active_requests == 1, "the answer")
        await asyncio.sleep(29)
        assert (server.sessions, engine.active_requests) == (1, 1)
        await asyncio.sleep(2)
        assert engine.active_requests == 0
        (connection,) = server.connections
        # Nothing of the session: what the connection has yet to write, without the close frame behind it.
        close_frame = connection.transport.get_write_buffer_size() - server.held_bytes
        assert 0 <= close_frame <= 4 + MAX_CLOSE_REASON_BYTES
        await asyncio.sleep(8)
        assert server.sessions == 0  # the rest was dropped with the connection
        assert server.held_bytes == 0
        assert now() - begin < 45


async def test_slow_consumer_that_reads_at_last_hears_why() -> None:
    script: list[EngineOutput] = [AudioOutput(np.zeros(24_000, dtype=np.float32), 24_000)] * 400
    engine = ScriptedEngine(script)
    fields = {"max_output_bytes": 200_000}
    async with live_server(engine, streaming_input=fields) as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        await peer.send(text("input_chunk", sequence_id=0, text="go", end_of_input=True))
        await server.until(lambda: engine.active_requests == 1, "the answer")
        await asyncio.sleep(32)
        assert (await peer.until("error"))["error"]["code"] == "slow_consumer"
        assert await peer.close_code() == 4413


async def test_client_that_reads_a_little_now_and_then_is_no_slow_consumer() -> None:
    script: list[EngineOutput] = [AudioOutput(np.zeros(24_000, dtype=np.float32), 24_000)] * 800
    engine, fields = ScriptedEngine(script), {"max_output_bytes": 200_000, "ping_interval_sec": 0}
    async with live_server(engine, streaming_input=fields) as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        await peer.send(text("input_chunk", sequence_id=0, text="go", end_of_input=True))
        for output in range(800):
            assert (await peer.until("output_chunk"))["sequence_id"] == output
            if output % 200 == 199:  # as much as the kernel may hold of it
                await asyncio.sleep(25)
        assert (await peer.until("output_chunk"))["finish_reason"] == "stop"


# pace


@pytest.mark.parametrize("lead", [0, 400, 5000])
async def test_audio_is_sent_so_far_ahead_of_its_playing(lead: int) -> None:
    pieces = [np.zeros(2400, dtype=np.float32)] * 30
    script: list[EngineOutput] = [AudioOutput(piece, 24_000) for piece in pieces]
    async with live_server(ScriptedEngine(script)) as server, native_client(server) as client:
        await client.configure(max_lead_ms=lead)
        await client.say("go")
        first = now()
        while True:
            frame = await client.until("output_chunk")
            if frame.get("final"):
                break
            ahead_ms = frame["start_ms"] - (now() - first) * 1000
            assert ahead_ms <= lead + 1
            if frame["start_ms"] > lead:
                assert ahead_ms == pytest.approx(lead, abs=20)
        assert frame["finish_reason"] == "stop"
        assert now() - first == pytest.approx(max(0, 2900 - lead) / 1000, abs=JUST)


async def test_operators_pace_and_a_client_that_wants_none() -> None:
    script: list[EngineOutput] = [AudioOutput(np.zeros(24_000, dtype=np.float32), 24_000)] * 5
    async with (
        live_server(ScriptedEngine(script), streaming_input={"max_lead_ms": 1000}) as server,
        native_client(server) as client,
    ):
        assert (await client.configure())["max_lead_ms"] == 1000
        await client.say("go")
        await client.answer()
        assert now() == pytest.approx(3, abs=JUST)


async def test_cancel_ends_a_paced_answer_at_once() -> None:
    script: list[EngineOutput] = [AudioOutput(np.zeros(24_000, dtype=np.float32), 24_000)] * 60
    async with live_server(ScriptedEngine(script)) as server, native_client(server) as client:
        await client.configure(max_lead_ms=100)
        await client.say("go")
        for _ in range(3):
            await client.until("output_chunk")
        begin = now()
        await client.send("cancel")
        assert (await client.answer()).reason == "cancelled"
        assert now() - begin < JUST


async def test_delays_of_the_fake_engine() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=700, chunk_interval_ms=300))
    async with live_server(engine) as server, native_client(server) as client:
        await client.say("one two three")
        times = []
        for _ in range(3):
            await client.until("output_chunk")
            times.append(now())
        assert times == [pytest.approx(at, abs=0.05) for at in (0.7, 1.0, 1.3)]
        await client.answer()


# timers


@pytest.mark.slow
async def test_timers_do_not_storm() -> None:
    """A quiet session wakes the loop for its pings and for nothing else; a busy one for its acknowledgements."""
    loop: Any = asyncio.get_running_loop()
    wakes = 0
    real = loop.call_at

    def counting(when: float, callback: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal wakes
        wakes += 1
        return real(when, callback, *arguments, **options)

    async with live_server() as server, native_client(server) as client:
        loop.call_at = counting
        try:
            await asyncio.sleep(290)
            assert wakes < 60  # about three for each of the pings: ours, its time-out, and the client's
            await client.configure(start_policy="on_end_only")
            wakes = 0
            for _ in range(500):
                await client.binary(bytes(640))
                await asyncio.sleep(0.02)
            assert wakes < 500 + 500 + 250  # a sleep and a patience for each chunk here; ten timers a second there
        finally:
            loop.call_at = real
        await client.send("cancel")
        await client.answer()
