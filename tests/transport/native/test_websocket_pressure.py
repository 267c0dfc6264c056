"""Back-pressure both ways, floods, and clients that disappear: memory stays bounded, and nothing is lost or left."""

from __future__ import annotations

import asyncio
import base64
import struct
from socket import SO_SNDBUF, SOL_SOCKET

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.native_client import NATIVE, RawWebSocket, frame_bytes, native_client, raw_websocket, text
from support.raw_http import raw_client, websocket_upgrade
from websockets.frames import Opcode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import GenerationRequest, OutputWriter
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.service.conversation import conversation, request
from omni_ws.transport.native.connection import MAX_UNWRITTEN_BYTES
from omni_ws.wire.frames import encode_input

#: What the kernel may hold of one direction of a loopback connection, and one read of the server.
KERNEL_BYTES = 16 << 20
#: What it may hold of a flood before it is sent.
SOCKET_BYTES = 131_072
RATE = 16_000


def audio(number: int, payload: bytes, *, end: bool = False) -> bytes:
    return frame_bytes(Opcode.BINARY, encode_input(InputChunk(Modality.AUDIO, payload, number, end_of_input=end)))


async def fill(server: LiveServer, peer: RawWebSocket, frame: bytes, *, at_most: int) -> int:
    """Send ``frame`` again and again, reading nothing, until the server reads no more. Returns how often."""
    (connection,) = server.connections
    for socket in (connection.transport.get_extra_info("socket"), peer.writer.get_extra_info("socket")):
        # What the kernel holds is sent for nothing.
        socket.setsockopt(SOL_SOCKET, SO_SNDBUF, SOCKET_BYTES)
    times = max(1, 65_536 // len(frame))
    sent = 0
    while connection.is_reading:
        if not peer.writer.transport.get_write_buffer_size():
            peer.send_now(frame * times)
            sent += times
        assert sent * len(frame) < at_most, "the server reads on"
        await asyncio.sleep(0)
    return sent


# floods of a client that does not read


@pytest.mark.slow
async def test_flood_of_pings() -> None:
    async with live_server() as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        sent = await fill(server, peer, frame_bytes(Opcode.PING, bytes(125)), at_most=4 * KERNEL_BYTES)
        (connection,) = server.connections
        assert connection.transport.get_write_buffer_size() < MAX_UNWRITTEN_BYTES + 2 * 65_536 + 262_144
        for _ in range(sent):
            assert await peer.frame() == (Opcode.PONG, bytes(125))
        assert connection.is_reading
        await peer.send(text("ping", t="still here"))
        assert (await peer.until("pong"))["t"] == "still here"


@pytest.mark.parametrize(
    ("frame", "answer"),
    [
        (frame_bytes(Opcode.TEXT, b"x" * 1000), "error"),
        (frame_bytes(Opcode.BINARY, b"x" * 4_000), "error"),
        (text("ping", t="x" * 500_000), "pong"),
        (text("session_config", instructions="x" * 500_000), "session_updated"),
    ],
    ids=["garbage", "big garbage", "big pings", "big configurations"],
)
async def test_flood_of_frames_that_are_answered(frame: bytes, answer: str) -> None:
    """What is queued for the client is bounded by what it weighs, not by how many messages it is."""
    limit = 1 << 20
    fields = {"max_output_bytes": limit}
    async with live_server(streaming_input=fields) as server, raw_websocket(server, read_ahead=1024) as peer:
        await peer.until("session_created")
        sent = await fill(server, peer, frame, at_most=400 << 20)
        # One read may hold some frames more than there was room for.
        assert limit <= server.held_bytes <= limit + 2 * max(262_144, len(frame)) + 600_000
        for _ in range(sent):
            await peer.until(answer)
        await peer.send(text("ping", t=None))
        await peer.until("pong")


@pytest.mark.virtual_clock
async def test_a_client_that_does_not_read_is_not_read_because_the_engine_takes_more() -> None:
    engine = Dozing()
    async with live_server(engine, streaming_input={"max_output_bytes": 1 << 20}) as server:  # noqa: SIM117
        async with raw_websocket(server, read_ahead=1024) as peer:
            await peer.until("session_created")
            await peer.send(text("session_config", start_policy="on_first_chunk", modalities=["text"]))
            await peer.send(audio(0, bytes(700_000)))
            while (await peer.until("input_ack"))["next_sequence_id"] == 0:
                pass
            (living,) = server.native._live._living.values()
            request = living.session.conversation.receiving
            assert request is not None
            sent = await fill(server, peer, text("ping", t="x" * 100_000), at_most=4 * KERNEL_BYTES)
            queued = living.session.outbox.queued
            engine.wake.set()
            await server.until(lambda: not request.queued_bytes)
            await asyncio.sleep(1)  # on a clock that jumps
            assert living.session.outbox.queued < queued + 10_000  # the new credit, and no answer to a ping
            for _ in range(sent):
                await peer.until("pong")
            await peer.send(text("cancel"))
            while not (await peer.until("output_chunk")).get("final"):
                pass


@pytest.mark.virtual_clock
async def test_what_a_client_reads_late_comes_before_the_end() -> None:
    limit = 1 << 20
    async with live_server(streaming_input={"max_output_bytes": limit}, still_answers=False) as server:  # noqa: SIM117
        async with raw_websocket(server, read_ahead=1024) as peer:
            await peer.until("session_created")
            await fill(server, peer, text("ping", t="x" * 100_000), at_most=4 * KERNEL_BYTES)
            draining = asyncio.create_task(server.running.drain(60))
            await server.until(lambda: server.app.sessions.admission.draining)
            received = 0
            while orjson.loads((await peer.frame())[1])["type"] == "pong":
                received += 100_000
            assert received >= limit
            assert await peer.close_code() == 1012
            await draining


@pytest.mark.virtual_clock
@pytest.mark.slow
async def test_flood_before_there_is_a_session() -> None:
    """A client that is refused and floods: what it sends is thrown away, and it is dropped in the end."""
    async with live_server(limits={"max_sessions": 1}) as server, native_client(server) as holder:
        await holder.say("hello")  # a session without content would give its place up
        await holder.answer()
        held = server.held_bytes
        async with raw_client(server.port, read_ahead=1024) as client:
            flood = frame_bytes(Opcode.PING, bytes(125)) * 500 + audio(0, bytes(100_000)) * 5
            client.writer.write(websocket_upgrade(NATIVE) + flood)
            for _ in range(20):
                client.writer.write(flood)
                await asyncio.sleep(0)
            rest = await client.rest()
            assert b"engine_overloaded" in rest
        await server.until(lambda: server.sessions == 1)
        assert server.held_bytes == held


async def test_many_tiny_chunks_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_TOOL_RESULTS", 100)  # fewer chunks are not counted
    monkeypatch.setattr(request, "MAX_WAITING_CHUNKS", 100)
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        for _ in range(100):
            await client.chunk("x")
        await client.barrier()
        assert client.seen("error") == []
        await client.chunk("x")
        assert (await client.error())["code"] == "payload_too_large"
        assert await client.closed() == 1009


# an engine that does not take its input


class Dozing(EchoEngine):
    """Echoes once it has woken up."""

    def __init__(self) -> None:
        super().__init__(EchoSettings(chunk_ms=1000))
        self.wake = asyncio.Event()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            await self.wake.wait()
            await super().generate(request, out)
        finally:
            self.active_requests -= 1


@pytest.mark.parametrize("fragmented", [False, True])
async def test_input_that_the_engine_does_not_take_rests_in_the_kernel(fragmented: bool) -> None:
    engine = Dozing()
    async with live_server(engine) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(
            text("session_config", output_audio={"sample_rate": RATE}, start_policy="on_first_chunk", history=False)
        )
        await peer.until("session_updated")
        (connection,) = server.connections
        sent = bytearray()
        number = 0
        while connection.is_reading or number < 400:
            payload = struct.pack("<I", number) * 8000
            chunk = encode_input(InputChunk(Modality.AUDIO, payload, number))
            if fragmented:
                thirds = [chunk[: len(chunk) // 3], chunk[len(chunk) // 3 :]]
                peer.send_now(frame_bytes(Opcode.BINARY, thirds[0], fin=False), frame_bytes(Opcode.CONT, thirds[1]))
            else:
                peer.send_now(frame_bytes(Opcode.BINARY, chunk))
            sent += payload
            number += 1
            await asyncio.sleep(0)
        assert len(sent) > 12 << 20
        assert (1 << 20) <= server.held_bytes <= (1 << 20) + (1 << 19)
        assert not connection.is_reading
        engine.wake.set()
        peer.send_now(text("finish"))
        received = bytearray()
        while True:
            _, data = await peer.frame()
            frame = orjson.loads(data)
            if frame["type"] == "output_chunk":
                if frame.get("final"):
                    break
                received += base64.b64decode(frame["payload"])
        assert received == sent
        assert connection.is_reading


@pytest.mark.virtual_clock
async def test_client_that_keeps_to_its_credit_is_told_of_new_credit() -> None:
    engine = Dozing()
    size = 300_000
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(start_policy="on_first_chunk", modalities=["text"])
        credit = client.created["limits"]["max_payload_per_session"]
        sent = 0
        for _ in range(60):
            while credit < size:
                credit = (await client.until("input_ack"))["credit_bytes"]
            await client.binary(bytes(size))
            sent, credit = sent + size, credit - size
            await asyncio.sleep(0.2)  # so that the acknowledgements are in
            while client.connection.recv_messages.frames.queue:
                frame = await client.receive()
                if frame["type"] == "input_ack":
                    credit = frame["credit_bytes"]
            if credit < size:
                assert server.held_bytes <= (1 << 20) + client.created["limits"]["max_chunk_bytes"]
                engine.wake.set()
        assert engine.wake.is_set()
        await client.chunk(end=True)
        assert (await client.answer()).final["usage"]["input_audio_ms"] == sent / 32


async def test_largest_chunks_fit_the_credit() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_first_chunk", modalities=["text"])
        await client.binary(bytes(640))
        ack = await client.until("input_ack")
        assert ack["credit_bytes"] >= client.created["limits"]["max_chunk_bytes"]
        await client.send("cancel")
        await client.answer()


# messages in fragments


async def test_fragments_between_control_frames_and_whole_messages() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        first, second = text("ping", t="first"), orjson.dumps({"type": "ping", "t": "é second"})
        await peer.send(
            first,
            frame_bytes(Opcode.TEXT, second[:5], fin=False),
            frame_bytes(Opcode.PING, b"between"),
            frame_bytes(Opcode.CONT, b"", fin=False),
            frame_bytes(Opcode.CONT, second[5:22], fin=False),  # in the middle of a character
            frame_bytes(Opcode.PONG, b"unasked"),
            frame_bytes(Opcode.CONT, second[22:]),
            text("ping", t="third"),
        )
        frames = [await peer.frame() for _ in range(4)]
        assert [orjson.loads(data)["t"] for opcode, data in frames if opcode is Opcode.TEXT] == [
            "first",
            "é second",
            "third",
        ]
        assert (Opcode.PONG, b"between") in frames


@pytest.mark.parametrize("size", [1, 7, 100])
async def test_requests_in_fragments_keep_their_order(size: int) -> None:
    async with live_server() as server, native_client(server) as client:
        await client.configure(start_policy="on_end_only")
        for number in range(20):
            message = orjson.dumps({"type": "input_chunk", "sequence_id": number, "text": f"{number} "}).decode()
            if number % 3:
                await client.raw(message)
            else:
                await client.connection.send(message[at : at + size] for at in range(0, len(message), size))
        await client.send("finish")
        assert (await client.answer()).text == "".join(f"{number} " for number in range(20))


async def test_thousands_of_fragments_cost_no_memory() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(frame_bytes(Opcode.TEXT, b'{"type":"ping",', fin=False))
        for _ in range(20):
            await peer.send(frame_bytes(Opcode.CONT, b"", fin=False) * 5000)
        await peer.send(frame_bytes(Opcode.CONT, b'"t":1}'))
        assert (await peer.until("pong"))["t"] == 1


BROKEN_FRAMES: list[bytes] = [
    frame_bytes(Opcode.CONT, b"{}"),
    frame_bytes(Opcode.TEXT, b"{", fin=False) + frame_bytes(Opcode.TEXT, b"}"),
    b"\x89\xfe\x00\x7e" + bytes(4 + 126),
    b"\x09\x81\0\0\0\0x",
    b"\x83\x80\0\0\0\0",
    b"\xc1\x80\0\0\0\0",
    b"\x81\x02{}",
]


async def test_broken_frames_close_with_1002() -> None:
    async with live_server() as server:
        for frames in BROKEN_FRAMES:
            async with raw_websocket(server) as peer:
                await peer.until("session_created")
                await peer.send(text("input_chunk", sequence_id=0, text="hello"), frames, text("ping", t="unheard"))
                assert await peer.close_code() == 1002, frames


# packets


HELLO = text("input_chunk", sequence_id=0, text="hello ") + text(
    "input_chunk", sequence_id=1, text="you", end_of_input=True
)


@pytest.mark.parametrize("cut", [0, 1, 5, 40, len(HELLO) - 1, len(HELLO)])
async def test_frames_in_the_packet_of_the_handshake(cut: int) -> None:
    async with live_server() as server, raw_websocket(server, behind=HELLO[:cut]) as peer:
        await peer.until("session_created")
        await peer.send(HELLO[cut:])
        said = ""
        while not (frame := await peer.until("output_chunk")).get("final"):
            said += frame["text"]
        assert said == "hello you"


async def test_close_in_the_packet_of_the_handshake() -> None:
    close = frame_bytes(Opcode.CLOSE, (1000).to_bytes(2))
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(websocket_upgrade(NATIVE) + HELLO + close)
        await client.rest()


async def test_frames_byte_by_byte() -> None:
    async with live_server() as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        for byte in HELLO:
            await peer.send(bytes([byte]))
        assert (await peer.until("output_chunk"))["text"] == "hello "
        assert (await peer.until("output_chunk"))["text"] == "you"


# clients that disappear

POINTS: dict[str, list[bytes]] = {
    "at once": [],
    "in a frame's header": [HELLO[:1]],
    "in a frame": [HELLO[:20]],
    "in a big frame": [audio(0, bytes(1 << 20))[: 1 << 19]],
    "in a fragmented message": [frame_bytes(Opcode.TEXT, b'{"type"', fin=False)],
    "with an open request": [text("input_chunk", sequence_id=0, text="hello")],
    "before the start": [text("session_config", start_policy="on_end_only"), audio(0, bytes(64_000))],
    "behind a gap": [audio(3, bytes(64_000)), audio(5, bytes(64_000))],
    "with requests that wait": [text("input_chunk", sequence_id=n, text="x", end_of_input=True) for n in range(7)],
    "after everything": [HELLO],
    "after a fatal error": [text("input_chunk", sequence_id=1000, text="x")],
    "after its own close": [HELLO, frame_bytes(Opcode.CLOSE, (1001).to_bytes(2))],
}


@pytest.mark.parametrize("how", ["reset", "end", "half", "silence"])
async def test_client_disappears(how: str) -> None:
    """Nothing is left of it: no session, task, engine request or byte, and no error in the log."""
    gate = asyncio.Event()
    for engine in (EchoEngine(), ScriptedEngine([gate.wait])):
        async with live_server(engine) as server:
            for point, frames in POINTS.items():
                if ("wait" in point) == isinstance(engine, ScriptedEngine):
                    for read in (False, True):
                        await disappear(server, frames, how, read=read)
                        await server.check_empty()


async def disappear(server: LiveServer, frames: list[bytes], how: str, *, read: bool) -> None:
    async with raw_websocket(server) as peer:
        if read:
            await peer.until("session_created")
        await peer.send(*frames)
        if read and b"input_chunk" in b"".join(frames):
            await peer.frame()
        match how:
            case "reset":
                peer.reset()
            case "half":
                peer.finish_sending()
                await peer.rest()
            case "silence":
                await asyncio.sleep(0)


@pytest.mark.parametrize("answers", [0, 1, 5])
async def test_client_disappears_in_the_middle_of_an_answer(answers: int) -> None:
    engine = EchoEngine(EchoSettings(chunk_interval_ms=1))
    async with live_server(engine) as server:
        async with native_client(server) as client:
            await client.say("x " * 5000)
            for _ in range(answers):
                await client.until("output_chunk")
            client.gone()
        await server.until(lambda: engine.active_requests == 0, "the abort")


async def test_client_disappears_while_it_is_not_read() -> None:
    engine = Dozing()
    fields = {"ping_interval_sec": 0.05}
    async with live_server(engine, streaming_input=fields) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(text("session_config", start_policy="on_first_chunk"), audio(0, bytes(1 << 20)))
        await server.until(lambda: engine.active_requests == 1, "the start")
        await fill(server, peer, audio(1, bytes(1000)), at_most=KERNEL_BYTES)
        peer.reset()
        # A connection that is not read shows its end when something is sent: the pings still are.
        await server.until(lambda: engine.active_requests == 0, "the abort")
