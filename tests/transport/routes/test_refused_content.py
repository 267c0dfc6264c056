"""Unknown fields of a chunk are refused by name, on every transport."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pytest
from support.live_server import live_server
from support.mode_b_client import create
from support.native_client import native_client
from support.raw_http import post

from omni_ws.wire.chunk_fields import CHUNK_ONLY_FIELDS, REFUSED_CONTENT_FIELDS

CHAT: Final = "/v1/chat/completions"
STREAMING: Final = "X-Streaming-Input: true"
URL: Final = "https://example.com/a.wav"


def lines(*objects: dict[str, Any]) -> bytes:
    return b"\n".join(map(orjson.dumps, objects))


def test_the_names_that_other_interfaces_have() -> None:
    assert {"url", "audio", "image_url", "data", "content", "input_audio"} <= REFUSED_CONTENT_FIELDS
    assert {"b64_json", "file_data", "file_url", "uri", "bytes", "chunk", "frames", "token_ids"} <= CHUNK_ONLY_FIELDS


@pytest.mark.parametrize("name", sorted(REFUSED_CONTENT_FIELDS))
async def test_by_its_name_on_every_way_in(name: str) -> None:
    values: tuple[Any, ...] = (URL, {"url": URL}, [], 0, False)
    async with live_server() as server:
        for value in values:
            chunk: dict[str, Any] = {"text": "a", "sequence_id": 0, name: value}
            async with native_client(server) as client:
                await client.send("input_chunk", **chunk)
                error = await client.error()
                assert (error["code"], error["param"], error["sequence_id"]) == ("unsupported_parameter", name, 0)
            for objects in ((chunk,), ({"voice": None}, chunk)):
                response = await post(server.port, CHAT, lines(*objects), STREAMING)
                assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
                assert response.error["param"] == name
            session = await create(server)
            many = {"chunks": [{"text": "a", "sequence_id": 1}, {**chunk, "sequence_id": 2}]}
            # A body with ``chunks`` is none itself.
            one = (chunk, name) if name != "chunks" else ({"chunks": [chunk]}, f"chunks[0].{name}")
            for below, body, param in (("/chunks", *one), ("/append", many, f"chunks[1].{name}")):
                response = await session.call("POST", below, body)
                assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
                assert response.error["param"] == param
            assert (await session.status())["next_sequence_id"] == 3  # a refused number is used up
            assert await session.delete() == 204
            opening = await post(server.port, "/v1/streaming_input/sessions", {"chunk": chunk})
            assert (opening.status, opening.error["param"]) == (400, f"chunk.{name}")


async def test_null_says_nothing() -> None:
    chunk = {"text": "a", **dict.fromkeys(REFUSED_CONTENT_FIELDS)}
    async with live_server() as server:
        assert (await post(server.port, CHAT, lines(chunk), STREAMING)).status == 200


@pytest.mark.parametrize("name", sorted(CHUNK_ONLY_FIELDS))
async def test_a_first_line_of_nothing_else_is_meant_as_a_chunk(name: str) -> None:
    """As parameters it would be ignored."""
    async with live_server() as server:
        response = await post(server.port, CHAT, lines({name: "hello"}, {"text": "a"}), STREAMING)
        assert (response.status, response.error["code"], response.error["param"]) == (
            400,
            "unsupported_parameter",
            name,
        )
        opening = await post(server.port, "/v1/streaming_input/sessions", {name: "hello"})
        assert (opening.status, opening.error["param"]) == (400, name)
