"""Queue between the reader of a connection and the consumer of its events, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from omni_ws.client.events import Event, event_bytes


class EventQueue:
    """FIFO of events that holds about ``capacity`` bytes.

    ``put`` waits while it is full. After ``close``, ``get`` returns the events that remain and then None.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queued = 0
        self.closed = False
        self._events: deque[Event] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()

    async def put(self, event: Event) -> None:
        """Appends an event; waits while the queue is full."""
        while self.queued >= self.capacity and not self.closed:
            self._writable.clear()
            await self._writable.wait()
        self.put_nowait(event)

    def put_nowait(self, event: Event) -> None:
        """Appends an event even if the queue is full. Drops it if the queue is closed."""
        if not self.closed:
            self._events.append(event)
            self.queued += event_bytes(event)
            self._readable.set()

    async def get(self) -> Event | None:
        """Removes and returns the next event; None once the queue is closed and empty."""
        while not self._events:
            if self.closed:
                return None
            self._readable.clear()
            await self._readable.wait()
        event = self._events.popleft()
        self._freed(event)
        return event

    def discard(self, unwanted: Callable[[Event], bool]) -> None:
        """Drops the queued events for which ``unwanted`` is true."""
        kept: deque[Event] = deque()
        for event in self._events:
            if unwanted(event):
                self._freed(event)
            else:
                kept.append(event)
        self._events = kept

    def close(self) -> None:
        """Ends the queue, and wakes up its reader and its writers."""
        self.closed = True
        self._readable.set()
        self._writable.set()

    def _freed(self, event: Event) -> None:
        self.queued -= event_bytes(event)
        if self.queued < self.capacity:
            self._writable.set()
