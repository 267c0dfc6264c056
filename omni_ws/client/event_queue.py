"""A queue between the reader of a connection and the user of its events, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from omni_ws.client.events import Event, event_bytes


class EventQueue:
    """``put`` waits while it is full; ``get`` gives what is left after ``close`` and then None."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queued = 0
        self.closed = False
        self._events: deque[Event] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()

    async def put(self, event: Event) -> None:
        while self.queued >= self.capacity and not self.closed:
            self._writable.clear()
            await self._writable.wait()
        self.put_nowait(event)

    def put_nowait(self, event: Event) -> None:
        """Past the bound, too. What comes after the end is dropped: nobody is there to take it."""
        if not self.closed:
            self._events.append(event)
            self.queued += event_bytes(event)
            self._readable.set()

    async def get(self) -> Event | None:
        while not self._events:
            if self.closed:
                return None
            self._readable.clear()
            await self._readable.wait()
        event = self._events.popleft()
        self._freed(event)
        return event

    def discard(self, unwanted: Callable[[Event], bool]) -> None:
        kept: deque[Event] = deque()
        for event in self._events:
            if unwanted(event):
                self._freed(event)
            else:
                kept.append(event)
        self._events = kept

    def close(self) -> None:
        self.closed = True
        self._readable.set()
        self._writable.set()

    def _freed(self, event: Event) -> None:
        self.queued -= event_bytes(event)
        if self.queued < self.capacity:
            self._writable.set()
