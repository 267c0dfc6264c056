"""Server-sent events as a strict reader sees them: every deviation from the contract is an AssertionError."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
from support.raw_http import RawClient, RawResponse


@dataclass(frozen=True)
class Event:
    """``name`` is that of an ``event:`` line; ``data`` that of the one ``data:`` line. A comment has neither.

    ``id`` is that of an ``id:`` line, which comes first: a stream of such events can be resumed. Others have 0.
    """

    data: str
    name: str | None = None
    comment: bool = False
    id: int = 0

    def json(self) -> Any:
        return orjson.loads(self.data)


DONE = Event("[DONE]")


def parse_event(block: str) -> Event:
    if block.startswith(":"):
        assert "\n" not in block
        return Event("", comment=True)
    lines = block.split("\n")
    number = int(lines.pop(0).removeprefix("id: ")) if lines[0].startswith("id: ") else 0
    name = lines.pop(0).removeprefix("event: ") if lines[0].startswith("event: ") else None
    assert len(lines) == 1, block
    assert lines[0].startswith("data: "), block
    return Event(lines[0].removeprefix("data: "), name, id=number)


def parse_events(body: bytes) -> list[Event]:
    """All events of an answer that is complete."""
    text = body.decode()
    assert text.endswith("\n\n"), text[-80:]
    assert "\r" not in text
    return [parse_event(block) for block in text[:-2].split("\n\n")]


def events_of(answer: RawResponse) -> list[Event]:
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return parse_events(answer.body)


async def arriving_events(client: RawClient) -> AsyncIterator[Event]:
    """The events of a chunked answer as they come; ends with the answer."""
    pending = ""
    async for chunk in client.chunks():
        pending += chunk.decode()
        *whole, pending = pending.split("\n\n")
        for block in whole:
            yield parse_event(block)
    assert pending == "", "the answer ends inside an event"


def content(events: list[Event]) -> str:
    """The text of a chat stream."""
    texts = []
    for event in events:
        if event.name is None and not event.comment and event != DONE:
            texts += [choice["delta"].get("content") or "" for choice in event.json()["choices"]]
    return "".join(texts)
