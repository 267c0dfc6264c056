"""Clients that hold places and give nothing for them keep nobody out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import pytest
from support.commands import server_process
from support.live_server import LiveServer, live_server
from support.mode_b_client import EVENTS, SESSIONS, create, text
from support.native_client import Address, native_client
from support.raw_http import RawClient, call, chunked, post, raw_client, request
from support.realtime_client import realtime_client
from support.telephones import asterisk_call, phone_gateway

from omni_ws.audio.container import wav_header
from omni_ws.caller.script import beside
from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import ShuttingDown
from omni_ws.service.sessions import admission
from omni_ws.service.sessions.admission import EMPTY_SEC

CHAT = "/v1/chat/completions"
Attack = Callable[[int, int], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def empty_sessions(port: int, count: int) -> AsyncIterator[None]:
    """Opens so many sessions of Mode B over one connection, and goes on opening one for each answer."""

    async def opened(client: RawClient, times: int | None = None) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while times is None or (times := times - 1) >= 0:
                await client.send(request("POST", SESSIONS))
                await client.response()

    async with raw_client(port) as client:
        await opened(client, count)
        async with beside(opened(client)):
            yield


@asynccontextmanager
async def trickled_bodies(port: int, count: int) -> AsyncIterator[None]:
    """So many bodies of requests at a time, a byte a second of each."""
    head = request("POST", CHAT, "Content-Type: application/json", "Content-Length: 1000")

    async def trickle(client: RawClient) -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                await client.send(b" ")
                await asyncio.sleep(1)

    async with AsyncExitStack() as open_:
        for _ in range(count):
            client = await open_.enter_async_context(raw_client(port))
            await client.send(head, b"{")
            await open_.enter_async_context(beside(trickle(client)))
        yield


async def innocent(server: Address, rounds: int) -> list[bool]:
    """A turn over a WebSocket, a chat, and a session of Mode B, one after the other: whether each was served."""
    return [await use(server) for _ in range(rounds) for use in (_talk, _chat, _session)]


async def _talk(server: Address) -> bool:
    async with native_client(server) as client:
        await client.say("hello")
        return (await client.answer()).reason == "stop"


async def _chat(server: Address) -> bool:
    return (await post(server.port, CHAT, {"messages": [{"role": "user", "content": "hello"}]})).status == 200


async def _session(server: Address) -> bool:
    """Opened without input, which comes later, as applications do."""
    session = await create(server)
    await session.append(text("hello", end_of_input=True))
    return (await session.result()).status == 200


BODY = b'{"messages":[{"role":"user","content":"hello"}]}'
STREAMING = "X-Streaming-Input: true"
WAV = wav_header(sample_rate=16_000, channels=1, data_bytes=320) + bytes(320)
GOING = ShuttingDown("the server is shutting down")


@pytest.mark.parametrize("attack", [empty_sessions, trickled_bodies])
async def test_others_are_served_during_an_attack(attack: Attack) -> None:
    async with live_server(limits={"max_sessions": 20}) as server:
        async with attack(server.port, 20):
            assert all(await innocent(server, 3))
        server.app.registry.end_all(GOING)


@pytest.mark.slow
@pytest.mark.real_time
@pytest.mark.parametrize("attack", [empty_sessions, trickled_bodies])
async def test_others_are_served_during_an_attack_at_full_size(attack: Attack) -> None:
    with server_process() as server:
        async with attack(server.port, 1000):
            assert all(await innocent(server, 10))


# sessions without input


async def test_the_oldest_session_without_input_makes_room_and_its_id_says_so() -> None:
    async with live_server(limits={"max_sessions": 3}) as server:
        fed, oldest, younger = await create(server), await create(server), await create(server)
        await fed.append(text("a", 0))
        assert (await oldest.status())["state"] == "open"  # while there is room nothing is ended
        newest = await create(server)
        assert server.sessions == 3
        for method, below in (("GET", ""), ("POST", "/chunks"), ("GET", "/result"), ("DELETE", "")):
            answer = await oldest.call(method, below, text("late", 0) if method == "POST" else None)
            assert (answer.status, answer.error["code"]) == (410, "session_expired")
            assert "was evicted" in answer.error["message"]
        for session in (fed, younger, newest):
            assert (await session.status())["state"] in ("open", "started")
            assert await session.delete() == 204


async def test_content_behind_a_gap_keeps_a_session() -> None:
    async with live_server(limits={"max_sessions": 1}) as server:
        session = await create(server, {"chunk": text("b", 1)})
        refused = await call(server.port, "POST", SESSIONS)
        assert (refused.status, refused.error["code"]) == (503, "engine_overloaded")
        assert await session.delete() == 204


async def test_a_chunk_without_content_keeps_no_session() -> None:
    async with live_server(limits={"max_sessions": 1}) as server:
        session = await create(server, {"chunk": text("", 0)})
        assert (await post(server.port, CHAT, BODY)).status == 200
        assert (await session.call("GET")).status == 410


async def test_who_reads_a_session_that_makes_room_hears_of_it() -> None:
    async with live_server(limits={"max_sessions": 1}) as server:
        session = await create(server)
        async with native_client(server, query=f"?session_id={session.id}", greeted=False) as attached:
            reading = asyncio.create_task(session.call("GET", "/result", None, EVENTS))
            registered = server.app.registry.get(session.id, None)
            await server.until(lambda: registered._readers == 2)
            assert (await post(server.port, CHAT, BODY)).status == 200
            answer = await reading
            assert (answer.status, answer.error["code"]) == (408, "session_timeout")
            assert (await attached.until("session_closing"))["reason"] == "session_timeout"
            assert await attached.closed() == 4408


# sessions of every other kind without content, while places are short

Holder = Callable[[LiveServer], AbstractAsyncContextManager[Callable[[], Awaitable[None]]]]


@contextlib.asynccontextmanager
async def _native(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with native_client(server) as client:
        await client.configure(voice=None)  # which is no content

        async def told() -> None:
            assert (await client.until("session_closing"))["reason"] == "session_timeout"
            assert await client.closed() == 4408

        yield told


@contextlib.asynccontextmanager
async def _reset(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Its connection is gone, and nobody comes back."""
    async with native_client(server) as client:
        client.connection.transport.abort()
        await server.until(lambda: server.native.sessions_away == 1)

        async def told() -> None:
            pass

        yield told


@contextlib.asynccontextmanager
async def _realtime(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with realtime_client(server) as client:
        await client.update(instructions="Be brief.")

        async def told() -> None:
            assert (await client.close_of_server())[0] == 4408

        yield told


@contextlib.asynccontextmanager
async def _stream(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with phone_gateway(server) as gateway:
        await gateway.start()

        async def told() -> None:
            assert (await gateway.close_of_server())[0] == 4408

        yield told


@contextlib.asynccontextmanager
async def _asterisk(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with asterisk_call(server) as call_:
        await call_.identify()
        yield call_.hung_up


@contextlib.asynccontextmanager
async def _streamed_body(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with raw_client(server.port) as live:
        await live.send(request("POST", CHAT, STREAMING, "Transfer-Encoding: chunked"), chunked(b"{", end=False))

        async def told() -> None:
            answer = await live.response()
            assert (answer.status, answer.error["code"]) == (408, "session_timeout")

        yield told


@contextlib.asynccontextmanager
async def _parameters_alone(server: LiveServer) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    async with raw_client(server.port) as live:
        await live.send(request("POST", CHAT, STREAMING, "Transfer-Encoding: chunked"))
        await live.send(chunked(b'{"stream": false}\n', end=False))

        async def told() -> None:
            answer = await live.response()
            assert (answer.status, answer.error["code"]) == (408, "session_timeout")

        yield told


@pytest.mark.parametrize("holder", [_native, _reset, _realtime, _stream, _asterisk, _streamed_body, _parameters_alone])
async def test_a_session_of_any_kind_that_sent_nothing_makes_room(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    telephony = {"enabled": True, "audiosocket_port": 0}
    streaming = {"resume_grace_sec": 30}
    limits = {"max_sessions": 1}
    async with (
        live_server(limits=limits, telephony=telephony, streaming_input=streaming) as server,
        holder(server) as told,
    ):
        await server.until(lambda: server.sessions == 1)
        later = asyncio.get_running_loop().time() + EMPTY_SEC
        monkeypatch.setattr(admission, "_now", lambda: later)
        assert (await post(server.port, CHAT, BODY)).status == 200
        await told()


@pytest.mark.virtual_clock
async def test_who_comes_meanwhile_waits_until_such_a_session_may_go() -> None:
    now = asyncio.get_running_loop().time
    async with live_server(limits={"max_sessions": 2}) as server, native_client(server) as oldest:
        begun = now()
        await asyncio.sleep(1)
        async with native_client(server) as younger:
            await younger.say("hello")  # and keeps its place
            await younger.answer()
            async with native_client(server, greeted=False) as waiting:
                assert (await waiting.receive())["type"] == "session_created"
                assert now() >= begun + EMPTY_SEC
                assert await oldest.closed() == 4408


# bodies


async def test_a_head_takes_no_place() -> None:
    async with live_server(limits={"max_sessions": 1}) as server, raw_client(server.port) as head:
        await head.send(request("POST", CHAT, "Content-Type: application/json", "Content-Length: 100"))
        await server.until(lambda: server.running._connections.busy == 1)
        async with native_client(server):
            assert server.sessions == 1


@pytest.mark.parametrize(
    ("headers", "content"),
    [
        ([STREAMING, "Content-Type: application/x-ndjson"], b'{"text": "hello"}\n'),
        ([STREAMING, "Content-Type: audio/pcm"], b"{"),
        (["Content-Type: application/x-ndjson"], b'{"text": "hello"}\n'),
        (["Content-Type: application/x-www-form-urlencoded"], b'{"text": "hello"}\n'),
        (["Content-Type: application/x-www-form-urlencoded"], WAV),
    ],
)
async def test_a_streamed_body_has_its_place_from_its_first_byte(headers: list[str], content: bytes) -> None:
    async with live_server(limits={"max_sessions": 1}) as server, raw_client(server.port) as live:
        await live.send(request("POST", CHAT, "Transfer-Encoding: chunked", *headers))
        await server.until(lambda: server.running._connections.busy == 1)
        assert server.sessions == 0
        await live.send(chunked(content, end=False))
        await server.until(lambda: server.sessions == 1)
        assert (await post(server.port, CHAT, BODY)).status == 503


async def test_an_ordinary_body_lends_its_place_until_it_is_whole() -> None:
    async with live_server(limits={"max_sessions": 1}) as server, raw_client(server.port) as slow:
        head = request("POST", CHAT, "Content-Type: application/json", f"Content-Length: {len(BODY)}")
        await slow.send(head, BODY[:1])
        await server.until(lambda: server.sessions == 1)
        async with native_client(server) as other:
            assert server.sessions == 1
            await slow.send(BODY[1:])
            refused = await slow.response()
            assert (refused.status, refused.error["code"]) == (503, "engine_overloaded")
            await other.say("hello")
            assert (await other.answer()).text == "hello"
        await server.until(lambda: server.sessions == 0)
        await slow.send(head, BODY[:1])
        await server.until(lambda: server.sessions == 1)
        assert (await post(server.port, CHAT, BODY)).status == 200
        await slow.send(BODY[1:])
        assert (await slow.response()).status == 200


# shares


async def test_one_address_has_a_share() -> None:
    """As a proxy tells it, and on each front."""
    async with live_server(limits={"max_sessions": 4}, trusted_proxies=("127.0.0.1",)) as server:
        mine = [
            await create(server, {"chunk": text("a", 0)}, f"X-Forwarded-For: {spoofed}, 198.51.100.1")
            for spoofed in ("203.0.113.1", "203.0.113.2")
        ]
        refused = await call(server.port, "POST", SESSIONS, None, "X-Forwarded-For: 198.51.100.1")
        assert (refused.status, refused.error["code"]) == (429, "rate_limited")
        assert "retry-after" in refused.headers
        assert (await post(server.port, CHAT, BODY, "X-Forwarded-For: 198.51.100.1")).status == 429
        headers = {"X-Forwarded-For": "198.51.100.1"}
        async with native_client(server, additional_headers=headers, greeted=False) as client:
            assert (await client.error())["code"] == "rate_limited"
            assert await client.closed() == 4429
        assert (await post(server.port, CHAT, BODY, "X-Forwarded-For: 198.51.100.2")).status == 200
        assert (await post(server.port, CHAT, BODY)).status == 200  # the proxy itself is not one client
        for session in mine:
            assert await session.delete() == 204


async def test_nobody_else_says_whose_address_it_is() -> None:
    async with live_server(limits={"max_sessions": 2}) as server:
        for number in range(2):
            await create(server, {"chunk": text("a", 0)}, "X-Forwarded-For: 198.51.100.1")
            assert server.sessions == number + 1
        server.app.registry.end_all(GOING)


async def test_one_key_has_a_share() -> None:
    keys = tuple(ApiKey(name=name, key_sha256=digest(name)) for name in ("one", "two"))
    one, two = ("Authorization: Bearer one", "Authorization: Bearer two")
    async with live_server(keys=keys, limits={"max_sessions": 4}) as server:
        mine = [await create(server, {"chunk": text("a", 0)}, one) for _ in range(2)]
        assert (await post(server.port, CHAT, BODY, one)).status == 429
        assert (await post(server.port, CHAT, BODY, two)).status == 200
        for session in mine:
            assert await session.delete() == 204
