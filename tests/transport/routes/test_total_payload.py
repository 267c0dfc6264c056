"""The limit on all input of a Mode A request or a Mode B session, however fast the engine takes it."""

from __future__ import annotations

from typing import Any, Final

import orjson
import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import create, text
from support.raw_http import RawResponse, chunked, content, events_of, post, raw_client, request

CHAT: Final = "/v1/chat/completions"
LIMIT: Final = {"max_total_payload_per_session": 10}


async def stream(server: LiveServer, *words: str, **parameters: Any) -> RawResponse:
    lines = [parameters, *({"text": word} for word in words)]
    return await post(server.port, CHAT, b"\n".join(map(orjson.dumps, lines)), "X-Streaming-Input: true")


async def test_a_streamed_body_at_the_limit_and_one_byte_past_it() -> None:
    async with live_server(streaming_input=LIMIT) as server:
        assert content(events_of(await stream(server, *"0123456789"))) == "0123456789"
        response = await stream(server, *"0123456789a", start_policy="on_end_only")
        assert (response.status, response.error["code"], response.error["param"]) == (
            413,
            "payload_too_large",
            "payload",
        )
        # The engine has taken and answered all input before it.
        async with raw_client(server.port) as client:
            head = request("POST", CHAT, "X-Streaming-Input: true", "Transfer-Encoding: chunked")
            await client.send(head, chunked(b'{"text":"0123456789"}\n', end=False))
            assert (await client.head())[1] == 200
            while b"0123456789" not in await client.chunk():
                pass
            await client.send(chunked(b'{"text":"a"}\n'))
            last = b"".join([chunk async for chunk in client.chunks()])
            assert last.startswith(b"event: error")
            assert b'"code":"payload_too_large"' in last


async def test_ordinary_bodies_have_their_own_limit() -> None:
    body = {"messages": [{"role": "user", "content": "0123456789 and more"}]}
    async with live_server(streaming_input=LIMIT) as server:
        assert (await post(server.port, CHAT, body)).status == 200


@pytest.mark.parametrize("numbered", [True, False])
async def test_a_session_at_the_limit_and_one_byte_past_it(numbered: bool) -> None:
    async with live_server(streaming_input=LIMIT) as server:
        session = await create(server, {"start_policy": "on_first_chunk"})
        for number, word in enumerate(("01234", "5678", "9")):
            status = await session.append(text(word, number if numbered else None))
        assert (status["received_bytes"], status["state"]) == (10, "started")
        response = await session.call("POST", "/chunks", text("a", 3 if numbered else None))
        assert (response.status, response.error["code"], response.error["param"]) == (
            413,
            "payload_too_large",
            "payload",
        )
        status = await session.status()
        assert (status["state"], status["error"]["code"]) == ("failed", "payload_too_large")
        for response in (await session.result(), await session.call("POST", "/chunks", text("b", 4))):
            assert (response.status, response.error["code"]) == (413, "payload_too_large")
        assert await session.delete() == 204


async def test_what_waits_behind_a_gap_counts_once_and_a_duplicate_does_not() -> None:
    async with live_server(streaming_input=LIMIT) as server:
        session = await create(server, {"start_policy": "on_end_only"})
        await session.append(text("56789", 1))
        await session.append(text("56789", 1))
        await session.append(text("01234", 0), text("01234", 0))
        assert (await session.append(text("", 2, end_of_input=True)))["duplicates"] == 2
        assert await session.content() == "0123456789"
        assert await session.delete() == 204
        session = await create(server, {"start_policy": "on_end_only"})
        await session.append(text("56789a", 1))
        response = await session.call("POST", "/chunks", text("01234", 0))
        assert (response.status, response.error["code"]) == (413, "payload_too_large")
        assert await session.delete() == 204
        session = await create(server)
        assert (await session.call("POST", "/chunks", text("0123456789a", 1))).status == 413
        assert await session.delete() == 204
