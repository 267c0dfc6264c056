"""Deadline: a timer that is cheap to move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls ``expired`` once, the given number of seconds after ``arm`` was called last.

    Moving a deadline to a later time is an assignment: the loop's timer wakes up early and is scheduled again. A new
    timer for each packet of a body would leave thousands of cancelled ones in the loop's heap.
    """

    __slots__ = ("_due", "_expired", "_handle", "_loop", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._due: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._scheduled = 0.0

    def arm(self, seconds: float | None) -> None:
        """Expire ``seconds`` from now, instead of at the time set before; None disarms."""
        if seconds is None:
            self.disarm()
            return
        self._due = self._loop.time() + seconds
        if self._handle is not None and self._scheduled <= self._due:
            return
        self._schedule(self._due)

    def disarm(self) -> None:
        """Cancel the deadline. Does nothing where it is not armed."""
        self._due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._scheduled = when
        self._handle = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._handle = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._schedule(self._due)
            return
        self._due = None
        self._expired()
