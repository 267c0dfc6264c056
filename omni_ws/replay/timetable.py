"""When things happen in a replay: as they did, faster, or as fast as can be; and never before what they waited for."""

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
    """``speed`` is a factor; ``patience``, in seconds, how long the server is waited for."""

    speed: float = 1.0
    patience: float = 10.0


class Timetable:
    """The clock of one session. What came late moves all that follows."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._began = time.monotonic()
        self._late = 0.0
        self._changed = asyncio.Event()

    def now(self) -> float:
        """Milliseconds since the beginning."""
        return (time.monotonic() - self._began) * 1000

    def change(self) -> None:
        """Something was heard."""
        self._changed.set()

    async def until(self, at: float, is_ready: Callable[[], bool]) -> bool:
        """Wait for the recorded time ``at``, in milliseconds, and then for ``is_ready``; False where that took longer
        than there is patience for."""
        at = at / self._pace.speed
        await asyncio.sleep(max(0.0, at + self._late - self.now()) / 1000)
        ready = await self.wait(is_ready)
        self._late = max(self._late, self.now() - at)
        return ready

    async def wait(self, is_ready: Callable[[], bool]) -> bool:
        try:
            async with asyncio.timeout(self._pace.patience):
                while not is_ready():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True
