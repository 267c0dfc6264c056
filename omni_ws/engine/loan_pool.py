"""LoanPool: a pool of objects that take long to create, each lent to one borrower at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from omni_ws.errors import EngineFailed


class Loanable(Protocol):
    """An object that can be reused by another borrower."""

    def close(self) -> None:
        """Free the object."""
        ...


L = TypeVar("L", bound=Loanable)


class LoanPool(Generic[L]):
    """A pool that grows to the largest number of objects that were borrowed at once.

    ``load`` creates an object and may take half a second, so ``borrow`` and ``fill`` are called in worker threads. A
    borrower never waits for another one to return an object, only for one that ``fill`` is creating. Thread-safe.
    """

    def __init__(self, load: Callable[[], L]) -> None:
        #: How many objects exist or are being created.
        self.loaded = 0
        self._load = load
        self._idle: list[L] = []
        #: How many objects ``fill`` is creating.
        self._loading = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def borrowed(self) -> int:
        """How many objects are lent at the moment."""
        with self._changed:
            return self.loaded - len(self._idle) - self._loading

    def fill(self, count: int) -> None:
        """Create objects in advance until ``count`` exist."""
        while True:
            with self._changed:
                if self._closed or self.loaded >= count:
                    return
                self.loaded += 1
                self._loading += 1
            try:
                item = self._load()
            except BaseException:
                with self._changed:
                    self.loaded -= 1
                    self._loading -= 1
                    self._changed.notify_all()
                raise
            self._return(item, was_loading=True)

    def borrow(self) -> L:
        """Return an idle object, one that is being created, or a new one. Raises EngineFailed on a closed pool."""
        with self._changed:
            while not self._closed and not self._idle and self._loading:
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
        """Return None if ``borrow`` would wait for an object that is being created, else what it returns."""
        with self._changed:
            if not self._closed and not self._idle and self._loading:
                return None
        return self.borrow()

    def give_back(self, item: L) -> None:
        """Return a borrowed object to the pool."""
        self._return(item, was_loading=False)

    def close(self) -> None:
        """Free the idle objects, and borrowed ones when they are returned. Idempotent."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            self.loaded -= len(idle)
            self._changed.notify_all()
        for item in idle:
            item.close()

    def _return(self, item: L, *, was_loading: bool) -> None:
        with self._changed:
            self._loading -= was_loading
            self._changed.notify_all()
            if not self._closed:
                self._idle.append(item)
                return
            self.loaded -= 1
        item.close()
