"""Requests that a proxy in front may see otherwise: refused, or read in the one way that RFC 9112 leaves."""

from __future__ import annotations

import asyncio
import re

import pytest
from support.http_server import RoutedApplication, serving
from support.raw_http import raw_client, request

from omni_ws.transport.http.application import HttpLimits
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")

HEAD = b"POST / HTTP/1.1\r\nHost: a\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
#: What an attacker wants to be a request of its own.
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
EMPTY = b"0\r\n\r\n"

REFUSED = {
    "both framings, by the length": HEAD + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "both framings, by the chunks": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n" + EMPTY,
    "two encodings": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n" + EMPTY,
    "chunked twice": HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "an unknown encoding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + EMPTY,
    "a list of encodings": HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + EMPTY,
    "chunked last, then more": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + EMPTY,
    "a quoted encoding": HEAD + b'Transfer-Encoding: "chunked"\r\n\r\n' + EMPTY,
    "a vertical tab": HEAD + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + EMPTY,
    "a space before the colon": HEAD + b"Transfer-Encoding : chunked\r\n\r\n" + EMPTY,
    "a space before the name": HEAD + b" Transfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "no colon": HEAD + b"Transfer-Encoding chunked\r\n\r\n" + EMPTY,
    "no name": HEAD + b": chunked\r\n\r\n" + EMPTY,
    "a folded encoding": HEAD + b"Transfer-Encoding:\r\n chunked\r\n\r\n" + EMPTY,
    "a folded length": HEAD + b"Content-Length: 3\r\n\t5\r\n\r\nabc",
    "a folded first line": b"POST / HTTP/1.1\r\n Host: a\r\n\r\n",
    "encoding in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 0\r\n\r\nabc",
    "a list of two lengths": HEAD + b"Content-Length: 3, 0\r\n\r\nabc",
    "a length with a plus": HEAD + b"Content-Length: +3\r\n\r\nabc",
    "a length with a minus": HEAD + b"Content-Length: -3\r\n\r\nabc",
    "a length in hexadecimal": HEAD + b"Content-Length: 0x3\r\n\r\nabc",
    "a length with an underscore": HEAD + b"Content-Length: 1_0\r\n\r\nabc",
    "a length in other digits": HEAD + "Content-Length: ٣\r\n\r\nabc".encode(),
    "an empty length": HEAD + b"Content-Length: \r\n\r\nabc",
    "an endless length": HEAD + b"Content-Length: " + b"9" * 23 + b"\r\n\r\nabc",
    "LF alone in the whole head": b"POST / HTTP/1.1\nHost: a\n\n",
    "LF alone in one line": HEAD + b"X: a\nTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "LF alone in the empty line": HEAD + b"Content-Length: 0\r\n\n",
    "LF alone before the head": b"\n" + HEAD + b"\r\n",
    "CR alone": HEAD + b"X: a\rTransfer-Encoding: chunked\r\n\r\n" + EMPTY,
    "NUL": HEAD + b"X: a\x00b\r\n\r\n",
    "two hosts": HEAD + b"Host: b\r\n\r\n",
    "no version": b"GET /hidden\r\n\r\n",
    "another version": HEAD.replace(b"HTTP/1.1", b"HTTP/1.11") + b"\r\n",
    "HTTP/2": HEAD.replace(b"HTTP/1.1", b"HTTP/2.0") + b"\r\n",
    "a version in lower case": HEAD.replace(b"HTTP/1.1", b"http/1.1") + b"\r\n",
    "a space in the target": HEAD.replace(b" / ", b" / x ") + b"\r\n",
    "two spaces": HEAD.replace(b" / ", b"  / ") + b"\r\n",
    "tabs": HEAD.replace(b" / ", b"\t/\t") + b"\r\n",
    "CONNECT": b"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\n\r\n",
    "a chunk extension with LF": CHUNKED + b"3;\nabc\r\n" + EMPTY,
    "a quoted chunk extension with LF": CHUNKED + b'3;a="\n"\r\nabc\r\n' + EMPTY,
    "LF alone behind a chunk size": CHUNKED + b"3\nabc\r\n" + EMPTY,
    "LF alone behind a chunk": CHUNKED + b"3\r\nabc\n" + EMPTY,
    "LF alone behind the last chunk": CHUNKED + b"0\n\n",
    "LF alone behind the trailers": CHUNKED + b"0\r\n\n",
    "LF alone behind a trailer": CHUNKED + b"0\r\nX: a\n\r\n",
    "a folded trailer": CHUNKED + b"0\r\nX: a\r\n b\r\n\r\n",
    "a space before a chunk size": CHUNKED + b" 3\r\nabc\r\n" + EMPTY,
    "a chunk size with 0x": CHUNKED + b"0x3\r\nabc\r\n" + EMPTY,
    "a chunk size with a plus": CHUNKED + b"+3\r\nabc\r\n" + EMPTY,
    "a chunk size with a minus": CHUNKED + b"-3\r\nabc\r\n" + EMPTY,
    "an empty chunk size": CHUNKED + b"\r\nabc\r\n" + EMPTY,
    "a chunk that is longer than its size": CHUNKED + b"3\r\nabcXX" + EMPTY,
}
REFUSED |= {
    "three empty lines before the head": b"\r\n" * 3 + HEAD + b"\r\n",
    "an empty line of LF alone behind one of CRLF": b"\r\n\n" + HEAD + b"\r\n",
    "CR alone before the head": b"\r" + HEAD + b"\r\n",
    "two CR before the head": b"\r\r\n" + HEAD + b"\r\n",
    "a space behind an empty line": b"\r\n " + HEAD + b"\r\n",
}
#: With what is behind them as a request of its own.
TAKEN = {
    "chunked in capitals": (HEAD + b"Transfer-Encoding: CHUNKED\r\n\r\n" + EMPTY, b""),
    "a tab before the value": (HEAD + b"Transfer-Encoding:\tchunked \r\n\r\n" + EMPTY, b""),
    "the same length twice": (HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "a list of the same length": (HEAD + b"Content-Length: 3, 3\r\n\r\nabc", b"abc"),
    "zeros before the length": (HEAD + b"Content-Length: 003\r\n\r\nabc", b"abc"),
    "another field that looks like it": (HEAD + b"Transfer_Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc", b"abc"),
    "a chunk extension": (CHUNKED + b'3;a="b"\r\nabc\r\n' + EMPTY, b"abc"),
    "a length in the trailers": (CHUNKED + b"3\r\nabc\r\n0\r\nContent-Length: 50\r\n\r\n", b"abc"),
    "an encoding in the trailers": (CHUNKED + b"0\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    "an empty line before the head": (b"\r\n" + HEAD + b"Content-Length: 3\r\n\r\nabc", b"abc"),
    "two empty lines before the head": (b"\r\n\r\n" + HEAD + b"\r\n", b""),
    "an empty line behind a body": (HEAD + b"Content-Length: 3\r\n\r\nabc\r\n", b"abc"),
    "two empty lines behind chunks": (CHUNKED + b"3\r\nabc\r\n" + EMPTY + b"\r\n\r\n", b"abc"),
    "the hidden request as the body": (HEAD + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN, HIDDEN),
}


async def handled(sent: bytes) -> tuple[list[int], list[tuple[str, bytes]]]:
    """The statuses of the answers until the server closes, and the requests that the application saw."""
    seen: list[tuple[str, bytes]] = []

    async def see(exchange: HttpExchange) -> None:
        seen.append((exchange.request.path, await exchange.read_body(1000)))
        await exchange.respond(200)

    application = RoutedApplication(handlers={"POST /": see, "GET /": see, "GET /hidden": see})
    async with serving(application) as door, raw_client(door.port) as client:
        await client.send(sent)
        client.finish_sending()
        answers = await client.rest()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+)", answers)], seen


@pytest.mark.parametrize("name", REFUSED)
async def test_refused_with_all_that_follows(name: str) -> None:
    assert await handled(REFUSED[name] + HIDDEN) == ([400], [])


@pytest.mark.parametrize("name", TAKEN)
async def test_read_in_one_way(name: str) -> None:
    sent, body = TAKEN[name]
    assert await handled(sent + HIDDEN) == ([200, 200], [("/", body), ("/hidden", b"")])


async def test_a_head_without_an_end() -> None:
    """A flood of header lines, and one of spaces, are answered once they are longer than a head may be."""
    limits = HttpLimits(max_header_bytes=4096)
    for piece in (b"X: y\r\n", b"X: " + b" " * 1000, b"x" * 1000):
        async with serving(RoutedApplication(), limits=limits) as door, raw_client(door.port) as client:
            await client.send(HEAD)
            response = asyncio.create_task(client.response())
            sent = 0
            while not response.done():
                assert sent < 2**20
                await client.send(piece)
                sent += len(piece)
                await asyncio.sleep(0)
            assert (await response).status == 431


@pytest.mark.virtual_clock
async def test_many_heads_that_stay_open_delay_nobody_and_end() -> None:
    async def hello(exchange: HttpExchange) -> None:
        await exchange.respond(200, body=b"hello")

    limits = HttpLimits(header_timeout_sec=10)
    application = RoutedApplication(handlers={"GET /": hello})
    async with serving(application, limits=limits) as door:
        slow = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(200)]
        for _, writer in slow:
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        for _ in range(9):
            async with raw_client(door.port) as client:
                await client.send(request("GET", "/"))
                assert (await client.response()).body == b"hello"
            for _, writer in slow:
                writer.write(b"x")
            await asyncio.sleep(1)
        answers = await asyncio.gather(*(reader.read() for reader, _ in slow))
        assert all(answer.startswith(b"HTTP/1.1 408 ") for answer in answers)
        for _, writer in slow:
            writer.close()
        await asyncio.sleep(6)  # longer than a connection lingers
        assert len(door.connections) == 0
