"""Chunks with an offset in place of a number, in Mode A and Mode B."""

from __future__ import annotations

import asyncio
import base64
import random
from typing import Any, Final

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import create, mode_b
from support.native_client import native_client
from support.raw_http import RawResponse, content, events_of, post

from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import Finished, GenerationRequest, OutputWriter, TextOutput
from omni_ws.engine.fake import EchoEngine

CHAT: Final = "/v1/chat/completions"
WORDS: Final = "the quick brown fox jumps over the lazy dog, näturlich 😀"
AUDIO: Final = bytes(range(256)) * 40
AT_THE_END: Final = {"start_policy": "on_end_only"}


def text(start: int, stop: int, **fields: Any) -> dict[str, Any]:
    return {"offset": start, "text": WORDS[start:stop], **fields}


def audio(start: int, stop: int, **fields: Any) -> dict[str, Any]:
    return {"offset": start, "payload": base64.b64encode(AUDIO[start:stop]).decode(), **fields}


async def stream(server: LiveServer, *lines: dict[str, Any]) -> RawResponse:
    return await post(server.port, CHAT, b"\n".join(map(orjson.dumps, lines)), "X-Streaming-Input: true")


class ByteCounter(EchoEngine):
    """Echoes its input, in base64."""

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        whole = b"".join([chunk.payload async for chunk in request.input])
        out.write(TextOutput(base64.b64encode(whole).decode()))
        out.write(Finished(FinishReason.STOP, Usage()))


def shuffled(size: int, make: Any) -> list[dict[str, Any]]:
    """Pieces that overlap and repeat, in a fixed random order."""
    chance = random.Random(4)
    starts = range(0, size, 7)
    pieces = [make(max(0, start - chance.randrange(5)), min(size, start + 9)) for start in [*starts, *starts]]
    chance.shuffle(pieces)
    return pieces


async def test_a_streamed_body_in_any_order() -> None:
    async with live_server() as server:
        answer = await stream(server, AT_THE_END, *shuffled(len(WORDS), text))
        assert content(events_of(answer)) == WORDS
        answer = await stream(server, text(0, 5), text(3, 9), text(9, len(WORDS), end_of_input=True))
        assert content(events_of(answer)) == WORDS


async def test_the_bytes_of_audio_wherever_they_are_cut() -> None:
    async with live_server(ByteCounter()) as server:
        pieces = [audio(start, start + 301) for start in range(0, len(AUDIO), 257)]
        answer = await stream(server, *reversed(pieces))
        assert base64.b64decode(content(events_of(answer))) == AUDIO


async def test_a_gap_that_is_left_at_the_end_of_the_body() -> None:
    async with live_server() as server:
        for lines in ((text(3, 9),), (text(0, 3), {"offset": 9, "end_of_input": True})):
            response = await stream(server, AT_THE_END, *lines)
            assert (response.status, response.error["code"], response.error["param"]) == (408, "sequence_gap", "offset")


@pytest.mark.parametrize(
    ("lines", "status", "code", "param"),
    [
        ([text(0, 3), {"text": "a"}], 400, "invalid_value", "offset"),
        ([text(0, 3), {"text": "a", "sequence_id": 1}], 400, "invalid_value", "offset"),
        ([{"text": "a"}, text(1, 3)], 400, "invalid_value", "offset"),
        ([{"text": "a", "sequence_id": 0}, text(1, 3)], 400, "invalid_value", "offset"),
        ([text(0, 3, sequence_id=0)], 400, "invalid_value", "offset"),
        ([text(0, 3), audio(3, 9)], 400, "invalid_value", "modality"),
        ([text(0, 3), {"offset": 3, "modality": "text", "payload": "YQ=="}], 400, "invalid_value", "offset"),
        ([{"offset": 0, "modality": "image", "payload": "YQ=="}], 400, "invalid_value", "offset"),
        ([{"offset": 0, "modality": "video", "payload": "/9j/4AAQ"}], 400, "invalid_value", "offset"),
        ([{"offset": 0, "text": "a", "role": "tool", "tool_call_id": "x"}], 400, "invalid_value", "offset"),
        ([{"offset": -1, "text": "a"}], 400, "invalid_value", "offset"),
        ([{"offset": "0", "text": "a"}], 400, "invalid_value", "offset"),
        ([text(0, 3, end_of_input=True), text(3, 9)], 409, "session_conflict", "offset"),
        ([text(3, 9), text(0, 3, end_of_input=True)], 409, "session_conflict", "offset"),
        ([text(0, 1), *[text(n, n + 1) for n in (3, 5, 7)]], 422, "reorder_window_exceeded", "offset"),
        ([{"out_of_order": "reject"}, text(3, 9)], 409, "out_of_order", "offset"),
    ],
)
async def test_what_is_refused(lines: list[dict[str, Any]], status: int, code: str, param: str) -> None:
    first, *rest = lines
    parameters, chunks = (first, rest) if "out_of_order" in first else ({}, lines)
    async with live_server(streaming_input={"reorder_window_chunks": 2}) as server:
        response = await stream(server, {**AT_THE_END, **parameters}, *chunks)
    assert (response.status, response.error["code"], response.error["param"]) == (status, code, param)
    assert response.error["message"].startswith("line ")


async def test_a_video_is_a_stream_of_bytes() -> None:
    async with live_server(ByteCounter()) as server:
        pieces = [
            {"offset": 2, "modality": "video", "payload": "/9j/4AAQ"},
            {"offset": 0, "modality": "video", "payload": "AAA="},
        ]
        answer = await stream(server, AT_THE_END, *pieces)
        assert content(events_of(answer)) == base64.b64encode(b"\0\0" + base64.b64decode("/9j/4AAQ")).decode()


async def test_a_session_in_any_order_over_any_requests() -> None:
    async with live_server() as server, mode_b(server, AT_THE_END) as session:
        assert session.created["next_offset"] is None
        status = await session.append(text(9, 20))
        assert (status["next_offset"], status["buffered_chunks"], status["received_bytes"]) == (0, 1, 0)
        status = await session.append(text(9, 20), text(12, 15))
        assert (status["duplicates"], status["buffered_chunks"]) == (2, 1)
        status = await session.append(text(0, 12), text(18, len(WORDS)))
        assert (status["next_offset"], status["buffered_chunks"]) == (len(WORDS), 0)
        assert status["received_bytes"] == len(WORDS.encode())
        assert not status["input_ended"]
        assert (await session.finish())["input_ended"]
        # A retry is a duplicate; more is a conflict.
        assert (await session.append(text(0, 12)))["duplicates"] == 3
        response = await session.call("POST", "/chunks", {"offset": len(WORDS), "text": "!"})
        assert (response.status, response.error["code"]) == (409, "session_conflict")
        assert await session.content() == WORDS


async def test_a_refused_chunk_leaves_its_place_free() -> None:
    async with live_server() as server, mode_b(server, AT_THE_END) as session:
        await session.append(text(0, 4))
        response = await session.call("POST", "/chunks", {"offset": 4, "text": "a", "format": "audio/wav"})
        assert (response.status, response.error["param"]) == (400, "format")
        response = await session.call("POST", "/chunks", {"sequence_id": 7, "text": 5})
        assert response.status == 400
        await session.append(text(4, len(WORDS), end_of_input=True))
        assert await session.content() == WORDS


async def test_a_session_whose_pieces_are_too_many() -> None:
    async with live_server(streaming_input={"reorder_window_chunks": 2}) as server:
        session = await create(server)
        await session.append(text(2, 3), text(4, 5))
        response = await session.call("POST", "/chunks", text(6, 7))
        assert (response.status, response.error["code"]) == (422, "reorder_window_exceeded")
        assert (await session.status())["state"] == "failed"
        assert server.held_bytes == 0
        assert await session.delete() == 204


@pytest.mark.virtual_clock
async def test_the_time_of_a_gap_begins_with_the_end() -> None:
    async with live_server(streaming_input={"reorder_timeout_sec": 5}) as server:
        session = await create(server, AT_THE_END)
        await session.append(text(4, 9))
        await asyncio.sleep(200)
        assert (await session.finish())["expires_in"] == 5
        response = await session.result(wait=60)
        assert (response.status, response.error["code"], response.error["param"]) == (408, "sequence_gap", "offset")
        assert await session.delete() == 204


async def test_a_websocket_has_numbers_alone() -> None:
    async with live_server() as server, native_client(server) as client:
        await client.raw('{"type":"input_chunk","sequence_id":0,"offset":0,"text":"a"}')
        error = await client.error()
        assert (error["code"], error["param"], error["sequence_id"]) == ("unsupported_parameter", "offset", 0)
