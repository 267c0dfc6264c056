"""Measures the delay of the event loop, which everything in a real-time server has to wait for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

INTERVAL_SEC: Final = 0.1
#: For an idle loop, which is hardly ever late: ten looks a second cost more than all else that an empty server does.
LONGEST_INTERVAL_SEC: Final = 1.0
#: The loop is idle if its thread takes less than this share of a core.
IDLE_SHARE: Final = 0.02


@contextmanager
def watching_loop(
    observe: Callable[[float], object], *, cpu_time: Callable[[], float] = time.thread_time
) -> Iterator[None]:
    """Within the block, call ``observe`` ten times a second with the seconds by which that call is late.

    While the loop is idle, the time between two calls doubles, up to a second. ``cpu_time`` is that of its thread.
    """
    watch = _Watch(observe, cpu_time)
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    """A timer that measures how late it fires."""

    def __init__(self, observe: Callable[[float], object], cpu_time: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = observe
        self._cpu_time = cpu_time
        self._interval = INTERVAL_SEC
        self._begin()

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._cpu_before = self._cpu_time()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        late = max(0.0, self._loop.time() - self._due)
        self._observe(late)
        is_idle = self._cpu_time() - self._cpu_before < IDLE_SHARE * (self._interval + late)
        self._interval = min(2 * self._interval, LONGEST_INTERVAL_SEC) if is_idle else INTERVAL_SEC
        self._begin()
