"""A client of the native WebSocket that holds everything it hears to the protocol's guarantees."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import orjson
from support.patience import PATIENCE_SEC
from support.raw_http import RawClient, raw_client, websocket_upgrade
from support.virtual_clock import VirtualClockLoop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close, Frame, Opcode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.wire.frames import decode_output_audio, encode_input
from omni_ws.wire.server_frames import decode_server_frame

NATIVE = "/v1/streaming_input"
#: Frames that name a request, and are nothing of it.
ABOUT_A_REQUEST = ("history_truncated", "speech_started", "speech_confirmed", "speech_stopped")


class Answer:
    """Everything that one request was answered with: of the frames up to its final."""

    def __init__(self, frames: Sequence[dict[str, Any]]) -> None:
        *outputs, self.final = [frame for frame in frames if frame["type"] == "output_chunk"]
        self.chunks = outputs
        self.started = next((frame for frame in reversed(frames) if frame["type"] == "response_started"), None)
        self.errors: list[dict[str, Any]] = [frame["error"] for frame in frames if frame["type"] == "error"]
        self.text = "".join(chunk.get("text", "") for chunk in outputs if chunk["modality"] == "text")
        self.audio = b"".join(chunk.get("audio", b"") for chunk in outputs)
        self.reason: str = self.final["finish_reason"]

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other)


class Guarantees:
    """What a client can rely on, whatever happens (protocol/README.md)."""

    def __init__(self) -> None:
        self.next_output = 0
        self.finished: list[str] = []
        #: Requests that have had a late transcript.
        self.late: list[str] = []
        self._running: str | None = None

    def check(self, frame: dict[str, Any]) -> None:
        if frame.get("late"):
            assert (frame["modality"], frame.get("interim")) == ("transcript", None)
            assert frame["request_id"] in self.finished, "late before its final"
            assert frame["request_id"] not in self.late, "more than one late transcript"
            self.late.append(frame["request_id"])
        elif frame["type"] not in ABOUT_A_REQUEST:
            assert frame.get("request_id") not in self.finished, "output after a final"
        match frame["type"]:
            case "response_started":
                assert self._running is None, "two requests are answered at once"
                self._running = frame["request_id"]
            case "output_chunk":
                assert frame["sequence_id"] == self.next_output, "output numbers are contiguous"
                self.next_output += 1
                if frame.get("final"):
                    assert not {"modality", "text", "payload"} & frame.keys()
                    self.finished.append(frame["request_id"])
                    if frame["request_id"] == self._running:
                        self._running = None
                elif frame.get("late"):
                    pass
                elif "request_id" in frame:
                    assert frame["request_id"] == self._running, "output of a request that was not started"
                else:
                    assert self._running is not None
            case "error":
                assert frame["error"].get("request_id") not in self.finished, "an error after its final"


class Address(Protocol):
    """Where a server is."""

    @property
    def port(self) -> int: ...

    @property
    def websocket_url(self) -> str: ...


class FrameClient:
    """A connection whose frames are objects of JSON. ``frames`` are those that have arrived, told apart by ``KIND``."""

    KIND = "type"

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.frames = self.received = list[dict[str, Any]]()

    async def send(self, kind: str, **fields: Any) -> None:
        await self.connection.send(orjson.dumps({self.KIND: kind, **fields}).decode())

    async def message(self) -> str | bytes:
        """The next message, in time. Raises ConnectionClosed."""
        virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
        async with asyncio.timeout(None if virtual else PATIENCE_SEC):
            return await self.connection.recv()

    async def receive(self) -> dict[str, Any]:
        """The next frame. Raises ConnectionClosed."""
        raise NotImplementedError

    async def until(self, *kinds: str) -> dict[str, Any]:
        """The next frame of one of these kinds; what comes before it is passed over."""
        while (frame := await self.receive())[self.KIND] not in kinds:
            pass
        return frame

    async def close_of_server(self) -> tuple[int, str]:
        """The code and the reason that the server closes with; what comes before is passed over."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.receive()
        await self.connection.wait_closed()
        assert self.connection.close_code is not None
        return self.connection.close_code, self.connection.close_reason or ""

    def seen(self, kind: str) -> list[dict[str, Any]]:
        return [frame for frame in self.frames if frame[self.KIND] == kind]


class NativeClient(FrameClient):
    """Numbers its chunks by itself unless told otherwise."""

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__(connection)
        self.created: dict[str, Any] = {}
        self.guarantees = Guarantees()
        self.next_sequence_id = 0

    # sending

    async def raw(self, message: str | bytes) -> None:
        await self.connection.send(message)

    async def chunk(
        self, content: str | bytes | None = None, *, end: bool = False, number: int | None = None, **fields: Any
    ) -> int:
        """Text for a string, a base64 payload for bytes. Returns the chunk's number."""
        number = self._number(number)
        if isinstance(content, str):
            fields["text"] = content
        elif content is not None:
            fields["payload"] = base64.b64encode(content).decode()
        if end:
            fields["end_of_input"] = True
        await self.send("input_chunk", sequence_id=number, **fields)
        return number

    async def binary(
        self,
        payload: bytes,
        modality: Modality = Modality.AUDIO,
        *,
        end: bool = False,
        number: int | None = None,
        timestamp_ms: int | None = None,
    ) -> int:
        number = self._number(number)
        chunk = InputChunk(modality, payload, number, None, timestamp_ms, end)
        await self.connection.send(encode_input(chunk))
        return number

    async def say(self, text: str, **fields: Any) -> None:
        """A whole request."""
        await self.chunk(text, end=True, **fields)

    async def configure(self, **fields: Any) -> dict[str, Any]:
        await self.send("session_config", **fields)
        return await self.until("session_updated")

    def _number(self, number: int | None) -> int:
        if number is None:
            number = self.next_sequence_id
        self.next_sequence_id = max(self.next_sequence_id, number + 1)
        return number

    # receiving

    async def receive(self) -> dict[str, Any]:
        message = await self.message()
        if isinstance(message, bytes):
            audio = decode_output_audio(message)
            frame: dict[str, Any] = {
                "type": "output_chunk",
                "sequence_id": audio.sequence_id,
                "modality": "audio",
                "start_ms": audio.start_ms,
                "audio": audio.payload,
                "binary": True,
            }
        else:
            decode_server_frame(message)
            frame = orjson.loads(message)
            if "payload" in frame:
                frame["audio"] = base64.b64decode(frame["payload"])
        self.guarantees.check(frame)
        self.frames.append(frame)
        return frame

    async def error(self) -> dict[str, Any]:
        error: dict[str, Any] = (await self.until("error"))["error"]
        return error

    async def answer(self) -> Answer:
        """Everything up to the next final."""
        before = len(self.frames)
        while not (await self.receive()).get("final"):
            pass
        return Answer(self.frames[before:])

    async def barrier(self) -> dict[str, Any]:
        """Everything that was sent has been looked at."""
        token = os.urandom(4).hex()
        await self.send("ping", t=token)
        while (frame := await self.until("pong"))["t"] != token:
            pass
        return frame

    async def closed(self) -> int:
        """The code that the server closes with; what comes before it is passed over."""
        return (await self.close_of_server())[0]

    def gone(self) -> None:
        """Vanish without a word."""
        self.connection.transport.abort()


def connecting(server: Address, query: str = "", path: str = NATIVE, **options: Any) -> connect:
    usual = {"compression": None, "ping_interval": None, "max_size": None, "proxy": None, "close_timeout": 2}
    return connect(server.websocket_url.replace(NATIVE, path) + query, **{**usual, **options})


@contextlib.asynccontextmanager
async def native_client(
    server: Address,
    *,
    query: str = "",
    subprotocols: Sequence[str] | None = None,
    greeted: bool = True,
    **options: Any,
) -> AsyncIterator[NativeClient]:
    """A connected client; ``greeted`` says that a session is expected."""
    async with connecting(server, query, subprotocols=subprotocols, **options) as connection:
        client = NativeClient(connection)
        if greeted:
            client.created = await client.receive()
            assert client.created["type"] == "session_created"
        yield client


class RawWebSocket(RawClient):
    """A peer that sends exactly the frames it is told, and reads when it is told."""

    def __init__(self, client: RawClient) -> None:
        super().__init__(client.reader, client.writer)

    def send_now(self, *frames: bytes) -> None:
        """Without waiting for the kernel to take it."""
        self.writer.write(b"".join(frames))

    async def frame(self) -> tuple[Opcode, bytes]:
        head = await self.reader.readexactly(2)
        size = head[1] & 0x7F
        if size == 126:
            size = int.from_bytes(await self.reader.readexactly(2))
        elif size == 127:
            size = int.from_bytes(await self.reader.readexactly(8))
        return Opcode(head[0] & 0x0F), await self.reader.readexactly(size)

    async def until(self, type_: str) -> dict[str, Any]:
        while True:
            opcode, data = await self.frame()
            if opcode is Opcode.TEXT and (frame := orjson.loads(data))["type"] == type_:
                found: dict[str, Any] = frame
                return found

    async def close_code(self) -> int | None:
        """The code of the server's close frame; None where it only ends."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                opcode, data = await self.frame()
                if opcode is Opcode.CLOSE:
                    return Close.parse(data).code
        return None


def text(type_: str, **fields: Any) -> bytes:
    """The bytes of a masked text frame."""
    return frame_bytes(Opcode.TEXT, orjson.dumps({"type": type_, **fields}))


def frame_bytes(opcode: Opcode, data: bytes = b"", *, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


@contextlib.asynccontextmanager
async def raw_websocket(
    server: Address, *headers: str, query: str = "", behind: bytes = b"", **options: Any
) -> AsyncIterator[RawWebSocket]:
    """A handshake with ``behind`` in the same packet."""
    async with raw_client(server.port, **options) as client:
        await client.send(websocket_upgrade(NATIVE + query, *headers) + behind)
        _, status, _ = await client.head()
        assert status == 101
        yield RawWebSocket(client)
