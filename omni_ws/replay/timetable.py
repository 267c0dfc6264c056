"""Schedule of a replay: at recorded speed, faster or without pauses, but never before the events a step depends on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

#: ``--speed max``.
AT_ONCE: Final = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """``speed`` is a factor; ``patience`` is the time-out in seconds of each awaited event."""

    speed: float = 1.0
    patience: float = 10.0


class Timetable:
    """Clock of one session. A delay postpones everything after it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Milliseconds since the start."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Signals that something was received, so that conditions are tested again."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool]) -> bool:
        """Waits for the recorded time ``at`` (milliseconds) and then for ``is_ready``.

        Returns False if the latter timed out.
        """
        at = at / self._pace.speed
        await asyncio.sleep(max(0.0, at + self._late - self.now()) / 1000)
        ready = await self.wait(is_ready)
        self._late = max(self._late, self.now() - at)
        return ready

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        """Waits for a condition; returns False if that timed out."""
        try:
            async with asyncio.timeout(self._pace.patience):
                while not is_ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
