"""A bounded queue between two tasks, measured in bytes, characters or milliseconds, never in items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """Something was put into a channel that had been closed."""


class Channel(Generic[T]):
    """One writer, one reader.

    ``cost`` measures an item in the unit of ``capacity``. ``put`` waits while the channel is full; an item larger
    than the whole capacity goes through alone. ``put_nowait`` is for writers that cannot wait (a socket callback):
    it never refuses, and the writer looks at ``full`` to stop its own source. ``on_take`` hears the cost of each
    item that the reader took, which is how the bytes that the engine has not taken over are counted.
    """

    def __init__(
        self, capacity: float, *, cost: Callable[[T], float], on_take: Callable[[float], None] | None = None
    ) -> None:
        self.capacity = capacity
        self.queued: float = 0
        self._cost = cost
        self._on_take = on_take
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        self._closed = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        return self.queued >= self.capacity

    @property
    def closed(self) -> bool:
        return self._closed

    def put_nowait(self, item: T) -> None:
        """Raises ChannelClosed after ``close`` or ``fail``."""
        if self._closed:
            raise ChannelClosed
        self._items.append(item)
        self.queued += self._cost(item)
        self._wake(self._reader)

    async def put(self, item: T) -> None:
        """Waits until there is room; raises ChannelClosed if the channel is closed meanwhile."""
        while self._items and self.queued + self._cost(item) > self.capacity and not self._closed:
            self._writer = asyncio.get_running_loop().create_future()
            await self._writer
        self.put_nowait(item)

    def close(self) -> None:
        """The reader gets what is queued, then the end. Idempotent."""
        self._closed = True
        self._wake(self._reader)
        self._wake(self._writer)

    def fail(self, error: BaseException) -> None:
        """The reader gets what is queued, then ``error``."""
        self._error = error
        self.close()

    def discard(self) -> None:
        """The reader is gone: what is queued is dropped and counted as taken; later items are refused."""
        self._items.clear()
        queued, self.queued = self.queued, 0
        if queued and self._on_take is not None:
            self._on_take(queued)
        self.close()

    def take_nowait(self) -> T | None:
        """The next item, or None if there is none at the moment."""
        if not self._items:
            return None
        item = self._items.popleft()
        cost = self._cost(item)
        self.queued -= cost
        if self._on_take is not None:
            self._on_take(cost)
        self._wake(self._writer)
        return item

    # Its own iterator: a generator that is left in the middle would be closed by a task that nobody owns.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (item := self.take_nowait()) is None:
            if self._closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return item

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
