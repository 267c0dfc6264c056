"""Peers over Wyoming, by the reference implementation: a client of our port, and a satellite that we connect to."""

from __future__ import annotations

import asyncio
import contextlib
import warnings
from collections.abc import AsyncIterator
from typing import Any

from support.live_server import LiveServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of a module of the standard library that it imports
    from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.event import Event, Eventable, async_read_event, async_write_event

from omni_ws.transport.wyoming.front import WyomingServices

__all__ = ["AudioChunk", "AudioStart", "AudioStop", "Event", "WyomingPeer", "WyomingSatellite", "peer"]

ON: dict[str, Any] = {"wyoming": {"port": 0}}


class WyomingPeer:
    """One end of a connection; ``seen`` has the events that came."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.seen: list[Event] = []

    async def send(self, *events: Eventable) -> None:
        for event in events:
            await async_write_event(event.event(), self.writer)

    async def say(self, kind: str, data: dict[str, Any] | None = None, payload: bytes | None = None) -> None:
        """An event of any type, right or wrong."""
        await async_write_event(Event(kind, data or {}, payload), self.writer)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def speak(self, audio: bytes, *, rate: int = 16_000, width: int = 2, channels: int = 1) -> None:
        """In pieces of 20 ms."""
        size = rate // 50 * width * channels
        for start in range(0, len(audio), size):
            await self.send(AudioChunk(rate, width, channels, audio[start : start + size]))

    async def receive(self) -> Event | None:
        """The next event; None at the end."""
        try:
            event = await async_read_event(self.reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None
        if event is not None:
            self.seen.append(event)
        return event

    async def until(self, kind: str) -> Event:
        """The next event of this type."""
        while (event := await self.receive()) is not None:
            if event.type == kind:
                return event
        raise AssertionError(f"no {kind} came, but {self.types}, {self.seen[-1:]}")

    async def closed(self) -> list[str]:
        """The types of all events up to the end of the connection."""
        while await self.receive() is not None:
            pass
        return self.types

    async def refused(self) -> str:
        """The code of the error before the end of the connection."""
        await self.closed()
        assert self.types[-1:] == ["error"], self.types
        assert self.seen[-1].data["text"]
        code: str = self.seen[-1].data["code"]
        return code

    @property
    def types(self) -> list[str]:
        """The types of the events that came, each series of chunks as one."""
        found: list[str] = []
        for event in self.seen:
            if not (event.type.endswith("-chunk") and found[-1:] == [event.type]):
                found.append(event.type)
        return found

    def heard(self) -> bytes:
        """All sound that came."""
        return b"".join(event.payload or b"" for event in self.seen if event.type == "audio-chunk")


@contextlib.asynccontextmanager
async def peer(server: LiveServer) -> AsyncIterator[WyomingPeer]:
    """A client that is connected to the port for Wyoming."""
    port = server.front_end(WyomingServices).port
    assert port is not None
    client = AsyncTcpClient("127.0.0.1", port)
    await client.connect()
    assert client._reader is not None
    assert client._writer is not None
    try:
        yield WyomingPeer(client._reader, client._writer)
    finally:
        with contextlib.suppress(ConnectionError):  # the server may have aborted it
            await client.disconnect()


class WyomingSatellite:
    """A satellite: it listens, and servers connect to it, one after the other."""

    def __init__(self) -> None:
        self.port = 0
        self._visits: asyncio.Queue[WyomingPeer] = asyncio.Queue()

    async def visited(self) -> WyomingPeer:
        """The next server that has connected, and has said that it is ready."""
        hub = await self._visits.get()
        await hub.until("run-satellite")
        return hub

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[WyomingSatellite]:
        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            hub = WyomingPeer(reader, writer)
            writers.append(writer)
            self._visits.put_nowait(hub)

        writers: list[asyncio.StreamWriter] = []
        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for writer in writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
            await server.wait_closed()
