"""One client floods; another must not notice much. Counted in frames handled in a turn of the loop, not in time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.native_client import frame_bytes, native_client, raw_websocket, text
from support.raw_http import raw_client, request
from websockets.frames import Opcode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.transport.native.connection import StreamConnection
from omni_ws.transport.native.endpoint import WebSocketSession
from omni_ws.wire.frames import encode_input

#: Frames of one connection that may be looked at before the others have their turn.
MOST_FRAMES = 64
#: Of those that the library takes apart, what 1 KiB of the smallest frames holds; of large ones, one.
MOST = {"fragments": 1024 // 7 + 1, "large chunks": 1, "huge chunks": 1}
ROUNDS = 10


def chunks(size: int, count: int) -> bytes:
    return b"".join(
        frame_bytes(Opcode.BINARY, encode_input(InputChunk(Modality.AUDIO, bytes(size), number)))
        for number in range(count)
    )


def requests(count: int) -> bytes:
    return b"".join(text("input_chunk", sequence_id=number, text="x", end_of_input=True) for number in range(count))


FLOODS: dict[str, Callable[[], bytes]] = {
    "tiny frames": lambda: text("finish") * 50_000,
    "pings of the session": lambda: text("ping", t=1) * 20_000,
    "pings of the connection": lambda: frame_bytes(Opcode.PING, b"x") * 50_000,
    "fragments": lambda: frame_bytes(Opcode.TEXT, b"{", fin=False) + frame_bytes(Opcode.CONT, b" ", fin=False) * 50_000,
    "requests": lambda: requests(1_000),
    "small chunks": lambda: chunks(2, 50_000),
    "large chunks": lambda: chunks(10_000, 400),
    "huge chunks": lambda: chunks(1 << 20, 4),
}


class Meter:
    """Counts what is handled for each connection between two passes of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 0
        self._now: dict[int, int] = {}
        meter = self

        def counted(method: Any) -> Any:
            def call(self: Any, *arguments: Any, **options: Any) -> Any:
                number = meter._now[id(self)] = meter._now.get(id(self), 0) + 1
                meter.most = max(meter.most, number)
                return method(self, *arguments, **options)

            return call

        monkeypatch.setattr(WebSocketSession, "receive_message", counted(WebSocketSession.receive_message))
        monkeypatch.setattr(StreamConnection, "process_event", counted(StreamConnection.process_event))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def mark_turns() -> None:
            while True:
                self._now.clear()
                await asyncio.sleep(0)

        marking = asyncio.create_task(mark_turns())
        try:
            yield
        finally:
            marking.cancel()
            await asyncio.gather(marking, return_exceptions=True)


async def drop_all(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 18):
            pass


@contextlib.asynccontextmanager
async def flooding(server: LiveServer, flood: bytes) -> AsyncIterator[None]:
    """One client sends ``flood`` as fast as it is read, and reads whatever comes back."""
    async with raw_websocket(server) as peer:
        await peer.until("session_created")
        reading = asyncio.create_task(drop_all(peer.reader))
        peer.send_now(flood)
        try:
            yield
        finally:
            peer.reset()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.parametrize("kind", FLOODS)
async def test_a_flood_takes_its_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = Meter(monkeypatch)
    most = 2 * MOST.get(kind, MOST_FRAMES)  # a read, and what it left
    async with live_server() as server, native_client(server) as client, meter.running():
        async with flooding(server, FLOODS[kind]()):
            for _ in range(ROUNDS):
                await client.say("hello")
                assert (await client.answer()).text == "hello"
        assert 0 < meter.most <= most


async def test_a_flood_of_requests_over_http() -> None:
    """A thousand at once, pipelined on one connection and on many: another client is answered in between."""
    async with live_server() as server, native_client(server) as client, contextlib.AsyncExitStack() as flood:
        one = await flood.enter_async_context(raw_client(server.port))
        one.writer.write(request("GET", "/health") * 1_000)
        many = [await flood.enter_async_context(raw_client(server.port)) for _ in range(100)]
        for other in many:
            other.writer.write(request("GET", "/v1/models"))
        answered = 0

        async def read_all() -> None:
            nonlocal answered
            for _ in range(1_000):
                assert (await one.response()).status == 200
                answered += 1

        reading = asyncio.create_task(read_all())
        await client.say("hello")
        assert (await client.answer()).text == "hello"
        assert answered < 500
        await reading
        for other in many:
            assert (await other.response()).status == 200
