"""Channel: a bounded queue between tasks, whose capacity is in bytes, characters or milliseconds, not items."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class ChannelClosed(Exception):
    """Raised by ``put`` and ``put_nowait`` on a closed channel: the reader has gone, or the writer has ended it."""


class Channel(Generic[T]):
    """A queue with backpressure for one reader and any number of writers, all on the same event loop.

    ``cost`` measures an item in the unit of ``capacity``. ``put`` waits while the channel is full; an item that costs
    more than the capacity is accepted once the channel is empty. Writers that wait get their turns in the order in
    which they came. ``put_nowait`` is for writers that cannot wait, such as socket callbacks: it always accepts, and
    the writer pauses its own source while ``full``, or waits for ``room``.

    The reader iterates over the channel. ``on_take`` is called with the cost of each item taken, and of all items
    discarded: the owner accounts for input by it.

    A writer ends the channel with ``close`` or ``fail``, the reader with ``discard``. Cancelling a task that waits in
    ``put`` or in the iteration leaves the channel as it was.
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
        #: Held by the writer whose turn it is, while it waits.
        self._turn = asyncio.Lock()

    @property
    def full(self) -> bool:
        """Whether the queued items cost the capacity or more."""
        return self.queued >= self.capacity

    @property
    def items(self) -> int:
        """The number of queued items."""
        return len(self._items)

    @property
    def closed(self) -> bool:
        """Whether further items are refused."""
        return self._closed

    @property
    def awaited(self) -> bool:
        """Whether the reader waits for an item: the channel is empty, and the reader is done with all that it took."""
        return self._reader is not None and not self._reader.done()

    def put_nowait(self, item: T) -> None:
        """Queue ``item`` even if the channel is full. Raises ChannelClosed."""
        if self._closed:
            raise ChannelClosed
        self._items.append(item)
        self.queued += self._cost(item)
        self._wake(self._reader)

    async def put(self, item: T) -> None:
        """Queue ``item`` once there is room for it. Raises ChannelClosed, also when the channel is closed meanwhile."""
        if self._items or self._turn.locked():
            async with self._turn:
                while self._items and self.queued + self._cost(item) > self.capacity and not self._closed:
                    await self._item_taken()
                self.put_nowait(item)
        else:
            self.put_nowait(item)

    async def room(self) -> None:
        """Wait while the channel is full. Raises ChannelClosed, also when the channel is closed meanwhile."""
        if self.full:
            async with self._turn:
                while self.full and not self._closed:
                    await self._item_taken()
        if self._closed:
            raise ChannelClosed

    async def _item_taken(self) -> None:
        """Wait until the reader takes an item, or the channel ends."""
        self._writer = asyncio.get_running_loop().create_future()
        await self._writer

    def close(self) -> None:
        """End the channel: the reader gets the queued items, then the end of the iteration. Idempotent."""
        self._closed = True
        self._wake(self._reader)
        self._wake(self._writer)

    def fail(self, error: BaseException) -> None:
        """End the channel with an error: the reader gets the queued items, then ``error`` is raised."""
        self._error = error
        self.close()

    def discard(self) -> None:
        """End the channel from the reader's side.

        Queued items are dropped and counted as taken; further ones are refused.
        """
        self._items.clear()
        queued, self.queued = self.queued, 0
        if queued and self._on_take is not None:
            self._on_take(queued)
        self.close()

    def take_nowait(self) -> T | None:
        """Remove and return the next item, or None if there is none."""
        if not self._items:
            return None
        item = self._items.popleft()
        cost = self._cost(item)
        self.queued -= cost
        if self._on_take is not None:
            self._on_take(cost)
        self._wake(self._writer)
        return item

    # The channel is its own iterator: the event loop would close an abandoned async generator in a task without owner.

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
