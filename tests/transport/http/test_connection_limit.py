"""The limit on connections of a port: at the limit, one past it, and in a flood."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from support.http_server import RoutedApplication, serving
from support.live_server import live_server
from support.native_client import native_client
from support.raw_http import RawClient, raw_client, request

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
        async with asyncio.timeout(100):
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
