"""Request heads, valid, malformed and at their limits: none of them causes a 500, with or without a key."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_server import RoutedApplication, serving
from support.live_server import live_server
from support.raw_http import RawResponse, chunked, raw_client, request, websocket_upgrade

from omni_ws.config.keys import ApiKey, digest
from omni_ws.errors import ShuttingDown
from omni_ws.transport.http.application import UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange

NATIVE = "/v1/streaming_input"
CHAT = "/v1/chat/completions"


async def echo(exchange: HttpExchange) -> None:
    await exchange.respond(200, body=await exchange.read_body(1000))


APPLICATION = RoutedApplication(
    handlers={"POST /": echo, "GET /": echo}, upgrades={"/ws": lambda _: UpgradeDecision()}, origins=frozenset({"x:y"})
)


async def answered(sent: bytes) -> RawResponse:
    async with serving(APPLICATION) as door, raw_client(door.port) as client:
        await client.send(sent)
        return await client.response()


# limits


@pytest.mark.parametrize(("lines", "status"), [(128, 200), (129, 431)])
async def test_a_head_has_at_most_128_lines(lines: int, status: int) -> None:
    more = [f"X-{number}: x" for number in range(lines - 1)]  # Host is one more
    response = await answered(request("GET", "/", *more))
    assert response.status == status
    if status == 431:
        assert response.error["code"] == "header_too_large"
        assert "128 header lines" in response.error["message"]


@pytest.mark.parametrize(("lines", "status"), [(128, 101), (129, 431)])
async def test_so_has_a_handshake(lines: int, status: int) -> None:
    count = websocket_upgrade("/ws").count(b"\r\n") - 2
    assert (await answered(websocket_upgrade("/ws", *["X: x"] * (lines - count)))).status == status


@pytest.mark.parametrize(("size", "status"), [("0000000000000003", 200), ("00000000000000003", 400), ("f" * 17, 400)])
async def test_the_size_of_a_chunk_has_at_most_16_digits(size: str, status: int) -> None:
    for first in (b"", chunked(b"ab", end=False)):
        body = first + size.encode() + b"\r\nabc\r\n0\r\n\r\n"
        response = await answered(request("POST", "/", "Transfer-Encoding: chunked") + body)
        assert response.status == status
        if status == 400:
            assert response.error["message"] == "invalid HTTP/1.1: the size of a chunk must not exceed 16 digits"


@pytest.mark.parametrize("first", [b"", chunked(b"ab", end=False)])
@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b'3;a=b;c="d e"\t', 200),
        (b"3;" + b"x" * 254, 200),
        (b"3;" + b"x" * 255, 400),
        (b"3;a\r0", 400),
        (b"3;a\0", 400),
        (b"3;a\n0", 400),
        (b"3 ", 400),
        (b"3\t;a", 400),
        (b"3 ;a", 400),
        (b" 3", 400),
    ],
)
async def test_the_line_before_a_chunk(line: bytes, status: int, first: bytes) -> None:
    body = first + line + b"\r\nabc\r\n0\r\n\r\n"
    response = await answered(request("POST", "/", "Transfer-Encoding: chunked") + body)
    assert response.status == status
    if status == 400:
        assert response.error["code"] == "invalid_frame"


async def test_an_endless_line_before_a_chunk_is_no_head() -> None:
    response = await answered(request("POST", "/", "Transfer-Encoding: chunked") + b"3;" + b"x" * 40_000)
    assert (response.status, response.error["code"]) == (400, "invalid_frame")
    assert "head" not in response.error["message"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nbad line\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad\xff: x\r\n\r\n",
        b"\xff\r\n\r\n",
        request("POST", "/", "Transfer-Encoding: chunked") + b"zz\r\n",
        request("POST", "/", "Transfer-Encoding: chunked") + b"1\r\nabc\r\n",
        request("POST", "/", "Transfer-Encoding: chunked") + b"0\r\nbad trailer\r\n\r\n",
    ],
)
async def test_what_is_wrong_is_said_in_words(sent: bytes) -> None:
    response = await answered(sent)
    assert (response.status, response.error["code"]) == (400, "invalid_frame")
    assert response.error["message"].startswith("invalid HTTP/1.1: ")
    assert not any(mark in response.error["message"] for mark in ("b'", "bytearray", "\\x"))


# fields that browsers send


@pytest.mark.parametrize(
    "headers",
    [
        ("Origin: http://[",),
        ("Origin: http://localhost:x",),
        ("Origin: http://\xe9",),
        ("Origin: http://a", "Origin: http://b"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "OPTIONS"])
async def test_an_origin_that_is_none(method: str, headers: tuple[str, ...]) -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request(method, "/health", *headers))
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_frame")


async def test_a_preflight_for_what_is_no_header_field() -> None:
    async with live_server() as server, raw_client(server.port) as client:
        fields = (f"Origin: http://localhost:{server.port}", "Access-Control-Request-Method: POST")
        head = request("OPTIONS", CHAT, *fields, "Access-Control-Request-Headers: \xe9")
        await client.send(head.replace(b"Host: localhost", b"Host: localhost:%d" % server.port))
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_frame")


@pytest.mark.parametrize(
    "header",
    ["Sec-WebSocket-Protocol: ,, ;", "Sec-WebSocket-Protocol: a b", "Sec-WebSocket-Extensions: ;", "Connection: ;"],
)
async def test_a_handshake_with_a_list_that_is_none(header: str) -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(websocket_upgrade(NATIVE, header))
        response = await client.response()
        assert (response.status, response.error["code"]) == (400, "invalid_frame")
        assert header.partition(":")[0] in response.error["message"]


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere/é", "/browser/nothing.js"])
async def test_a_404_names_the_path(path: str) -> None:
    async with live_server() as server, raw_client(server.port) as client:
        await client.send(request("GET", path.replace("é", "%C3%A9")))
        assert (await client.response()).error["message"] == f"{path} not found"


async def test_a_404_of_an_upgrade_and_of_a_long_path() -> None:
    async with live_server() as server:
        async with raw_client(server.port) as client:
            await client.send(websocket_upgrade("/health"))
            assert (await client.response()).error["message"] == "no WebSocket at /health"
        async with raw_client(server.port) as client:
            await client.send(request("GET", "/" + "x" * 10_000))
            assert (await client.response()).error["message"] == f"/{'x' * 127}… not found"


# arbitrary bytes


NAMES = st.sampled_from(
    [
        *("Host", "Origin", "Authorization", "Content-Length", "Transfer-Encoding", "Content-Type", "Expect"),
        *("Connection", "Upgrade", "Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol"),
        *("Sec-WebSocket-Extensions", "Access-Control-Request-Method", "Access-Control-Request-Headers", "Accept"),
        *("traceparent", "X-Forwarded-For", "X-Streaming-Input", "Content-Encoding", "Last-Event-ID", "If-None-Match"),
    ]
)
VALUES = st.one_of(
    st.text(st.characters(min_codepoint=1, max_codepoint=255), max_size=12).map(lambda text: text.encode("latin-1")),
    st.sampled_from(
        [
            *(b"http://[", b"null", b"*", b"websocket", b"Upgrade", b"13", b"dGhlIHNhbXBsZSBub25jZQ==", b",, ;", b";"),
            *(b"chunked", b"identity", b"0", b"99999999999999999999", b"Bearer \xe9", b"omni-api-key.\xff", b"true"),
            *(
                b"localhost",
                b"[::1",
                b"permessage-deflate; server_max_window_bits=x",
                b"application/json; charset=\xe9",
            ),
            *(b"00-%b-%b-01" % (b"0" * 32, b"z" * 16), b"POST", b"100-continue", b"http://localhost", b"audio/\xff"),
        ]
    ),
)
TARGETS = st.sampled_from(
    [
        *(b"/", b"/health", b"/v1/models/%ff", CHAT.encode(), NATIVE.encode(), b"*", b"//", b"http://[/", b"/%00"),
        *(b"/v1/streaming_input?session_id=%E9&resume_token=x&last_output=\xb2", b"/v1/streaming_input/sessions"),
        *(b"/browser/..%2f", b"/metrics", b"/openapi.json", b"http://[::1]:x/health", b"/health?a=%ED%A0%80"),
    ]
)
METHODS = st.sampled_from([b"GET", b"POST", b"OPTIONS", b"HEAD", b"DELETE", b"PATCH", b"M-SEARCH"])
HEADS = st.builds(
    lambda method, target, host, fields: (
        b"%b %b HTTP/1.1\r\n" % (method, target)
        + (b"Host: localhost\r\n" if host else b"")
        + b"".join(b"%b: %b\r\n" % (name.encode(), value) for name, value in fields)
        + b"\r\n"
    ),
    METHODS,
    TARGETS,
    st.booleans() | st.just(True),
    st.lists(st.tuples(NAMES, VALUES), max_size=6),
)


@pytest.mark.slow
@settings(max_examples=100)
@given(heads=st.lists(HEADS, min_size=1, max_size=8), keyed=st.booleans())
def test_no_head_ends_in_a_500(heads: list[bytes], keyed: bool) -> None:
    keys = (ApiKey(name="one", key_sha256=digest("one")),) if keyed else ()

    async def run() -> None:
        async with live_server(keys=keys) as server:
            for head in heads:
                async with raw_client(server.port) as client:
                    await client.send(head)
                    client.finish_sending()
                    received = await client.rest()
                    if received:
                        status_line, _, rest = received.partition(b"\r\n")
                        assert int(status_line.split(b" ")[1]) < 500 or b"engine_overloaded" in rest, (head, received)
                    _, blank, body = received.rpartition(b"\r\n\r\n")
                    if blank and body.startswith(b"{"):
                        json.loads(body)
            server.app.registry.end_all(ShuttingDown("the test is over"))

    asyncio.run(run())
