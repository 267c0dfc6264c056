"""Attacks on the places of a server, by clients that cost themselves next to nothing, and what others feel of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from support.mode_b_client import SESSIONS, create, text
from support.native_client import Address, native_client
from support.raw_http import RawClient, post, raw_client, request

from omni_ws.caller.script import beside

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
    return (await session.result(20)).status == 200
