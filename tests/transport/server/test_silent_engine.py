"""A client that goes while the engine is silent, and perhaps while nothing of it is read: the work for it ends soon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest
from support.http_server import tls_contexts
from support.live_server import LiveServer, live_server
from support.native_client import frame_bytes, native_client, raw_websocket
from support.raw_http import RawClient, chunked, raw_client, request
from websockets.frames import Close, Opcode

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, Usage
from omni_ws.engine.base import AudioOutput, Finished, GenerationRequest, OutputWriter
from omni_ws.engine.fake import EchoEngine
from omni_ws.service.conversation.request import INPUT_QUEUE_BYTES
from omni_ws.wire.frames import encode_input

pytestmark = pytest.mark.virtual_clock

SPEECH: Final = request(
    *("POST", "/v1/audio/speech?start_policy=on_first_chunk", "X-Streaming-Input: true"),
    *("Content-Type: audio/pcm", "Transfer-Encoding: chunked"),
)
EVENTS: Final = SPEECH.replace(b"?", b"?stream_format=sse&")
#: More than the input queue, the unread body and one read of the server hold together.
FLOOD_BYTES: Final = 4 << 20
#: Virtual seconds in which the engine must be told.
SOON_SEC: Final = 5.0


class SilentEngine(EchoEngine):
    """Takes no input and says nothing until ``gate`` is set; then it counts its input, and answers as many samples."""

    def __init__(self, *, first: bool = False) -> None:
        super().__init__()
        self.first = first
        self.gate = asyncio.Event()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.active_requests += 1
        try:
            if self.first:
                out.write(AudioOutput(np.zeros(2_400, np.float32), 24_000))
            await self.gate.wait()
            size = 0
            async for chunk in request.input:
                size += len(chunk.payload)
            out.write(AudioOutput(np.zeros(size // 2, np.float32), 24_000))
            out.write(Finished(FinishReason.STOP, Usage()))
        finally:
            self.active_requests -= 1


def now() -> float:
    return asyncio.get_running_loop().time()


async def works(server: LiveServer) -> None:
    await server.until(lambda: server.engine.active_requests == 1, "the work")


async def work_ends_soon(server: LiveServer, *, since: float, within: float = SOON_SEC) -> None:
    while server.engine.active_requests:
        assert now() < since + within, "the engine works for nobody"
        await asyncio.sleep(0.1)


# HTTP


async def upload(client: RawClient, size: int, *, end: bool) -> None:
    """As much as the kernel takes; the rest is sent when, and if, the server reads on."""
    client.writer.write(SPEECH + chunked(*([bytes(65_536)] * (size // 65_536)), end=end))


async def is_not_read(server: LiveServer) -> None:
    """Nothing has come any more for a while."""
    seen = -1
    while seen != (seen := server.held_bytes):  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0.01)
    assert seen > INPUT_QUEUE_BYTES


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["heard", "unheard"])
@pytest.mark.parametrize("ended", [True, False], ids=["whole", "cut"])
@pytest.mark.parametrize("head", [SPEECH, EVENTS], ids=["audio", "events"])
async def test_a_client_that_has_uploaded_goes(reset: bool, first: bool, ended: bool, head: bytes) -> None:
    async with live_server(SilentEngine(first=first)) as server:
        async with raw_client(server.port) as client:
            await client.send(head, chunked(bytes(3200), end=ended))
            await works(server)
            if first:
                assert (await client.head())[1] == 200
                await client.chunk()
            if reset:
                client.reset()
        await work_ends_soon(server, since=now())


@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize("first", [True, False], ids=["heard", "unheard"])
async def test_a_client_goes_that_is_not_being_read(reset: bool, first: bool) -> None:
    async with live_server(SilentEngine(first=first)) as server:
        async with raw_client(server.port) as client:
            await upload(client, FLOOD_BYTES, end=True)
            await works(server)
            await is_not_read(server)
            if reset:
                client.reset()
        await work_ends_soon(server, since=now())


@pytest.mark.parametrize("size", [65_536, FLOOD_BYTES], ids=["read", "not read"])
@pytest.mark.parametrize("first", [True, False], ids=["heard", "unheard"])
@pytest.mark.parametrize("head", [SPEECH, EVENTS], ids=["audio", "events"])
async def test_a_client_that_only_ends_its_upload_is_waited_for(size: int, first: bool, head: bytes) -> None:
    """A half-closed connection, for a minute: what asks whether the client is there does no harm to the answer."""
    engine = SilentEngine(first=first)
    async with live_server(engine) as server, raw_client(server.port) as client:
        client.writer.write(head + chunked(*([bytes(65_536)] * (size // 65_536))))
        client.finish_sending()
        await works(server)
        await asyncio.sleep(60)
        assert engine.active_requests == 1
        engine.gate.set()
        answer = await client.response()
        assert answer.status == 200
        if head == SPEECH:
            assert len(answer.body) == size + 4_800 * first
        else:
            assert b'"speech.audio.done"' in answer.body
        assert await client.rest() == b""


@pytest.mark.parametrize("first", [True, False], ids=["heard", "unheard"])
async def test_a_client_goes_over_tls_that_is_not_being_read(first: bool, tmp_path: Path) -> None:
    """There the end of the sending side is the end."""
    _, trusting = tls_contexts(tmp_path)
    certificate, key = tmp_path / "certificate.pem", tmp_path / "certificate.pem"
    engine = SilentEngine(first=first)
    async with live_server(engine, still_answers=False, ssl_certfile=certificate, ssl_keyfile=key) as server:
        async with raw_client(server.port, tls=trusting) as client:
            await upload(client, FLOOD_BYTES, end=True)
            await works(server)
            await is_not_read(server)
            client.writer.transport.abort()
        await work_ends_soon(server, since=now())


async def test_an_old_client_that_only_ends_its_upload() -> None:
    """HTTP/1.0 has no chunks, and nothing that could be sent in between."""
    engine = SilentEngine(first=True)
    async with live_server(engine) as server, raw_client(server.port) as client:
        head = SPEECH.replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"Transfer-Encoding: chunked", b"Content-Length: 3200")
        await client.send(head, bytes(3200))
        client.finish_sending()
        await works(server)
        await asyncio.sleep(60)
        engine.gate.set()
        assert len((await client.response()).body) == 4_800 + 3_200


# WebSocket


def audio(number: int, size: int) -> bytes:
    return frame_bytes(Opcode.BINARY, encode_input(InputChunk(Modality.AUDIO, bytes(size), number)))


def closing() -> bytes:
    return frame_bytes(Opcode.CLOSE, Close(1000, "").serialize())


KEY = (ApiKey(name="ann", key_sha256=digest("ann"), input_bytes_per_sec=1_000),)
START = b'{"type":"session_config","start_policy":"on_first_chunk"}'


@contextlib.asynccontextmanager
async def rests(server: LiveServer, *, paced: bool) -> AsyncIterator[RawClient]:
    """A client that the server does not read for minutes, with more on its way."""
    async with raw_websocket(server, "Authorization: Bearer ann") as peer:
        await peer.send(frame_bytes(Opcode.TEXT, START), audio(0, 320))
        await works(server)
        (connection,) = server.connections
        number = 1
        while connection.is_reading:
            await peer.send(audio(number, 8_192))
            await asyncio.sleep(0)
            number += 1
            assert number * 8_192 < FLOOD_BYTES, "the server reads on"
        await peer.send(audio(number, 8_192))  # little enough for the kernel to take, with the end behind it
        assert connection.held_to_pace is paced
        await asyncio.sleep(0.5)  # what is acknowledged after the client has gone would reset the connection
        yield peer


@pytest.mark.parametrize("how", ["reset", "end", "close"])
@pytest.mark.parametrize("paced", [True, False], ids=["pace", "engine behind"])
async def test_a_websocket_goes_that_is_not_being_read(how: str, paced: bool) -> None:
    async with live_server(SilentEngine(), keys=KEY if paced else ()) as server:
        async with rests(server, paced=paced) as client:
            if how == "close":
                client.writer.write(closing())
            if how == "reset":
                client.reset()
        await work_ends_soon(server, since=now())


@pytest.mark.parametrize("how", ["end", "close"])
@pytest.mark.parametrize("paced", [True, False], ids=["pace", "engine behind"])
async def test_only_who_says_so_gives_up_the_session(how: str, paced: bool) -> None:
    """A connection that is lost may come back; one that was closed in good order does not, and its frame was unread."""
    fields = {"resume_grace_sec": 30}
    async with live_server(SilentEngine(), keys=KEY if paced else (), streaming_input=fields) as server:
        async with rests(server, paced=paced) as client:
            if how == "close":
                client.writer.write(closing())
        gone = now()
        await server.until(lambda: not server.connections, "the end of the connection")
        assert now() < gone + SOON_SEC
        await asyncio.sleep(SOON_SEC)
        assert server.engine.active_requests == (how == "end")
        assert server.native.sessions_away == (how == "end")
        await asyncio.sleep(30)


async def test_a_websocket_that_rests_and_is_there() -> None:
    engine = SilentEngine()
    async with live_server(engine) as server, native_client(server) as client:
        await client.configure(start_policy="on_first_chunk", modalities=["audio"])
        for _ in range(40):
            await client.binary(bytes(65_536))
        await works(server)
        await asyncio.sleep(60)
        engine.gate.set()
        await client.chunk(end=True)
        answer = await client.answer()
        assert (answer.reason, len(answer.audio)) == ("stop", 40 * 65_536)


async def test_a_websocket_goes_with_more_unread_than_the_kernel_takes() -> None:
    """The end of what it sent never arrives: only the next ping shows that nobody is there."""
    async with live_server(SilentEngine(), keys=KEY) as server:
        async with rests(server, paced=True) as client:
            client.writer.write(audio(1_000, 16 << 20))
            await asyncio.sleep(0)
            client.writer.transport.abort()
        await work_ends_soon(server, since=now(), within=20 + SOON_SEC)
