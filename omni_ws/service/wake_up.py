"""WakeUp: an event that one task waits for."""

from __future__ import annotations

import asyncio


class WakeUp:
    """An asyncio.Event for a single waiter, without the deque of 760 bytes that each idle session would hold."""

    __slots__ = ("_set", "_waiter")

    def __init__(self, *, is_set: bool = False) -> None:
        self._set = is_set
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._set = False

    async def wait(self) -> None:
        """Return once the event is set, even if it is cleared before this task runs."""
        if self._set:
            return
        assert self._waiter is None
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
