"""Incomplete input is charged to the server's budget: at the limit, one byte past it, and released."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import SESSIONS, mode_b
from support.native_client import frame_bytes, native_client, raw_websocket
from support.patience import PATIENCE_SEC
from support.raw_http import RawClient, chunked, raw_client, request
from websockets.frames import Opcode

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.wire.frames import encode_input

LIMIT = 100_000
LIMITS = {"max_held_bytes": LIMIT}
LINES = ("X-Streaming-Input: true", "Transfer-Encoding: chunked")


def audio(size: int) -> bytes:
    return encode_input(InputChunk(Modality.AUDIO, bytes(size), 0))


async def held(server: LiveServer, size: int) -> None:
    await server.until(lambda: server.held_bytes == size, f"{size} held bytes (now {server.held_bytes})")


# WebSocket


def half_a_frame() -> Iterator[bytes]:
    """A message that never ends, sent byte by byte."""
    yield frame_bytes(Opcode.BINARY, audio(2 * LIMIT))[:LIMIT]
    yield b"x"


def fragments() -> Iterator[bytes]:
    content = audio(2 * LIMIT)
    yield frame_bytes(Opcode.BINARY, content[: LIMIT // 2], fin=False)
    yield frame_bytes(Opcode.CONT, content[LIMIT // 2 : LIMIT], fin=False)
    yield frame_bytes(Opcode.CONT, b"x", fin=False)


def fragments_and_half_a_frame() -> Iterator[bytes]:
    content = audio(2 * LIMIT)
    yield frame_bytes(Opcode.BINARY, content[: LIMIT // 2], fin=False)
    frame = frame_bytes(Opcode.CONT, content[LIMIT // 2 :])
    yield frame[: 14 + LIMIT // 2]  # the header is parsed, and not held
    yield b"x"


UNFINISHED = pytest.mark.parametrize("unfinished", [half_a_frame, fragments, fragments_and_half_a_frame])


@UNFINISHED
async def test_a_message_that_has_not_come_whole(unfinished: type[Iterator[bytes]]) -> None:
    *parts, one_more = unfinished()
    async with live_server(limits=LIMITS) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(*parts)
        await held(server, LIMIT)
        await peer.send(one_more)
        error = (await peer.until("error"))["error"]
        assert (error["code"], error["retryable"], error["retry_after_ms"]) == ("engine_overloaded", True, 1000)
        assert server.held_bytes == 0
        # The rest is read and discarded, so that the client receives the close frame.
        await peer.send(bytes(LIMIT))
        assert await peer.close_code() == 1013


@UNFINISHED
@pytest.mark.parametrize("reset", [True, False])
async def test_all_of_it_is_given_back_when_clients_go(unfinished: type[Iterator[bytes]], reset: bool) -> None:
    *parts, _ = unfinished()
    limits = {"max_held_bytes": 10 * LIMIT}
    async with live_server(limits=limits) as server, AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(raw_websocket(server)) for _ in range(10)]
        for peer in peers:
            await peer.send(*parts)
        await held(server, 10 * LIMIT)
        async with native_client(server) as late:
            await late.binary(b"x")
            assert (await late.error())["code"] == "engine_overloaded"
            assert await late.closed() == 1013
        for peer in peers:
            if reset:
                peer.reset()
            else:
                await peer.close()
        await held(server, 0)


@pytest.mark.parametrize("cut", [1, 5, 20, LIMIT // 2])
async def test_a_message_is_not_counted_twice_when_it_is_whole(cut: int) -> None:
    frame = frame_bytes(Opcode.BINARY, audio(LIMIT - 100))
    async with live_server(limits=LIMITS) as server, raw_websocket(server) as peer:
        await peer.until("session_created")
        await peer.send(frame_bytes(Opcode.TEXT, b'{"type":"session_config","start_policy":"on_end_only"}'))
        await peer.until("session_updated")
        await peer.send(frame[:cut])
        await held(server, cut)
        await peer.send(frame[cut:])
        await peer.until("input_ack")
        assert server.held_bytes == LIMIT - 100


# HTTP

FORM_HEAD = b'--xXx\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
#: Head of a request, the beginning of its body, and a piece that exceeds the budget when it is repeated.
BODIES = {
    "JSON": (request("POST", "/v1/chat/completions", f"Content-Length: {2 * LIMIT}"), b'{"x":"'),
    "form": (
        request(
            *("POST", "/v1/audio/transcriptions", "Content-Type: multipart/form-data; boundary=xXx"),
            f"Content-Length: {2 * LIMIT}",
        ),
        FORM_HEAD,
    ),
    "first line": (request("POST", "/v1/chat/completions", *LINES), b'{"x":"'),
    "session": (request("POST", SESSIONS, f"Content-Length: {2 * LIMIT}"), b'{"x":"'),
    "frame": (
        request(
            *("POST", "/v1/chat/completions", "Transfer-Encoding: chunked"),
            "Content-Type: application/x-multipart-streaming; framing=length32",
        ),
        (2 * LIMIT).to_bytes(4) + b'{"x":"',
    ),
}


async def send_body(client: RawClient, head: bytes, data: bytes) -> None:
    await client.send(chunked(data, end=False) if b"chunked" in head else data)


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_that_has_not_come_whole(kind: str) -> None:
    head, beginning = BODIES[kind]
    async with live_server(limits=LIMITS) as server, raw_client(server.port) as client:
        await client.send(head)
        await send_body(client, head, beginning + b"x" * (LIMIT - len(beginning)))
        await held(server, LIMIT)
        await send_body(client, head, b"x")
        response = await client.response()
        assert (response.status, response.error["code"]) == (503, "engine_overloaded")
        assert response.headers["retry-after"] == "1"
        await held(server, 0)


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("reset", [True, False])
async def test_a_body_is_given_back_when_its_client_goes(kind: str, reset: bool) -> None:
    head, beginning = BODIES[kind]
    async with live_server(limits=LIMITS) as server:
        async with raw_client(server.port) as client:
            await client.send(head)
            await send_body(client, head, beginning + bytes(LIMIT // 2))
            await held(server, len(beginning) + LIMIT // 2)
            if reset:
                client.reset()
        await held(server, 0)


async def test_a_line_counts_until_it_is_a_chunk() -> None:
    line = b'{"modality":"audio","payload":"%b"}' % (b"AAAA" * 10_000)
    async with live_server(limits=LIMITS) as server, raw_client(server.port) as client:
        target = "/v1/chat/completions"
        await client.send(request("POST", target, *LINES), chunked(b'{"start_policy":"on_end_only"}\n', end=False))
        for number in range(1, 3):
            await client.send(chunked(line, end=False))
            await held(server, 30_000 * (number - 1) + len(line))
            await client.send(chunked(b"\n", end=False))
            await held(server, 30_000 * number)
        client.reset()


async def test_a_refused_body_leaves_its_session_as_it_was() -> None:
    async with live_server(limits=LIMITS) as server, mode_b(server, {"start_policy": "on_end_only"}) as session:
        refused = await session.call("POST", "/chunks", {"sequence_id": 0, "text": "x" * LIMIT})
        assert (refused.status, refused.error["code"]) == (503, "engine_overloaded")
        await session.append({"sequence_id": 0, "text": "short", "end_of_input": True})
        assert await session.content() == "short"


async def test_what_others_hold_is_no_room() -> None:
    """A fragmented WebSocket message and an upload are charged to one budget."""
    async with live_server(limits=LIMITS) as server, raw_websocket(server) as peer, raw_client(server.port) as client:
        await peer.send(frame_bytes(Opcode.BINARY, audio(2 * LIMIT))[: LIMIT // 2])
        await held(server, LIMIT // 2)
        head, beginning = BODIES["JSON"]
        async with asyncio.timeout(PATIENCE_SEC):
            await client.send(head, beginning + bytes(LIMIT // 2))
            assert (await client.response()).status == 503
        assert server.held_bytes == LIMIT // 2
