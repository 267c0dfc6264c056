"""Keys and limits over HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.raw_http import DONE, RawResponse, chunked, events_of, post, raw_client, request
from support.scripted_engines import ToneEngine
from websockets.asyncio.client import connect

from omni_ws.config.keys import ApiKey, digest
from omni_ws.engine.base import TextOutput
from omni_ws.engine.fake import ScriptedEngine

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
BODIES: dict[str, Any] = {CHAT: {"messages": [{"role": "user", "content": "hello"}]}, SPEECH: {"input": "hello"}}
KEYS = (ApiKey(name="one", key_sha256=digest("sesame")), ApiKey(name="two", key_sha256=digest("open"), max_sessions=1))


async def get(server: LiveServer, target: str, *headers: str) -> RawResponse:
    async with raw_client(server.port) as client:
        await client.send(request("GET", target, *headers))
        return await client.response()


UNKNOWN_KEYS: list[tuple[str, ...]] = [
    (),
    ("Authorization: Bearer wrong",),
    ("Authorization: Bearer",),
    ("Authorization: Bearer ",),
    ("Authorization: sesame",),
    ("Authorization: Basic sesame",),
    ("Authorization: Bearer sesame extra",),
    ("Authorization: Bearer Sesame",),
    ("X-Api-Key: sesame",),
    ("Authorization: Bearer \xff\xfe",),
]


async def test_without_a_known_key_there_is_nothing() -> None:
    async with live_server(keys=KEYS) as server:
        for headers in UNKNOWN_KEYS:
            answers = [await get(server, path, *headers) for path in ("/v1/models", "/v1/models/fake")]
            answers.append(await post(server.port, "/v1/audio/translations", b"--x--", *headers))
            for path, body in BODIES.items():
                answers.append(await post(server.port, path, body, *headers))
                answers.append(await post(server.port, path, body, "X-Streaming-Input: true", *headers))
                # The key is checked before the body is read.
                answers.append(await post(server.port, path, b"{", "Accept: text/event-stream", *headers))
            for response in answers:
                assert response.status == 401, headers
                assert response.headers["www-authenticate"] == "Bearer", headers
                assert (response.error["code"], response.error["type"]) == (
                    "unauthenticated",
                    "authentication_error",
                ), headers
                assert b"sesame" not in response.body, headers


async def test_a_key_among_the_subprotocols_is_for_handshakes() -> None:
    async with live_server(keys=KEYS) as server:
        for prefix in ("omni-api-key.", "openai-insecure-api-key."):
            header = f"Sec-WebSocket-Protocol: {prefix}sesame"
            assert (await get(server, "/v1/models", header)).status == 401
            assert (await post(server.port, CHAT, BODIES[CHAT], header)).status == 401


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_with_a_key_there_is_everything(scheme: str) -> None:
    async with live_server(keys=KEYS) as server:
        header = f"Authorization: {scheme} sesame"
        assert (await get(server, "/v1/models", header)).status == 200
        assert (await get(server, "/v1/models/fake", header)).status == 200
        for path, body in BODIES.items():
            assert (await post(server.port, path, body, header)).status == 200
        answer = await post(server.port, CHAT, b'{"text":"a"}', "X-Streaming-Input: true", header)
        assert events_of(answer)[-1] == DONE


async def test_open_routes_need_no_key() -> None:
    async with live_server(keys=KEYS) as server:
        for path in ("/", "/health", "/openapi.json"):
            assert (await get(server, path)).status == 200
            assert (await get(server, path, "Authorization: Bearer wrong")).status == 200
        async with raw_client(server.port) as client:
            await client.send(request("OPTIONS", CHAT))
            assert (await client.response()).status == 204


@pytest.mark.parametrize("header", ["Authorization: Bearer anything", "Authorization: Basic x", "Authorization:"])
async def test_without_keys_what_is_presented_is_ignored(header: str) -> None:
    async with live_server() as server:
        assert (await post(server.port, CHAT, BODIES[CHAT], header)).status == 200


async def test_an_upload_without_a_key_is_refused_before_it_is_sent() -> None:
    async with live_server(keys=KEYS) as server, raw_client(server.port) as client:
        headers = ("X-Streaming-Input: true", "Transfer-Encoding: chunked", "Expect: 100-continue")
        await client.send(request("POST", CHAT, *headers))
        response = await client.response()
        assert (response.status, response.interim) == (401, [])


async def test_a_key_has_so_many_sessions_at_a_time() -> None:
    gate = asyncio.Event()
    second = "Authorization: Bearer open"
    async with live_server(ScriptedEngine([gate.wait, TextOutput("a")]), keys=KEYS) as server:
        first = asyncio.create_task(post(server.port, CHAT, BODIES[CHAT], second))
        await server.until(lambda: server.engine.active_requests == 1)
        for path, body in BODIES.items():
            for streaming in ((), ("X-Streaming-Input: true",)):
                response = await post(server.port, path, body, second, "Accept: text/event-stream", *streaming)
                assert (response.status, response.error["code"]) == (429, "rate_limited")
                assert response.error["type"] == "rate_limit_error"
                assert int(response.headers["retry-after"]) >= 1
        assert (await get(server, "/v1/models", second)).status == 200
        # Another key has limits of its own.
        other = asyncio.create_task(post(server.port, CHAT, BODIES[CHAT], "Authorization: Bearer sesame"))
        await server.until(lambda: server.engine.active_requests == 2)
        gate.set()
        assert (await first).status == (await other).status == 200
        assert (await post(server.port, CHAT, BODIES[CHAT], second)).status == 200


async def test_a_server_has_so_many_sessions_at_a_time() -> None:
    async with live_server(limits={"max_sessions": 2}) as server:
        async with raw_client(server.port) as one, raw_client(server.port) as two:
            for client, path in ((one, CHAT), (two, SPEECH)):
                await client.send(request("POST", path, "X-Streaming-Input: true", "Transfer-Encoding: chunked"))
                # A session without content would give its place up.
                await client.send(chunked(b'{"text":"a"}\n', end=False))
            await server.until(lambda: server.sessions == 2)
            for streaming in ((), ("X-Streaming-Input: true",)):
                response = await post(server.port, CHAT, BODIES[CHAT], *streaming)
                assert (response.status, response.error["code"]) == (503, "engine_overloaded")
                assert int(response.headers["retry-after"]) >= 1
            # Routes without sessions still respond.
            assert (await get(server, "/health")).json()["sessions"] == 2
            await two.send(chunked(b'{"text":"a"}\n'))
            assert (await two.response()).status == 200
        await server.until(lambda: server.sessions == 0)
        assert (await post(server.port, CHAT, BODIES[CHAT])).status == 200


async def test_a_refused_request_gives_its_place_back() -> None:
    async with live_server(limits={"max_sessions": 1}) as server:
        for body in (b"{", b"{}", b'{"n":2}'):
            assert (await post(server.port, CHAT, body)).status == 400
            assert (await post(server.port, CHAT, b'{"n":2}\n', "X-Streaming-Input: true")).status == 400
        assert (await post(server.port, CHAT, BODIES[CHAT])).status == 200


@pytest.mark.slow
async def test_openai_package_with_a_key() -> None:
    openai = pytest.importorskip("openai", reason="the openai package is not installed")
    async with live_server(keys=KEYS) as server:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="sesame", max_retries=0) as client:
            completion = await client.chat.completions.create(model="local-model", **BODIES[CHAT])
            assert completion.choices[0].message.content == "hello"
        async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(model="local-model", **BODIES[CHAT])


async def test_the_engine_knows_whose_request_it_is() -> None:
    engine = ToneEngine()
    async with live_server(engine, keys=KEYS) as server:
        for key in ("sesame", "open"):
            for path, body in BODIES.items():
                assert (await post(server.port, path, body, f"Authorization: Bearer {key}")).status == 200
        async with connect(server.websocket_url, additional_headers={"Authorization": "Bearer open"}) as socket:
            await socket.recv()
            await socket.send('{"type": "input_chunk", "sequence_id": 0, "text": "hello", "end_of_input": true}')
            while '"final":true' not in str(await socket.recv()):
                pass
    assert [request.owner for request in engine.requests] == ["one", "one", "two", "two", "two"]


async def test_without_keys_there_is_no_owner() -> None:
    engine = ToneEngine()
    async with live_server(engine) as server:
        assert (await post(server.port, CHAT, BODIES[CHAT])).status == 200
    assert [request.owner for request in engine.requests] == [None]
