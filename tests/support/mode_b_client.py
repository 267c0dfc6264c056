"""A client of sessions over several requests: each call a request, and a connection, of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from support.native_client import Address, Answer, native_client
from support.raw_http import Event, RawClient, RawResponse, arriving_events, call, events_of

from omni_ws.transport.mode_b.routes import MAX_WAIT_SEC

SESSIONS = "/v1/streaming_input/sessions"
EVENTS = "Accept: text/event-stream"
JSON = "Accept: application/json"


def numbered_events(answer: RawResponse) -> list[Event]:
    """Those of a stream that can be resumed, where each has an id."""
    events = [event for event in events_of(answer) if not event.comment]
    assert all(event.id for event in events)
    return events


async def arriving(client: RawClient) -> AsyncIterator[Event]:
    """The same as they come."""
    async for event in arriving_events(client):
        if not event.comment:
            assert event.id
            yield event


def text(word: str, number: int | None = None, **fields: Any) -> dict[str, Any]:
    return {"text": word, **({} if number is None else {"sequence_id": number}), **fields}


class ModeBSession:
    def __init__(self, server: Address, created: dict[str, Any], headers: tuple[str, ...] = ()) -> None:
        self.server = server
        self.created = created
        self.id: str = created["session_id"]
        self.path = f"{SESSIONS}/{self.id}"
        self.headers = headers

    async def call(self, method: str, below: str = "", body: Any = None, *headers: str) -> RawResponse:
        return await call(self.server.port, method, self.path + below, body, *self.headers, *headers)

    async def _told(self, status: int, method: str, below: str = "", body: Any = None) -> dict[str, Any]:
        answer = await self.call(method, below, body)
        assert answer.status == status, answer.body
        told: dict[str, Any] = answer.json()
        return told

    async def append(self, *chunks: dict[str, Any]) -> dict[str, Any]:
        return await self._told(202, "POST", "/chunks", chunks[0] if len(chunks) == 1 else {"chunks": chunks})

    async def finish(self) -> dict[str, Any]:
        return await self._told(200, "POST", "/finish")

    async def status(self) -> dict[str, Any]:
        return await self._told(200, "GET")

    async def result(self, wait: float | None = MAX_WAIT_SEC) -> RawResponse:
        return await self.call("GET", "/result" + ("" if wait is None else f"?wait={wait}"), None, JSON)

    async def completion(self) -> dict[str, Any]:
        answer = await self.result()
        assert answer.status == 200, answer.body
        completion: dict[str, Any] = answer.json()
        return completion

    async def content(self) -> str:
        message: dict[str, Any] = (await self.completion())["choices"][0]["message"]
        content: str = message["content"]
        return content

    async def events(self, last: int | None = None) -> list[Event]:
        resume = () if last is None else (f"Last-Event-ID: {last}",)
        return numbered_events(await self.call("GET", "/result", None, EVENTS, *resume))

    async def attached(self) -> tuple[Answer, int]:
        """What a WebSocket reads, and the code that it is closed with."""
        async with native_client(self.server, query=f"?session_id={self.id}", greeted=False) as client:
            return await client.answer(), await client.closed()

    async def delete(self) -> int:
        return (await self.call("DELETE")).status

    async def until(self, state: str) -> dict[str, Any]:
        """The status, once the session is in this state."""
        for _ in range(1000):
            status = await self.status()
            if status["state"] == state:
                return status
            await asyncio.sleep(0.005)
        raise AssertionError(f"{state} did not come about: {status}")


async def create(server: Address, body: Any = None, *headers: str) -> ModeBSession:
    answer = await call(server.port, "POST", SESSIONS, body, *headers)
    assert answer.status == 201, answer.body
    assert answer.headers["location"] == f"{SESSIONS}/{answer.json()['session_id']}"
    return ModeBSession(server, answer.json(), headers)


@asynccontextmanager
async def mode_b(server: Address, body: Any = None, *headers: str) -> AsyncIterator[ModeBSession]:
    """A session that is deleted in the end, so that nothing of it is held."""
    session = await create(server, body, *headers)
    yield session
    assert await session.delete() == 204
