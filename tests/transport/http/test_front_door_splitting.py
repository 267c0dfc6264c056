"""Responses do not depend on how a peer's bytes are cut into packets."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.http_server import RoutedApplication, serving
from support.raw_http import chunked, raw_client, request, websocket_upgrade
from support.virtual_clock import VirtualClockLoop

from omni_ws.transport.http.application import HttpLimits, UpgradeDecision
from omni_ws.transport.http.exchange import HttpExchange


async def echo(exchange: HttpExchange) -> None:
    body = await exchange.read_body(100)
    await exchange.respond(200, [("X-Path", exchange.request.path)], body)


async def stream_back(exchange: HttpExchange) -> None:
    body = await exchange.read_body(100)
    await exchange.start(200)
    await exchange.write(body)


APPLICATION = RoutedApplication(
    handlers={"GET /": echo, "POST /echo": echo, "POST /stream": stream_back},
    upgrades={"/ws": lambda _: UpgradeDecision()},
)
LIMITS: Final = HttpLimits(max_header_bytes=400)

GOOD = [
    request("GET", "/"),
    request("HEAD", "/"),
    request("POST", "/echo", body=b"some body"),
    request("POST", "/echo", "Transfer-Encoding: chunked") + chunked(b"one", b"two", b"three"),
    request("POST", "/stream", "Transfer-Encoding: chunked") + chunked(b"a" * 50),
    request("GET", "/nowhere"),
    request("GET", "/", "Upgrade: h2c", "Connection: Upgrade"),
    b"\r\n" + request("GET", "/"),
    request("POST", "/echo", body=b"some body") + b"\r\n",
    request("POST", "/echo", "Content-Encoding: gzip", "Content-Length: 0"),
]
LAST = [
    b"",
    request("GET", "/", "Connection: close"),
    websocket_upgrade("/ws") + b"\x81\x82\x00\x00\x00\x00hi",
    websocket_upgrade("/nowhere"),
    b"garbage\r\n\r\n",
    b"\x16\x03\x01",
    b"GET / HTTP/1.1\r\n\r\n",
    request("GET", "/a/../b"),
    request("POST", "/echo", "Transfer-Encoding: chunked", "Content-Length: 5"),
    request("GET", "/", "X: " + "x" * 400),
    b"GET / HTTP/1.1\r\nX: " + b"x" * 1000,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


async def converse(sent: bytes, cuts: list[int]) -> bytes:
    """The response to ``sent``, cut at ``cuts`` with a pause after each part, without the fields that time changes."""
    async with serving(APPLICATION, limits=LIMITS) as door, raw_client(door.port) as client:
        for start, end in pairwise([0, *cuts, len(sent)]):
            client.writer.write(sent[start:end])
            for _ in range(3):
                await asyncio.sleep(0)
        received = b""
        if sent.endswith(b"hi"):  # a half-closed connection is not upgraded: wait for the 101
            received = await client.reader.readuntil(b"\x81\x02hi")
        client.finish_sending()
        received += await client.rest()
    lines = received.split(b"\r\n")
    return b"\r\n".join(line for line in lines if not line.startswith(b"Date: "))


def run(sent: bytes, cuts: list[int]) -> bytes:
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(converse(sent, cuts))


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(good=st.lists(st.sampled_from(GOOD), max_size=3), last=st.sampled_from(LAST), data=st.data())
def test_any_split_gives_the_same_responses(good: list[bytes], last: bytes, data: st.DataObject) -> None:
    sent = b"".join(good) + last
    if not sent:
        return
    cuts = data.draw(st.lists(st.integers(0, len(sent)), max_size=12).map(sorted))
    assert run(sent, cuts) == run(sent, [])


@pytest.mark.parametrize("last", LAST, ids=lambda last: repr(last[:30]))
def test_byte_by_byte_gives_the_same_responses(last: bytes) -> None:
    sent = GOOD[0] + GOOD[3] + last
    whole = run(sent, [])
    assert whole.startswith(b"HTTP/1.1 200 ")
    assert run(sent, list(range(1, len(sent)))) == whole
