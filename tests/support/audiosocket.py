"""Asterisk's end of a call over AudioSocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

from support.live_server import LiveServer
from support.raw_http import raw_client

from omni_ws.transport.telephony.audiosocket import AudioSocketCalls

CALL = UUID("40325ec2-5efd-4bd3-805f-53576e581d13")
#: 20 ms of pcm16 at 8 kHz.
PACKET = 320


def frame(kind: int, payload: bytes = b"") -> bytes:
    return bytes([kind]) + len(payload).to_bytes(2, "big") + payload


def front_end(server: LiveServer) -> AudioSocketCalls:
    (found,) = (one for one in server.app.front_ends if isinstance(one, AudioSocketCalls))
    return found


class AsteriskCall:
    """One connection, and the audio that was heard on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.heard = b""
        #: When each frame of audio came.
        self.times: list[float] = []

    async def send(self, kind: int, payload: bytes = b"") -> None:
        await self.write(frame(kind, payload))

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def identify(self, call: UUID = CALL) -> None:
        await self.send(0x01, call.bytes)

    async def speak(self, pcm16: bytes, *, size: int = PACKET) -> None:
        for position in range(0, len(pcm16), size):
            await self.send(0x10, pcm16[position : position + size])

    async def press(self, keys: str) -> None:
        for key in keys:
            await self.send(0x03, key.encode())

    async def receive(self) -> tuple[int, bytes] | None:
        """The next frame; None at the end."""
        try:
            header = await self.reader.readexactly(3)
            payload = await self.reader.readexactly(int.from_bytes(header[1:], "big"))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        if header[0] == 0x10:
            assert len(payload) == PACKET
            self.heard += payload
            self.times.append(asyncio.get_running_loop().time())
        return header[0], payload

    async def hear(self, ms: int) -> None:
        """Until so much more was heard."""
        wanted = len(self.heard) + 16 * ms
        while len(self.heard) < wanted:
            assert await self.receive() is not None

    async def hung_up(self) -> None:
        """The server hangs up, and closes."""
        last = None
        while (received := await self.receive()) is not None:
            last = received
        assert last == (0x00, b"")


@contextlib.asynccontextmanager
async def asterisk_call(server: LiveServer) -> AsyncIterator[AsteriskCall]:
    """A connection before its first frame."""
    port = front_end(server).port
    assert port is not None
    async with raw_client(port) as client:
        yield AsteriskCall(client.reader, client.writer)
