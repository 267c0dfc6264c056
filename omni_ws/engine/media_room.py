"""MediaRoom: limits the memory of decoded media, since an image of a few kilobytes may have 100 MB of pixels."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from omni_ws.core.quota import ByteBudget
from omni_ws.engine.threads import cores
from omni_ws.errors import EngineOverloaded, PayloadTooLarge

#: How many images and videos are decoded at the same time.
DECODING_SLOTS: Final = max(1, min(3, cores() // 2))
#: The longest wait for a slot, in seconds.
MAX_WAIT_SEC: Final = 30.0
_RETRY_MS: Final = 1000
#: The budget of an engine that runs outside a server.
_DEFAULT_BYTES: Final = 1 << 30


class MediaRoom:
    """A limit on the memory of decoded media, and on concurrent decodings, over all requests of a server.

    A request reserves memory in ``budget`` through its MediaShare. Decoding an image or video waits for a slot and for
    memory; decoding text and audio reserves memory without waiting. ``take`` and ``give`` may be called in any thread,
    other methods only on the event loop.
    """

    def __init__(self, budget: ByteBudget | None = None, *, slots: int = DECODING_SLOTS) -> None:
        self.budget = budget or ByteBudget(_DEFAULT_BYTES)
        self._lock = threading.Lock()
        self._free_slots = slots
        self._waiting: deque[_Waiting] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def share(self) -> MediaShare:
        """Return a new share, for one request."""
        return MediaShare(self)

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises EngineOverloaded, reserving nothing, when they exceed the budget."""
        with self._lock:
            if self.budget.held + size > self.budget.capacity:
                raise EngineOverloaded(
                    "the server's memory for decoded media is full; retry later", retry_after_ms=_RETRY_MS
                )
            self.budget.charge_decoded(size)

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes."""
        with self._lock:
            self.budget.charge_decoded(-size)
        if self._waiting and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._admit)

    @asynccontextmanager
    async def slot(self, share: MediaShare, size: int) -> AsyncIterator[None]:
        """Hold a decoding slot for the block; ``size`` bytes are reserved in ``share``, also after it.

        Waits for slot and memory, in turn. Raises EngineOverloaded after ``MAX_WAIT_SEC``, or at once if no other
        request holds decoded media that it could release; and PayloadTooLarge as ``MediaShare.take``.
        """
        await self._enter(share, size)
        try:
            yield
        finally:
            self._free_slots += 1
            self._admit()

    async def _enter(self, share: MediaShare, size: int) -> None:
        self._loop = asyncio.get_running_loop()
        waiting = _Waiting(share, size, self._loop.create_future())
        self._waiting.append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await waiting.admitted
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.admitted.cancelled() and waiting.admitted.exception() is None:
                share.give(size)
                self._free_slots += 1
            self._admit()
            if isinstance(error, TimeoutError):
                message = f"the media waited more than {MAX_WAIT_SEC:g} s for decoding; retry later"
                raise EngineOverloaded(message, retry_after_ms=_RETRY_MS) from None
            raise

    def _admit(self) -> None:
        """Grant slots to waiting requests, in order of arrival, while there are slots and memory."""
        blocked = False
        for one in tuple(self._waiting):
            if not self._free_slots:
                return
            # A request that needs no memory overtakes the others, which may be waiting for the memory that it holds.
            if blocked and one.size:
                continue
            if self._try_admit(one):
                self._waiting.remove(one)
            else:
                blocked = True

    def _try_admit(self, one: _Waiting) -> bool:
        """Grant or refuse a slot; returns False if it has to wait for memory."""
        if one.admitted.done():  # cancelled, but its task has not run since
            return True
        try:
            one.share.take(one.size)
        except EngineOverloaded as error:
            if self.budget.decoded > one.share.size:
                return False  # other requests hold memory that they will release
            one.admitted.set_exception(error)
        except PayloadTooLarge as error:
            one.admitted.set_exception(error)
        else:
            self._free_slots -= 1
            one.admitted.set_result(None)
        return True


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A request that waits for a slot. ``admitted`` gets a result if the slot is granted, an exception if refused."""

    share: MediaShare
    size: int
    admitted: asyncio.Future[None]


class MediaShare:
    """The Room of one request's decoded media; its reservations end with its ``with`` block."""

    def __init__(self, room: MediaRoom) -> None:
        self.size = 0
        self._room = room
        self._lock = threading.Lock()
        self._closed = False

    def slot(self, size: int) -> AbstractAsyncContextManager[None]:
        """Hold a decoding slot, see ``MediaRoom.slot``."""
        return self._room.slot(self, size)

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes, in any thread.

        Raises PayloadTooLarge if this request alone would exceed the server's budget, EngineOverloaded if all requests
        together would.
        """
        with self._lock:
            if self.size + size > self._room.budget.capacity:
                raise PayloadTooLarge(
                    f"the decoded media of this request exceed the {self._room.budget.capacity} bytes"
                    " that the server can hold"
                )
            if not self._closed:
                self._room.take(size)
                self.size += size

    def give(self, size: int) -> None:
        """Return ``size`` reserved bytes, in any thread."""
        with self._lock:
            if not self._closed:
                self._room.give(size)
                self.size -= size

    def close(self) -> None:
        """Return everything reserved; later calls (a thread may still decode) have no effect. Idempotent."""
        with self._lock:
            size, self.size, self._closed = self.size, 0, True
        self._room.give(size)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
