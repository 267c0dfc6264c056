"""Objects that take long to make, lent to one borrower after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from omni_ws.errors import EngineFailed


class Loanable(Protocol):
    """What takes long to make, and can be used again by somebody else."""

    def close(self) -> None: ...


L = TypeVar("L", bound=Loanable)


class LoanPool(Generic[L]):
    """Objects that are lent to one borrower at a time and kept for the next.

    There are as many as were ever wanted at once: whoever has a seat never waits for another to give back. Thread-safe;
    ``borrow`` and ``fill`` may load for half a second each object and belong into worker threads.
    """

    def __init__(self, load: Callable[[], L]) -> None:
        #: Objects that exist, idle or borrowed, or are being loaded.
        self.loaded = 0
        self._load = load
        self._idle: list[L] = []
        #: Objects that ``fill`` is loading, for whoever comes first.
        self._coming = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def borrowed(self) -> int:
        with self._changed:
            return self.loaded - len(self._idle) - self._coming

    def fill(self, count: int) -> None:
        """Loads ahead of need, until ``count`` exist."""
        while True:
            with self._changed:
                if self._closed or self.loaded >= count:
                    return
                self.loaded += 1
                self._coming += 1
            try:
                item = self._load()
            except BaseException:
                with self._changed:
                    self.loaded -= 1
                    self._coming -= 1
                    self._changed.notify_all()
                raise
            self._return(item, coming=1)

    def borrow(self) -> L:
        """An idle object, or one that is about to be, or a new one."""
        with self._changed:
            while not self._closed and not self._idle and self._coming:
                self._changed.wait()
            if self._closed:
                raise EngineFailed("the engine has stopped")
            if self._idle:
                return self._idle.pop()
            self.loaded += 1
        try:
            return self._load()
        except BaseException:
            with self._changed:
                self.loaded -= 1
            raise

    def borrow_ready(self) -> L | None:
        """Like ``borrow``, but None while what could be lent is still being loaded."""
        with self._changed:
            if not self._closed and not self._idle and self._coming:
                return None
        return self.borrow()

    def give_back(self, item: L) -> None:
        self._return(item, coming=0)

    def close(self) -> None:
        """Frees the idle objects; borrowed ones are freed when they come back. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self.loaded -= len(idle)
            self._changed.notify_all()
        for item in idle:
            item.close()

    def _return(self, item: L, *, coming: int) -> None:
        with self._changed:
            self._coming -= coming
            self._changed.notify_all()
            if not self._closed:
                self._idle.append(item)
                return
            self.loaded -= 1
        item.close()
