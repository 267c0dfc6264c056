"""The limit on connections of a port: at the limit, one past it, and in a flood."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest
from support.http_server import RoutedApplication, serving, tls_contexts
from support.live_server import live_server
from support.native_client import native_client
from support.patience import PATIENCE_SEC, until
from support.raw_http import RawClient, raw_client, request

from omni_ws.transport.http.application import HttpLimits
from omni_ws.transport.http.connections import MAX_TURNED_AWAY
from omni_ws.transport.http.exchange import HttpExchange

pytestmark = pytest.mark.usefixtures("no_task_left")


async def hello(exchange: HttpExchange) -> None:
    await exchange.respond(200, body=b"hello")


APPLICATION = RoutedApplication(handlers={"GET /": hello})


async def get(client: RawClient) -> int:
    await client.send(request("GET", "/"))
    return (await client.response()).status


async def test_at_the_limit_and_one_past_it() -> None:
    async with serving(APPLICATION, max_connections=2) as door:
        async with raw_client(door.port) as one, raw_client(door.port) as two:
            assert [await get(one), await get(two)] == [200, 200]
            async with raw_client(door.port) as three:
                response = await three.response()  # sent before any request
                assert (response.status, response.error["code"]) == (503, "engine_overloaded")
                assert (response.headers["retry-after"], response.headers["connection"]) == ("1", "close")
                assert await three.rest() == b""
            assert [await get(one), await get(two)] == [200, 200]
        async with asyncio.timeout(PATIENCE_SEC):
            while len(door.connections):  # noqa: ASYNC110 - there is no event for it
                await asyncio.sleep(0)
        async with raw_client(door.port) as again:
            assert await get(again) == 200


async def test_websockets_are_connections_too() -> None:
    async with live_server(limits={"max_connections": 2}) as server:
        async with native_client(server) as one, native_client(server):
            async with raw_client(server.port) as client:
                assert await get(client) == 503
            await one.say("hello")
            assert (await one.answer()).text == "hello"
        await server.until(lambda: not server.connections)


@pytest.mark.virtual_clock
async def test_a_flood_is_dropped_and_takes_no_place() -> None:
    """Refused connections linger until their 503 is read; their number is bounded and does not count as open."""
    async with serving(APPLICATION, max_connections=1) as door, contextlib.AsyncExitStack() as flood:
        async with raw_client(door.port) as one:
            assert await get(one) == 200
            clients = [await flood.enter_async_context(raw_client(door.port)) for _ in range(MAX_TURNED_AWAY + 10)]
            heads = [(await client.reader.read(12))[:12] for client in clients]
            assert heads == [b"HTTP/1.1 503"] * MAX_TURNED_AWAY + [b""] * 10
            assert len(door.connections) == 1 + MAX_TURNED_AWAY
        async with raw_client(door.port) as two:
            assert await get(two) == 200
        await asyncio.sleep(6)  # longer than a connection lingers
        assert len(door.connections) == 0


#: A record that announces 512 bytes of a handshake, and has two.
HALF_A_RECORD = b"\x16\x03\x01\x02\x00\x01\x00"


@pytest.mark.parametrize("sent", [b"", HALF_A_RECORD])
async def test_a_connection_counts_from_the_moment_it_is_accepted_whatever_becomes_of_its_tls(
    tmp_path: Path, sent: bytes
) -> None:
    server_side, client_side = tls_contexts(tmp_path)
    limits = HttpLimits(header_timeout_sec=PATIENCE_SEC)  # which a handshake has, too: the first waits for the last one
    async with serving(APPLICATION, max_connections=1, ssl=server_side, limits=limits) as door:
        async with contextlib.AsyncExitStack() as flood:
            for _ in range(MAX_TURNED_AWAY + 10):
                silent = await flood.enter_async_context(raw_client(door.port))
                with contextlib.suppress(ConnectionError):
                    await silent.send(sent)
            await until(lambda: len(door.connections) == 1 + MAX_TURNED_AWAY)
            assert await silent.rest() == b""  # dropped, while those before it wait
        await until(lambda: not len(door.connections))
        async with raw_client(door.port, tls=client_side) as one:
            assert await get(one) == 200
            async with raw_client(door.port) as silent:
                await until(lambda: len(door.connections) == 2)
                async with raw_client(door.port, tls=client_side) as refused:
                    assert (await refused.response()).status == 503
                assert await get(one) == 200


@pytest.mark.virtual_clock
async def test_a_handshake_that_fails_or_takes_too_long_gives_its_place_back(tmp_path: Path) -> None:
    server_side, client_side = tls_contexts(tmp_path)
    async with serving(
        APPLICATION, max_connections=1, ssl=server_side, limits=HttpLimits(header_timeout_sec=10)
    ) as door:
        async with raw_client(door.port) as plain:
            await plain.send(request("GET", "/"))
            with contextlib.suppress(ConnectionError):
                await plain.rest()
        async with raw_client(door.port) as slow:
            await slow.send(HALF_A_RECORD)
            assert await slow.rest() == b""
            assert asyncio.get_running_loop().time() >= 10
        async with raw_client(door.port, tls=client_side) as one:
            assert await get(one) == 200


async def test_a_request_in_the_same_packet_as_the_end_of_the_handshake_is_served(tmp_path: Path) -> None:
    server_side, client_side = tls_contexts(tmp_path)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(incoming, outgoing, server_hostname="localhost")
    async with serving(APPLICATION, ssl=server_side) as door, raw_client(door.port) as wire:
        with pytest.raises(ssl.SSLWantReadError):
            client.do_handshake()
        while True:
            await wire.send(outgoing.read())
            incoming.write(await wire.reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
        client.write(request("GET", "/", "Connection: close"))
        await wire.send(outgoing.read())  # both
        answer, ended = b"", False
        while not ended:
            incoming.write(await wire.reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                try:
                    while piece := client.read(65536):
                        answer += piece
                except ssl.SSLZeroReturnError:
                    pass
                ended = True  # not at the end of the connection: the server waits for our goodbye
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"hello")
