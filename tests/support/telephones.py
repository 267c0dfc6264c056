"""What calls a server for telephones: the gateway of a network, which plays as they do, and Asterisk by AudioSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import numpy as np
import orjson
from support.live_server import LiveServer
from support.native_client import FrameClient, connecting
from support.raw_http import raw_client
from websockets.asyncio.client import ClientConnection

from omni_ws.audio.pcm import Samples, decode_mu_law, encode_mu_law
from omni_ws.transport.telephony.audiosocket import AudioSocketCalls

PATH = "/v1/telephony/media-stream"
STREAM = "MZ0000000000000000000000000000test"
#: 20 ms.
PACKET = 160
FORMAT = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}


def mu_law(pcm16: bytes, *, rate: int = 16_000) -> bytes:
    """pcm16 as the telephone network carries it."""
    samples = np.frombuffer(pcm16, "<i2")
    if rate == 16_000:
        samples = (samples[: len(samples) // 2 * 2].reshape(-1, 2).mean(axis=1)).astype(np.int16)
    return encode_mu_law(np.ascontiguousarray(samples))


def start_fields(**fields: Any) -> dict[str, Any]:
    return {
        "accountSid": "AC1",
        "streamSid": STREAM,
        "callSid": "CA1",
        "tracks": ["inbound"],
        "mediaFormat": FORMAT,
        "customParameters": {},
        **fields,
    }


class PhoneGateway(FrameClient):
    """One call. ``returns_marks`` says whether marks come back at once, or when ``play`` gets to them."""

    KIND = "event"
    closed = FrameClient.close_of_server

    def __init__(self, connection: ClientConnection, *, returns_marks: bool) -> None:
        super().__init__(connection)
        self.returns_marks = returns_marks
        #: Audio and marks that are not played yet.
        self.buffer: deque[bytes | str] = deque()
        self._sequence = 0
        self._chunk = 0

    async def send(self, kind: str, **fields: Any) -> None:
        self._sequence += 1
        await super().send(kind, **{"sequenceNumber": str(self._sequence), "streamSid": STREAM, **fields})

    async def connected(self) -> None:
        await self.connection.send('{"event":"connected","protocol":"Call","version":"1.0.0"}')

    async def start(self, **fields: Any) -> None:
        await self.connected()
        await self.send("start", start=start_fields(**fields))

    async def media(self, payload: bytes, *, track: str = "inbound", **fields: Any) -> None:
        self._chunk += 1
        media = {
            "track": track,
            "chunk": str(self._chunk),
            "timestamp": str(20 * self._chunk),
            "payload": base64.b64encode(payload).decode(),
            **fields,
        }
        await self.send("media", media=media)

    async def speak(self, audio: bytes, *, size: int = PACKET) -> None:
        """µ-law, in messages of ``size`` bytes."""
        for position in range(0, len(audio), size):
            await self.media(audio[position : position + size])

    async def mark(self, name: str) -> None:
        await self.send("mark", mark={"name": name})

    async def stop(self) -> None:
        await self.send("stop", stop={"accountSid": "AC1", "callSid": "CA1"})

    async def receive(self) -> dict[str, Any]:
        text = await self.message()
        assert isinstance(text, str)
        message: dict[str, Any] = orjson.loads(text)
        assert message["streamSid"] == STREAM
        self.received.append(message)
        match message["event"]:
            case "media":
                payload = base64.b64decode(message["media"]["payload"])
                assert payload
                assert len(payload) % PACKET == 0
                self.buffer.append(payload)
            case "mark":
                self.buffer.append(message["mark"]["name"])
            case "clear":
                # The marks in the buffer come back at once, unplayed.
                await self._return_marks()
        if self.returns_marks:
            await self._return_marks()
        return message

    async def _return_marks(self) -> None:
        while self.buffer:
            entry = self.buffer.popleft()
            if isinstance(entry, str):
                await self.mark(entry)

    async def play(self, ms: int) -> None:
        """Play so much of the buffer, and return the marks that this gets to."""
        left = 8 * ms
        while self.buffer:
            entry = self.buffer[0]
            if isinstance(entry, str):
                self.buffer.popleft()
                await self.mark(entry)
            elif len(entry) <= left:
                self.buffer.popleft()
                left -= len(entry)
            else:
                self.buffer[0] = entry[left:]
                return

    async def end_of_answer(self) -> None:
        """Everything up to the mark behind an answer."""
        while not (await self.until("mark"))["mark"]["name"].endswith(":end"):
            pass

    @property
    def heard(self) -> bytes:
        """All the audio that was received, µ-law."""
        return b"".join(base64.b64decode(message["media"]["payload"]) for message in self.seen("media"))

    @property
    def heard_samples(self) -> Samples:
        return decode_mu_law(self.heard)


@contextlib.asynccontextmanager
async def phone_gateway(
    server: LiveServer, *, returns_marks: bool = True, query: str = "", **options: Any
) -> AsyncIterator[PhoneGateway]:
    """A gateway whose WebSocket is open, before its first message."""
    async with connecting(server, query, PATH, **options) as connection:
        yield PhoneGateway(connection, returns_marks=returns_marks)


CALL = UUID("40325ec2-5efd-4bd3-805f-53576e581d13")
#: 20 ms of pcm16 at 8 kHz.
SOCKET_PACKET = 320


def frame(kind: int, payload: bytes = b"") -> bytes:
    return bytes([kind]) + len(payload).to_bytes(2, "big") + payload


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

    async def speak(self, pcm16: bytes, *, size: int = SOCKET_PACKET) -> None:
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
            assert len(payload) == SOCKET_PACKET
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
    port = server.front_end(AudioSocketCalls).port
    assert port is not None
    async with raw_client(port) as client:
        yield AsteriskCall(client.reader, client.writer)
