"""A server that does what a test tells it, frame by frame: one script for each connection that comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from support.golden_frames import vectors
from support.patience import PATIENCE_SEC
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from omni_ws.core.chunks import AudioFormat, FinishReason, InputChunk, OutputChunk, OutputModality
from omni_ws.errors import OmniError
from omni_ws.wire.frames import ClientFrame, ConfigPatch, decode_frame, decode_input, encode_output_audio
from omni_ws.wire.server_frames import (
    InputAckFrame,
    OutputChunkFrame,
    ResponseStartedFrame,
    ServerFrame,
    SessionClosingFrame,
    SessionCreatedFrame,
    SessionUpdatedFrame,
    UsageFields,
    decode_server_frame,
    encode_frame,
    error_frame,
)
from omni_ws.wire.session_config import effective

USAGE = UsageFields(
    input_tokens=1, output_tokens=2, total_tokens=3, input_audio_ms=4, output_audio_ms=5, input_after_start_bytes=6
)


def created(number: int = 0, *, max_chunk_bytes: int = 4 << 20) -> SessionCreatedFrame:
    golden = decode_server_frame(vectors("server_frames")[0]["frame"])
    assert isinstance(golden, SessionCreatedFrame)
    limits = replace(golden.limits, max_chunk_bytes=max_chunk_bytes)
    return replace(golden, session_id=f"sess_{number}", model="scripted", limits=limits)


class Peer:
    """One connection, from the server's side."""

    def __init__(self, websocket: ServerConnection, number: int) -> None:
        self.websocket = websocket
        self.number = number
        self.output_sequence_id = 0
        self.close = websocket.close
        self.until_closed = websocket.wait_closed
        #: The cable is cut.
        self.drop = websocket.transport.abort

    async def send(self, frame: ServerFrame) -> None:
        await self.websocket.send(encode_frame(frame), text=True)

    async def create(self, **options: Any) -> None:
        await self.send(created(self.number, **options))

    async def receive(self) -> ClientFrame:
        message = await self.websocket.recv()
        if isinstance(message, bytes):
            return decode_input(message)
        return decode_frame(message.encode())

    async def chunk(self) -> InputChunk:
        frame = await self.receive()
        assert isinstance(frame, InputChunk), frame
        return frame

    async def request(self) -> list[InputChunk]:
        """The chunks of a request, up to its end."""
        chunks = [await self.chunk()]
        while not chunks[-1].end_of_input:
            chunks.append(await self.chunk())
        return chunks

    async def configuration(self) -> dict[str, Any]:
        """Grant whatever is asked for."""
        return await self.grant(await self.receive())

    async def grant(self, frame: ClientFrame) -> dict[str, Any]:
        assert isinstance(frame, ConfigPatch), frame
        config = effective(frame.fields)
        fields = {name: getattr(config, name) for name in config.__struct_fields__}
        await self.send(SessionUpdatedFrame(**fields))
        return frame.fields

    async def ack(self, next_sequence_id: int, *, credit_bytes: int = 1 << 20, buffered_chunks: int = 0) -> None:
        counts: dict[str, Any] = {"buffered_chunks": buffered_chunks, "received_bytes": 0, "credit_bytes": credit_bytes}
        await self.send(InputAckFrame(next_sequence_id=next_sequence_id, **counts))

    def _number(self) -> int:
        self.output_sequence_id += 1
        return self.output_sequence_id - 1

    async def started(self, request_id: str, sequence_id: int | None = 0, **names: Any) -> None:
        fields: dict[str, Any] = {"trigger": "end_of_input", "input_mode": "extend", **names}
        await self.send(ResponseStartedFrame(request_id=request_id, sequence_id=sequence_id, **fields))

    async def output(self, request_id: str, modality: str | UnsetType = UNSET, **fields: Any) -> None:
        number = self._number()
        await self.send(OutputChunkFrame(request_id=request_id, sequence_id=number, modality=modality, **fields))

    async def binary_audio(self, request_id: str, payload: bytes, start_ms: int) -> None:
        chunk = OutputChunk(
            request_id=request_id,
            sequence_id=self._number(),
            modality=OutputModality.AUDIO,
            payload=payload,
            format=AudioFormat(),
            start_ms=start_ms,
        )
        await self.websocket.send(encode_output_audio(chunk))

    async def final(self, request_id: str, reason: FinishReason = FinishReason.STOP, **names: Any) -> None:
        await self.output(request_id, final=True, finish_reason=reason, usage=USAGE, **names)

    async def error(self, error: OmniError) -> None:
        await self.send(error_frame(error))

    async def closing(self, reason: str, *, retryable: bool = True) -> None:
        await self.send(SessionClosingFrame(reason=reason, retryable=retryable, time_left_ms=0))


Script = Callable[[Peer], Awaitable[None]]


@asynccontextmanager
async def scripted_server(*scripts: Script, options: dict[str, Any] | None = None) -> AsyncIterator[str]:
    """Yields the URL. A script that fails fails the test; connections without a script are dropped."""
    failures: list[BaseException] = []
    remaining: list[tuple[int, Script]] = list(enumerate(scripts))

    async def handle(websocket: ServerConnection) -> None:
        if not remaining:
            websocket.transport.abort()
            return
        number, script = remaining.pop(0)
        try:
            await script(Peer(websocket, number))
        except ConnectionClosed:
            pass  # the client went while the script still had something to say
        except Exception as error:
            failures.append(error)
            raise

    subprotocols: Sequence[Any] = ("omni.v1+binary", "omni.v1+json")
    settings: dict[str, Any] = {"subprotocols": subprotocols, "compression": None, **(options or {})}
    async with serve(handle, "127.0.0.1", 0, **settings) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield f"ws://127.0.0.1:{port}/v1/streaming_input"
        finally:
            server.close()
            await asyncio.wait_for(server.wait_closed(), PATIENCE_SEC)
    if failures:
        raise failures[0]
