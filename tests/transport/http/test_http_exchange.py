"""Exchanges over real sockets: bodies, responses, refusals, and the connection after them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import pytest
from support.http_server import RoutedApplication, serving
from support.patience import PATIENCE_SEC
from support.raw_http import RawClient, chunked, raw_client, request

from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import (
    EngineFailed,
    EngineOverloaded,
    InvalidValue,
    OmniError,
    RateLimited,
    SlowConsumer,
    Unauthenticated,
    UpgradeRequired,
)
from omni_ws.transport.http.application import HttpLimits
from omni_ws.transport.http.connections import PeerGone
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")


async def hello(exchange: HttpExchange) -> None:
    await exchange.respond(200, [("Content-Type", "text/plain")], b"hello")


async def measure(exchange: HttpExchange) -> None:
    body = await exchange.read_body(1000)
    await exchange.respond_json(200, {"received": len(body)})


async def ignore_body(exchange: HttpExchange) -> None:
    await exchange.respond_json(200, {"read": False})


async def stream(exchange: HttpExchange) -> None:
    await exchange.start(200, [("Content-Type", "text/event-stream")])
    for word in (b"one", b"two"):
        await exchange.write(word)
    await exchange.end()


APPLICATION = RoutedApplication(
    handlers={"GET /": hello, "POST /measure": measure, "POST /ignore": ignore_body, "GET /stream": stream},
    origins=frozenset({"https://good.example"}),
)


def only(handler: object) -> RoutedApplication:
    """An application whose one route, for GET and POST, is ``handler``."""
    return RoutedApplication(handlers={"GET /": handler, "POST /": handler})  # type: ignore[dict-item]


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_SEC):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


async def until_lost(client: RawClient) -> None:
    """Wait until the server has ended the connection, by a close or by a reset."""
    async with asyncio.timeout(PATIENCE_SEC):
        await client.rest()


async def test_response_has_date_and_server() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        response = await client.response()
        assert (response.status, response.body, response.headers["content-length"]) == (200, b"hello", "5")
        assert response.headers["server"] == "omni_ws"
        assert parsedate_to_datetime(response.headers["date"]).year >= 2024
        assert "connection" not in response.headers


async def test_every_response_has_the_date_of_its_second(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        for second in (1_000_000_000.9, 1_000_000_000.9, 1_000_000_001.0):
            monkeypatch.setattr("omni_ws.transport.http.exchange.time.time", lambda second=second: second)
            await client.send(request("GET", "/"))
            date = (await client.response()).headers["date"]
            assert parsedate_to_datetime(date).timestamp() == int(second)


async def test_the_head_and_the_first_content_are_one_write() -> None:
    async def begin(exchange: HttpExchange) -> None:
        assert (exchange.startable, exchange.writable) == (True, False)
        exchange.start_now(200, [("Content-Type", "text/plain")], content=b"one")
        assert (exchange.startable, exchange.writable) == (False, True)
        exchange.write_now(b"two")
        await exchange.end()

    async with serving(only(begin)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert (await client.response()).body == b"onetwo"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        bodies = [b"x" * size for size in range(20)]
        await client.send(b"".join(request("POST", "/measure", f"Content-Length: {len(b)}", body=b) for b in bodies))
        assert [(await client.response()).json()["received"] for _ in bodies] == list(range(20))


async def test_pipelined_request_waits_for_the_one_before() -> None:
    running: list[int] = []
    most: list[int] = []
    release = asyncio.Event()

    async def slow(exchange: HttpExchange) -> None:
        running.append(1)
        most.append(len(running))
        await release.wait()
        running.pop()
        await exchange.respond(200)

    async with serving(only(slow)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/") * 3)
        await until(lambda: bool(running))
        release.set()
        assert [(await client.response()).status for _ in range(3)] == [200] * 3
        assert most == [1, 1, 1]


async def test_too_many_pipelined_bytes_stop_the_reading() -> None:
    release = asyncio.Event()

    async def slow(exchange: HttpExchange) -> None:
        await release.wait()
        await exchange.respond(200)

    one = request("GET", "/", "X-Padding: " + "x" * 1000)
    async with serving(only(slow)) as door, raw_client(door.port) as client:
        client.writer.write(one * 20_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.writer.drain()
        release.set()
        for _ in range(1000):
            assert (await client.response()).status == 200
        client.reset()


async def test_head_gives_the_headers_of_get_and_no_body() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("HEAD", "/"), request("HEAD", "/stream"), request("GET", "/"))
        whole, streamed = [await client.response(to_head=True) for _ in range(2)]
        assert (whole.status, whole.headers["content-length"]) == (200, "5")
        assert (streamed.status, streamed.headers["transfer-encoding"]) == (200, "chunked")
        assert (await client.response()).body == b"hello"


async def test_head_of_an_error_has_no_body() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("HEAD", "/nowhere"))
        assert (await client.response(to_head=True)).status == 404
        await client.send(request("HEAD", "/../up"))
        assert (await client.response(to_head=True)).status == 400
        assert await client.rest() == b""


async def test_garbage_after_a_head_request_is_refused_with_a_body() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("HEAD", "/"), b"garbage\r\n\r\n")
        assert (await client.response(to_head=True)).status == 200
        assert (await client.response()).error["code"] == "invalid_frame"


async def test_http_1_0_gets_its_stream_until_close() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(b"GET /stream HTTP/1.0\r\n\r\n")
        response = await client.response()
        assert (response.body, response.headers["connection"]) == (b"onetwo", "close")
        assert "transfer-encoding" not in response.headers


async def test_absolute_form_target() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("GET", f"http://127.0.0.1:{door.port}/stream?x=1"))
        assert (await client.response()).body == b"onetwo"


async def test_not_found_and_method_not_allowed_are_json() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/nowhere"), request("DELETE", "/stream"))
        missing, refused = await client.response(), await client.response()
        assert (missing.status, missing.error["code"], missing.error["type"]) == (
            404,
            "not_found",
            "invalid_request_error",
        )
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
        assert set(refused.error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("error", "status", "error_type", "headers"),
    [
        (InvalidValue("no", param="voice"), 400, "invalid_request_error", {}),
        (Unauthenticated("no"), 401, "authentication_error", {"www-authenticate": "Bearer"}),
        (UpgradeRequired("no"), 426, "invalid_request_error", {"upgrade": "websocket"}),
        (RateLimited("no", retry_after_ms=1001), 429, "rate_limit_error", {"retry-after": "2"}),
        (EngineOverloaded("no"), 503, "server_error", {"retry-after": "1"}),
        (EngineFailed("no"), 500, "server_error", {}),
    ],
)
async def test_error_becomes_its_response(
    error: OmniError, status: int, error_type: str, headers: dict[str, str]
) -> None:
    async def fail(exchange: HttpExchange) -> None:
        async with asyncio.TaskGroup():
            raise error

    async with serving(only(fail)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/") * 2)
        for _ in range(2):  # the connection is reused
            response = await client.response()
            assert response.status == status
            assert response.error == {"message": "no", "type": error_type, "param": error.param, "code": error.code}
            assert headers.items() <= response.headers.items()
        assert ("retry-after" in response.headers) == ("retry-after" in headers)


async def test_error_without_a_status_drops_the_connection() -> None:
    async def fail(exchange: HttpExchange) -> None:
        raise SlowConsumer("too slow")

    async with serving(only(fail)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert await client.rest() == b""


async def test_unexpected_exception_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(exchange: HttpExchange) -> None:
        raise ConnectionResetError("the secret of another connection")

    async with serving(only(fail)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        response = await client.response()
        assert (response.status, response.error["code"]) == (500, "engine_failed")
        assert b"secret" not in response.body
        error_id = response.error["message"].split()[-1].rstrip(".")
        assert error_id.startswith("err_")
        (record,) = [record for record in caplog.records if error_id in record.getMessage()]
        assert record.exc_info is not None
        assert record.exc_info[0] is ConnectionResetError


async def test_handler_without_a_response_is_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def forget(exchange: HttpExchange) -> None:
        await exchange.read_body(10)

    async with serving(only(forget)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert (await client.response()).status == 500
        assert "returned without a response" in caplog.text


@pytest.mark.parametrize("error", [RuntimeError("late"), InvalidValue("late")])
async def test_failure_after_the_head_cuts_the_response_short(error: Exception) -> None:
    async def fail(exchange: HttpExchange) -> None:
        await exchange.start(200)
        await exchange.write(b"some")
        raise error

    async with serving(only(fail)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        received = await client.rest()
        assert b"late" not in received
        assert not received.endswith(b"0\r\n\r\n")


async def test_invalid_response_of_a_handler_is_a_failure() -> None:
    async def inject(exchange: HttpExchange) -> None:
        await exchange.respond(200, [("X-Injected", "a\r\nSet-Cookie: b")])

    async def overrun(exchange: HttpExchange) -> None:
        await exchange.start(200, [("Content-Length", "3")])
        await exchange.write(b"four")

    async with serving(only(inject)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        response = await client.response()
        assert response.status == 500
        assert "set-cookie" not in response.headers
    async with serving(only(overrun)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert b"four" not in await client.rest()


# Bodies


@pytest.mark.parametrize("size", [0, 999, 1000])
async def test_body_up_to_its_limit(size: int) -> None:
    body = b"b" * size
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", f"Content-Length: {size}", body=body))
        assert (await client.response()).json() == {"received": size}
        await client.send(request("POST", "/measure", "Transfer-Encoding: chunked"), chunked(*[b"b"] * size))
        assert (await client.response()).json() == {"received": size}


async def test_too_large_body_is_refused_at_its_announcement() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Content-Length: 1001", "Expect: 100-continue"))
        response = await client.response()
        assert (response.status, response.error["code"], response.interim) == (413, "payload_too_large", [])
        assert response.headers["connection"] == "close"


async def test_too_large_body_is_refused_when_it_shows() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Transfer-Encoding: chunked"), chunked(b"b" * 1001, end=False))
        assert (await client.response()).status == 413


@pytest.mark.parametrize("ended", [True, False])
async def test_a_body_that_was_pushed_back_is_read_in_pieces_and_charged_until_then(ended: bool) -> None:
    """What works through a body piece by piece would otherwise copy the rest of it for each."""
    budget = ByteBudget(1 << 20)
    body = bytes(range(256)) * 1200
    charged: list[int] = []
    again = bytearray()

    async def read_twice(exchange: HttpExchange) -> None:
        exchange.limit_input(None, Share(budget))
        first = bytearray()
        while len(first) < len(body):
            first += await exchange.read()
        exchange.push_back(first, ended=False)
        while len(again) < len(body):
            piece = await exchange.read()
            assert 0 < len(piece) <= 64 * 1024
            exchange.charge(0)
            charged.append(budget.used)
            again.extend(piece)
        if ended:
            exchange.push_back(bytearray(), ended=True)
            assert await exchange.read() == b""
        assert await exchange.read() == b""
        exchange.push_back(bytearray(b"not read again"), ended=True)
        exchange.charge(0)
        assert budget.used == 14
        await exchange.respond(200)

    async with serving(only(read_twice)) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/", f"Content-Length: {len(body)}", body=body))
        assert (await client.response()).status == 200
    assert again == body
    assert charged == sorted(charged, reverse=True)
    assert charged[0] >= len(body) - 64 * 1024
    assert (charged[-1], budget.used) == (0, 0)


async def test_refusal_reaches_a_client_that_is_still_sending() -> None:
    """Without lingering, the kernel would reset the connection, and the client would lose the 413."""
    size = 8 * 1024 * 1024
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", f"Content-Length: {size}", body=b"b" * size))
        assert (await client.response()).status == 413
        assert await client.rest() == b""


async def test_lingering_has_a_bound_in_bytes() -> None:
    limits = HttpLimits(linger_bytes=100_000)
    async with serving(APPLICATION, limits=limits) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Content-Length: 100000000"))
        assert (await client.response()).status == 413
        with pytest.raises(ConnectionError):
            await client.send(*[b"b" * 100_000] * 1000)


async def test_response_before_the_body_closes_the_connection() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/ignore", "Content-Length: 4"))
        response = await client.response()
        assert (response.status, response.headers["connection"]) == (200, "close")
        await client.send(b"body", request("GET", "/"))
        assert await client.rest() == b""


async def test_unread_body_that_has_arrived_does_no_harm() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/ignore", body=b"body") * 2)
        assert [(await client.response()).status for _ in range(2)] == [200, 200]


async def test_streamed_response_before_the_end_of_the_body_closes() -> None:
    async def early(exchange: HttpExchange) -> None:
        await exchange.start(200)
        await exchange.write(await exchange.read())

    async with serving(only(early)) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/", "Transfer-Encoding: chunked"), chunked(b"part", end=False))
        assert (await client.response()).body == b"part"
        assert await client.rest() == b""


async def test_unread_body_stops_the_reading() -> None:
    reading = asyncio.Event()
    sizes: list[int] = []

    async def late_reader(exchange: HttpExchange) -> None:
        await reading.wait()
        async for part in exchange.body():
            sizes.append(len(part))
        await exchange.respond(200)

    total = 30_000_000
    async with serving(only(late_reader)) as door, raw_client(door.port) as client:
        client.writer.write(request("POST", "/", body=b"b" * total))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.writer.drain()
        reading.set()
        assert (await client.response()).status == 200
    assert sum(sizes) == total
    assert max(sizes) <= 64 * 1024 + 256 * 1024  # the high-water mark and one read of the loop


@pytest.mark.counts_passes
async def test_tiny_chunks_are_coalesced_and_leave_others_their_turn() -> None:
    parts: list[int] = []
    turns = 0

    async def read(exchange: HttpExchange) -> None:
        async for part in exchange.body():
            parts.append(len(part))
        await exchange.respond(200)

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    chunks = 20_000
    async with serving(only(read)) as door, raw_client(door.port) as client:
        client.writer.write(request("POST", "/", "Transfer-Encoding: chunked") + chunked(*[b"a"] * chunks))
        counting = asyncio.create_task(count_turns())
        assert (await client.response()).status == 200
        counting.cancel()
        await client.send(request("GET", "/"))
        assert (await client.response()).status == 200
    assert sum(parts) == chunks
    assert len(parts) <= chunks // 100
    assert turns >= chunks // 256


async def test_100_continue_is_sent_when_the_body_is_first_read() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Expect: 100-continue", "Content-Length: 4"))
        _, status, _ = await client.head()
        assert status == 100
        await client.send(b"body")
        response = await client.response()
        assert (response.json(), response.interim) == ({"received": 4}, [])


async def test_no_100_continue_where_the_body_is_not_wanted_or_is_there() -> None:
    async with serving(APPLICATION) as door:
        async with raw_client(door.port) as client:
            await client.send(request("POST", "/ignore", "Expect: 100-continue", "Content-Length: 4"))
            response = await client.response()
            assert (response.status, response.interim, response.headers["connection"]) == (200, [], "close")
        async with raw_client(door.port) as client:
            await client.send(request("POST", "/measure", "Expect: 100-continue", body=b"body"))
            assert (await client.response()).interim == []
            await client.send(request("POST", "/measure", "Expect: miracles", body=b"body"))
            assert (await client.response()).status == 200


@pytest.mark.parametrize("coding", ["gzip", "identity, BR", "deflate"])
async def test_encoded_bodies_are_refused_by_name(coding: str) -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", f"Content-Encoding: {coding}", body=b"\x1f\x8b"))
        response = await client.response()
        assert (response.status, response.error["code"]) == (415, "unsupported_format")
        assert coding.split()[-1] in response.error["message"]
        assert response.headers["accept-encoding"] == "identity"
        await client.send(request("POST", "/measure", "Content-Encoding: identity", body=b"ab"))
        assert (await client.response()).json() == {"received": 2}


@pytest.mark.parametrize(
    "broken",
    [b"zz\r\nab\r\n", b"-1\r\n", b"2\r\nabcd\r\n", b"f" * 21 + b"\r\n", b"0\r\nBad Trailer\r\n\r\n", b"1 1\r\n"],
)
async def test_broken_chunks_are_refused(broken: bytes) -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Transfer-Encoding: chunked"), broken)
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_frame")
        assert response.headers["connection"] == "close"
        await client.send(b"\r\nmore")
        assert await client.rest() == b""


async def test_body_cut_off_by_its_sender_is_refused() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Content-Length: 10", body=b"half"))
        client.finish_sending()
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_frame")


# Malformed requests


NO_REQUESTS: list[bytes] = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"garbage\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nBad Name: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nSpace : y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\nNul: a\0b\r\n\r\n",
    b"GET / HTTP/3.0\r\nHost: x\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /a\x01b HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /a\0b HTTP/1.1\r\nHost: x\r\n\r\n",
    request("GET", "/a%00b"),
    request("GET", "/a%0d%0ab"),
    request("GET", "/%ff"),
    request("GET", "/a/../b"),
    request("GET", "/a/%2e%2E/b"),
    request("GET", "/?q=%00"),
    request("GET", "/?q=%ff"),
    request("GET", "/?" + "&".join("a=b" for _ in range(257))),
    request("GET", "/#fragment"),
    request("GET", "nowhere"),
    request("GET", "ftp://host/"),
    request("CONNECT", "example.org:443"),
    request("POST", "/measure", "Content-Length: 3", "Content-Length: 4", body=b"abc"),
    request("POST", "/measure", "Content-Length: -1"),
    request("POST", "/measure", "Content-Length: 0x3"),
    request("POST", "/measure", "Transfer-Encoding: chunked", "Content-Length: 3") + b"0\r\n\r\n",
    request("POST", "/measure", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n",
    request("POST", "/measure", "Transfer-Encoding: chunked").replace(b"1.1", b"1.0") + b"0\r\n\r\n",
]


async def test_what_is_not_a_request_is_refused() -> None:
    async with serving(APPLICATION) as door:
        for sent in NO_REQUESTS:
            async with raw_client(door.port) as client:
                await client.send(sent)
                response = await client.response()
                assert (response.status, response.error["code"]) == (400, "invalid_frame"), sent
                assert (response.headers["connection"], response.headers["content-type"]) == (
                    "close",
                    "application/json",
                ), sent
                assert await client.rest() == b"", sent


async def test_tls_on_a_plain_port_is_told_so() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(b"\x16\x03\x01\x02\x00")
        assert "TLS" in (await client.response()).error["message"]


def head_of(size: int) -> bytes:
    padding = size - len(request("GET", "/", "X-Padding: "))
    head = request("GET", "/", "X-Padding: " + "x" * padding)
    assert len(head) == size
    return head


@pytest.mark.parametrize("packet", [1, 1000, 100_000])
async def test_head_up_to_its_limit(packet: int) -> None:
    limits = HttpLimits(max_header_bytes=2000)
    async with serving(APPLICATION, limits=limits) as door, raw_client(door.port) as client:
        for size, status in ((1999, 200), (2000, 200), (2001, 431)):
            head = head_of(size)
            for start in range(0, size, packet):
                await client.send(head[start : start + packet])
                await asyncio.sleep(0)
            response = await client.response()
            assert response.status == status
        assert response.error["code"] == "header_too_large"
        assert await client.rest() == b""


async def test_endless_head_is_refused() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(b"GET / HTTP/1.1\r\nA: " + b"a" * 40_000)
        assert (await client.response()).status == 431


# Origins


async def test_cors_headers_for_an_allowed_origin_only() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/", "Origin: https://good.example"))
        response = await client.response()
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        assert response.headers["vary"] == "Origin"
        await client.send(request("GET", "/nowhere", "Origin: https://good.example"))
        assert (await client.response()).headers["access-control-allow-origin"] == "https://good.example"
        await client.send(request("GET", "/", "Origin: https://evil.example"))
        response = await client.response()
        assert response.status == 200
        assert "access-control-allow-origin" not in response.headers
        assert response.headers["vary"] == "Origin"


async def test_foreign_pages_change_nothing() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("POST", "/measure", "Origin: https://evil.example", "Content-Length: 0"))
        response = await client.response()
        assert (response.status, response.error["code"]) == (403, "origin_not_allowed")
        await client.send(request("POST", "/measure", "Origin: https://good.example", "Content-Length: 0"))
        assert (await client.response()).status == 200


async def test_preflight() -> None:
    asking = ("Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type")
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("OPTIONS", "/measure", "Origin: https://good.example", *asking))
        response = await client.response()
        assert (response.status, response.body) == (204, b"")
        assert response.headers["access-control-allow-methods"] == response.headers["allow"] == "OPTIONS, POST"
        assert response.headers["access-control-allow-headers"] == "authorization, content-type"
        assert response.headers["access-control-allow-origin"] == "https://good.example"
        await client.send(request("OPTIONS", "/measure", "Origin: https://evil.example", *asking))
        assert (await client.response()).status == 403


async def test_options_without_a_browser() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("OPTIONS", "/stream"), request("OPTIONS", "*"), request("OPTIONS", "/nowhere"))
        one, all_of_them, missing = [await client.response() for _ in range(3)]
        assert (one.status, one.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
        assert (all_of_them.status, all_of_them.headers["allow"]) == (204, "GET, HEAD, OPTIONS, POST")
        assert missing.status == 404


# Peers that disconnect or do not read


async def test_half_close_after_the_request_is_answered() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/") + request("POST", "/measure", body=b"abc"))
        client.finish_sending()
        assert (await client.response()).body == b"hello"
        assert (await client.response()).json() == {"received": 3}
        assert await client.rest() == b""


async def test_half_close_before_the_response_is_ready() -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def slow(exchange: HttpExchange) -> None:
        asked.set()
        await release.wait()
        await exchange.respond(200, body=b"late")

    limits = HttpLimits(half_close_probe_sec=0.01)
    async with serving(only(slow), limits=limits) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        client.finish_sending()
        await asked.wait()
        _, status, _ = await client.head()
        assert status == 100  # the probe
        release.set()
        assert (await client.response()).body == b"late"


async def wait_forever(gone: asyncio.Event, started: asyncio.Event) -> None:
    started.set()
    try:
        await asyncio.Event().wait()
    finally:
        gone.set()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_handler_is_cancelled_when_the_peer_goes(how: str) -> None:
    gone, started = asyncio.Event(), asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await wait_forever(gone, started)

    async with serving(only(wait), limits=HttpLimits(half_close_probe_sec=0.01)) as door:
        async with raw_client(door.port) as client:
            await client.send(request("GET", "/"))
            await started.wait()
            if how == "reset":
                client.reset()
        async with asyncio.timeout(PATIENCE_SEC):
            await gone.wait()
            assert await door.connections.wait_idle(PATIENCE_SEC)


async def test_pipelining_does_not_hide_that_the_peer_went() -> None:
    gone, started = asyncio.Event(), asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await wait_forever(gone, started)

    async with serving(only(wait)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/") * 3)
        await started.wait()
        client.reset()
        async with asyncio.timeout(PATIENCE_SEC):
            await gone.wait()


async def test_writer_to_a_dead_peer_is_stopped() -> None:
    ended = asyncio.Event()

    async def write_forever(exchange: HttpExchange) -> None:
        try:
            await exchange.start(200)
            while True:
                await exchange.write(b"x" * 1000)
        finally:
            ended.set()

    async with serving(only(write_forever)) as door:
        async with raw_client(door.port) as client:
            await client.send(request("GET", "/"))
            await client.head()
            client.reset()
        async with asyncio.timeout(PATIENCE_SEC):
            await ended.wait()
            assert await door.connections.wait_idle(PATIENCE_SEC)


async def test_writing_raises_once_the_transport_closes() -> None:
    """A handler that shields itself from cancellation fails when it writes."""
    outcome: asyncio.Future[type[BaseException]] = asyncio.get_running_loop().create_future()

    async def write_on(exchange: HttpExchange) -> None:
        await exchange.start(200)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        try:
            while True:
                await exchange.write(b"x")
        except BaseException as error:
            outcome.set_result(type(error))
            raise

    async with serving(only(write_on)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        await client.head()
        client.reset()
        async with asyncio.timeout(PATIENCE_SEC):
            assert await outcome is PeerGone


@pytest.mark.counts_passes
async def test_fast_writer_lets_others_run() -> None:
    turns_meanwhile = 0
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def write_much(exchange: HttpExchange) -> None:
        nonlocal turns_meanwhile
        await exchange.start(200)
        before = turns
        for _ in range(100):
            await exchange.write(b"x" * 10_000)
        turns_meanwhile = turns - before

    async with serving(only(write_much)) as door, raw_client(door.port) as client:
        counting = asyncio.create_task(count_turns())
        await client.send(request("GET", "/"))
        assert len((await client.response()).body) == 1_000_000
        counting.cancel()
    assert turns_meanwhile >= 1_000_000 // (64 * 1024 + 10_000)


async def test_slow_reader_holds_the_writer_back() -> None:
    written = 0

    async def write_much(exchange: HttpExchange) -> None:
        nonlocal written
        await exchange.start(200)
        for _ in range(1000):
            await exchange.write(b"x" * 100_000)
            written += 100_000

    async with serving(only(write_much)) as door:
        peer = socket.create_connection(("127.0.0.1", door.port))
        peer.sendall(request("GET", "/"))
        last = -1
        while last != written or not written:
            last = written
            await asyncio.sleep(0.05)
        assert written < 30_000_000
        peer.close()
        assert await door.connections.wait_idle(PATIENCE_SEC)


# Draining


async def test_draining_ends_idle_connections_at_once() -> None:
    async with serving(APPLICATION) as door, raw_client(door.port) as used, raw_client(door.port) as unused:
        await used.send(request("GET", "/"))
        await used.response()
        await until(lambda: len(door.connections) == 2)
        door.connections.close_idle()
        assert await used.rest() == b""
        assert await unused.rest() == b""
        assert await door.connections.wait_idle(PATIENCE_SEC)


async def test_draining_lets_busy_connections_respond_and_close() -> None:
    release = asyncio.Event()

    async def slow(exchange: HttpExchange) -> None:
        await release.wait()
        await exchange.respond(200, body=b"done")

    async def slow_stream(exchange: HttpExchange) -> None:
        await exchange.start(200)
        await release.wait()

    app = RoutedApplication(handlers={"GET /": slow, "GET /stream": slow_stream})
    async with serving(app) as door, raw_client(door.port) as client, raw_client(door.port) as streamed:
        await client.send(request("GET", "/"))
        await streamed.send(request("GET", "/stream"))
        await streamed.head()
        await until(lambda: door.connections.busy == 2)
        door.connections.close_idle()
        assert door.connections.draining
        assert not await door.connections.wait_idle(0)
        release.set()
        response = await client.response()
        assert (response.body, response.headers["connection"]) == (b"done", "close")
        assert await client.rest() == b""
        assert await streamed.rest() == b"0\r\n\r\n"  # its head was sent before the drain began
        assert await door.connections.wait_idle(PATIENCE_SEC)


async def test_drain_then_close_leaves_nothing_to_wait_for() -> None:
    gone, started = asyncio.Event(), asyncio.Event()

    async def wait(exchange: HttpExchange) -> None:
        await wait_forever(gone, started)

    async with serving(only(wait)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        await started.wait()
        door.server.close()
        door.connections.close_idle()
        assert not await door.connections.wait_idle(0.01)
        door.connections.abort_all()
        assert await door.connections.wait_idle(PATIENCE_SEC)
        assert gone.is_set()
        await door.server.wait_closed()
        await until_lost(client)


async def test_request_cancelled_before_it_ran_is_forgotten() -> None:
    async with serving(APPLICATION) as door:
        peer = socket.create_connection(("127.0.0.1", door.port))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        peer.sendall(request("GET", "/"))
        peer.close()
        async with raw_client(door.port) as behind:  # answered, so that the one before it was accepted
            await behind.send(request("GET", "/"))
            await behind.response()
        assert await door.connections.wait_idle(PATIENCE_SEC)


async def test_handler_cancelled_from_within_drops_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def cancelled(exchange: HttpExchange) -> None:
        raise asyncio.CancelledError

    caplog.set_level(logging.INFO)
    async with serving(only(cancelled)) as door, raw_client(door.port) as client:
        await client.send(request("GET", "/"))
        assert await client.rest() == b""
        assert await door.connections.wait_idle(PATIENCE_SEC)
