"""Attacks on the places of a server, by clients that cost themselves next to nothing, and what others feel of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from support.raw_http import RawClient, post, raw_client, request
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from benchmarks.running_while import running_while

CHAT = "/v1/chat/completions"
SESSIONS = "/v1/streaming_input/sessions"
Attack = Callable[[int, int], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def empty_sessions(port: int, count: int) -> AsyncIterator[None]:
    """Opens so many sessions of Mode B over one connection, and goes on opening one for each answer."""
    async with raw_client(port) as client:
        for _ in range(count):
            await client.send(request("POST", SESSIONS))
            await client.response()

        async def go_on() -> None:
            while True:
                await client.send(request("POST", SESSIONS))
                await client.response()

        async with running_while(go_on()):
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

    async with AsyncExitStack() as open_, asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(count):
            client = await open_.enter_async_context(raw_client(port))
            await client.send(head, b"{")
            tasks.append(group.create_task(trickle(client)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


async def innocent(port: int, rounds: int) -> list[bool]:
    """A turn over a WebSocket, a chat, and a session of Mode B, one after the other: whether each was served."""
    return [await use(port) for _ in range(rounds) for use in (_talk, _chat, _session)]


async def _talk(port: int) -> bool:
    url = f"ws://127.0.0.1:{port}/v1/streaming_input"
    async with connect(url, compression=None, proxy=None) as connection:
        with contextlib.suppress(ConnectionClosed):
            await connection.send('{"type":"input_chunk","sequence_id":0,"text":"hello","end_of_input":true}')
            async for message in connection:
                if (frame := json.loads(message)).get("final"):
                    return bool(frame["finish_reason"] == "stop")
    return False


async def _chat(port: int) -> bool:
    return (await post(port, CHAT, {"messages": [{"role": "user", "content": "hello"}]})).status == 200


async def _session(port: int) -> bool:
    """Opened without input, which comes later, as applications do."""
    async with raw_client(port) as client:
        await client.send(request("POST", SESSIONS))
        created = await client.response()
        if created.status != 201:
            return False
        path = f"{SESSIONS}/{created.json()['session_id']}"
        body = b'{"text":"hello","end_of_input":true}'
        await client.send(request("POST", f"{path}/chunks", "Content-Type: application/json", body=body))
        if (await client.response()).status != 202:
            return False
        await client.send(request("GET", f"{path}/result?wait=20", "Accept: application/json"))
        return (await client.response()).status == 200
