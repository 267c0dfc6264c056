"""Measures the delay of the event loop, which everything in a real-time server has to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

INTERVAL_SEC: Final = 0.1


@contextmanager
def watching_loop(observe: Callable[[float], object]) -> Iterator[None]:
    """Within the block, call ``observe`` ten times a second with the seconds by which that call is late."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def wait() -> None:
        nonlocal timer
        due = loop.time() + INTERVAL_SEC
        timer = loop.call_at(due, wake, due)

    def wake(due: float) -> None:
        observe(max(0.0, loop.time() - due))
        wait()

    wait()
    try:
        yield
    finally:
        timer.cancel()
