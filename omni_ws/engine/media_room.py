"""Room for decoded media: a picture of a few kilobytes may have a hundred megabytes of pixels."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from omni_ws.core.quota import ByteBudget
from omni_ws.errors import EngineOverloaded, PayloadTooLarge

#: Pictures and videos that are decoded at the same time.
PLACES: Final = max(1, min(3, (os.cpu_count() or 1) // 2))
#: Longest wait for one of these places, in seconds.
MAX_WAIT_SEC: Final = 30.0
_RETRY_MS: Final = 1000
#: Room of engines outside a server.
_DEFAULT_BYTES: Final = 1 << 30


class MediaRoom:
    """The decoded media of all requests of a server, counted in the ``budget`` of everything that it holds."""

    def __init__(self, budget: ByteBudget | None = None, *, places: int = PLACES) -> None:
        self.budget = budget or ByteBudget(_DEFAULT_BYTES)
        self._lock = threading.Lock()
        self._free_places = places
        self._waiting: deque[_Waiting] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def share(self) -> MediaShare:
        """For one request."""
        return MediaShare(self)

    def take(self, size: int) -> None:
        """From any thread. Raises EngineOverloaded, and takes nothing, where there is no room."""
        with self._lock:
            if self.budget.held + size > self.budget.capacity:
                raise EngineOverloaded("the server holds as much decoded media as it may", retry_after_ms=_RETRY_MS)
            self.budget.decoded += size

    def give(self, size: int) -> None:
        with self._lock:
            self.budget.decoded -= size
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    @asynccontextmanager
    async def place(self, share: MediaShare, size: int) -> AsyncIterator[None]:
        """One of the few places for decoding, in turn. Its ``size`` bytes are counted in ``share`` from then on.

        Raises EngineOverloaded after ``MAX_WAIT_SEC``, and at once where no media of others can make room; and
        PayloadTooLarge as ``share`` does.
        """
        await self._enter(share, size)
        try:
            yield
        finally:
            self._free_places += 1
            self._admit()

    async def _enter(self, share: MediaShare, size: int) -> None:
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(share, size, self._loop.create_future())
        self._waiting.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await waiting.turn
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                share.give(size)
                self._free_places += 1
            self._admit()
            if isinstance(error, TimeoutError):
                message = f"the media did not get their turn to be decoded within {MAX_WAIT_SEC:g} s"
                raise EngineOverloaded(message, retry_after_ms=_RETRY_MS) from None
            raise

    def _admit(self) -> None:
        """Lets in who waits, from the longest on, as far as there is room."""
        blocked = False
        for one in tuple(self._waiting):
            if not self._free_places:
                return
            # Who needs no room goes past those who wait for some: it may be what it holds that they wait for.
            if blocked and one.size:
                continue
            if self._settled(one):
                self._waiting.remove(one)
            else:
                blocked = True

    def _settled(self, one: _Waiting) -> bool:
        """Whether it has its place, or is refused one."""
        if one.turn.done():  # cancelled, and not woken since
            return True
        try:
            one.share.take(one.size)
        except EngineOverloaded as error:
            if self.budget.decoded > one.share.size:
                return False  # some of it will be given back
            one.turn.set_exception(error)
        except PayloadTooLarge as error:
            one.turn.set_exception(error)
        else:
            self._free_places -= 1
            one.turn.set_result(None)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    share: MediaShare
    size: int
    turn: asyncio.Future[None]


class MediaShare:
    """The Room of one request: what is left of it is given back when the block is left."""

    def __init__(self, room: MediaRoom) -> None:
        self.size = 0
        self._room = room
        self._lock = threading.Lock()
        self._closed = False

    def place(self, size: int) -> AbstractAsyncContextManager[None]:
        """See ``MediaRoom.place``."""
        return self._room.place(self, size)

    def take(self, size: int) -> None:
        """From any thread. Raises PayloadTooLarge for what this request can never hold, else EngineOverloaded."""
        with self._lock:
            if self.size + size > self._room.budget.capacity:
                raise PayloadTooLarge(
                    f"decoded, the media of this request take more than the {self._room.budget.capacity} bytes"
                    " that the server may hold"
                )
            if not self._closed:
                self._room.take(size)
                self.size += size

    def give(self, size: int) -> None:
        with self._lock:
            if not self._closed:
                self._room.give(size)
                self.size -= size

    def close(self) -> None:
        """Gives everything back; what a thread counts later is not counted. Idempotent."""
        with self._lock:
            size, self.size, self._closed = self.size, 0, True
        self._room.give(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
