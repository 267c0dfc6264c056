"""Names under which other interfaces have their content are refused on every way in.

The table of all names is at the readers, in ``tests/wire/test_refused_content.py``.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
from support.live_server import live_server
from support.mode_b_client import create
from support.native_client import native_client
from support.raw_http import post

CHAT: Final = "/v1/chat/completions"
STREAMING: Final = "X-Streaming-Input: true"


def lines(*objects: dict[str, Any]) -> bytes:
    return b"\n".join(map(orjson.dumps, objects))


async def test_by_its_name_on_every_way_in() -> None:
    chunk = {"text": "a", "sequence_id": 0, "image_url": {"url": "https://example.com/a.png"}}
    async with live_server() as server:
        async with native_client(server) as client:
            await client.send("input_chunk", **chunk)
            error = await client.error()
            assert (error["code"], error["param"], error["sequence_id"]) == ("unsupported_parameter", "image_url", 0)
        response = await post(server.port, CHAT, lines(chunk), STREAMING)
        assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
        assert response.error["param"] == "image_url"
        session = await create(server)
        many = {"chunks": [{"text": "a", "sequence_id": 1}, {**chunk, "sequence_id": 2}]}
        for below, body, param in (("/chunks", chunk, "image_url"), ("/append", many, "chunks[1].image_url")):
            response = await session.call("POST", below, body)
            assert (response.status, response.error["code"]) == (400, "unsupported_parameter")
            assert response.error["param"] == param
        assert (await session.status())["next_sequence_id"] == 3  # a refused number is used up
        assert await session.delete() == 204
        opening = await post(server.port, "/v1/streaming_input/sessions", {"chunk": chunk})
        assert (opening.status, opening.error["param"]) == (400, "chunk.image_url")


async def test_a_first_line_of_nothing_else_is_meant_as_a_chunk() -> None:
    """As parameters it would be ignored."""
    async with live_server() as server:
        response = await post(server.port, CHAT, lines({"bytes": "hello"}, {"text": "a"}), STREAMING)
        assert (response.status, response.error["code"], response.error["param"]) == (
            400,
            "unsupported_parameter",
            "bytes",
        )
        opening = await post(server.port, "/v1/streaming_input/sessions", {"bytes": "hello"})
        assert (opening.status, opening.error["param"]) == (400, "bytes")


async def test_null_says_nothing() -> None:
    async with live_server() as server:
        assert (await post(server.port, CHAT, lines({"text": "a", "image_url": None}), STREAMING)).status == 200
