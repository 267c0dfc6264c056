"""What each key has used today (UTC), and its limits of a day."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from omni_ws.errors import RateLimited

DAY_SEC: Final = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class DailyLimits:
    """Limits of a key in a day; None does not apply."""

    tokens: int | None = None
    audio_sec: float | None = None


@dataclass(slots=True)
class UsedToday:
    """Tokens of input and output, and audio heard and spoken."""

    tokens: int = 0
    audio_ms: int = 0


#: What can be kept: the number of the day since 1970, and the use of each key in it.
DailyCounts: TypeAlias = tuple[int, Mapping[str, UsedToday]]


@dataclass(slots=True)
class DailyUse:
    """Counts the use of keys that have a limit. Times are Unix times in seconds.

    A request is counted when it ends, and refused when its key has used its amount: the last one may go beyond.
    A clock that is set back begins no new day: what was used stays so, until the next midnight.
    """

    limits: Mapping[str, DailyLimits]
    day: int = 0
    used: dict[str, UsedToday] = field(default_factory=dict)
    #: Called after every change.
    changed: Callable[[], None] = lambda: None

    def add(self, key_name: str | None, *, tokens: int, audio_ms: int, now: float) -> None:
        """Count a request that has ended."""
        if key_name is None or key_name not in self.limits:
            return
        self._turn(now)
        used = self.used.setdefault(key_name, UsedToday())
        used.tokens += tokens
        used.audio_ms += audio_ms
        self.changed()

    def refusal(self, key_name: str, now: float) -> RateLimited | None:
        """Why the key may send no request now; None if it may."""
        limits = self.limits.get(key_name)
        if limits is None:
            return None
        self._turn(now)
        used = self.used.get(key_name, UsedToday())
        if limits.tokens is not None and used.tokens >= limits.tokens:
            what = f"{limits.tokens} tokens"
        elif limits.audio_sec is not None and used.audio_ms >= limits.audio_sec * 1000:
            what = f"{limits.audio_sec:g} seconds of audio"
        else:
            return None
        wait_ms = math.ceil(((self.day + 1) * DAY_SEC - now) * 1000)
        return RateLimited(f"this key has used its {what} of the day, which ends at 00:00 UTC", retry_after_ms=wait_ms)

    def _turn(self, now: float) -> None:
        today = int(now // DAY_SEC)
        if today > self.day:
            self.day = today
            self.used = {}
        elif today < self.day - 1:  # the clock was wrong when the day began, and would be awaited
            self.day = today
