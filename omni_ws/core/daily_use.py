"""What each key has used today (UTC), and its limits of a day."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from omni_ws.errors import RateLimited

DAY_SEC: Final = 24 * 60 * 60
#: What a request is taken to use until it has ended: nobody knows what it will be.
RESERVED_TOKENS: Final = 1024
RESERVED_AUDIO_MS: Final = 30_000
#: Advised to a client that waits for the end of another request of its key.
RUNNING_RETRY_MS: Final = 1000


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

    A request reserves an amount when it begins (``reserve``), and is counted when it ends (``add``). It is refused when
    its key has used its amount, with what is reserved: the last one may go beyond. Reservations outlast the day.
    A clock that is set back begins no new day: what was used stays so, until the next midnight.
    """

    limits: Mapping[str, DailyLimits]
    day: int = 0
    used: dict[str, UsedToday] = field(default_factory=dict)
    #: How many requests of each key have begun and not ended.
    running: Counter[str] = field(default_factory=Counter)
    #: Called after every change.
    changed: Callable[[], None] = lambda: None

    def reserve(self, key_name: str | None, now: float) -> None:
        """Reserve what a request may use that begins now. Raises what ``refusal`` returns, reserving nothing."""
        if key_name is None or key_name not in self.limits:
            return
        if (refusal := self.refusal(key_name, now)) is not None:
            raise refusal
        self.running[key_name] += 1

    def add(self, key_name: str | None, *, tokens: int, audio_ms: int, now: float, reserved: bool = False) -> None:
        """Count a request that has ended, and give back what it has ``reserved``."""
        if key_name is None or key_name not in self.limits:
            return
        self._turn(now)
        if reserved:
            self.running[key_name] -= 1
        used = self.used.setdefault(key_name, UsedToday())
        used.tokens += tokens
        used.audio_ms += audio_ms
        self.changed()

    def refusal(self, key_name: str, now: float, *, beside: int = 0) -> RateLimited | None:
        """Why the key may send no request now, ``beside`` so many of those that run; None if it may."""
        limits = self.limits.get(key_name)
        if limits is None:
            return None
        self._turn(now)
        used, running = self.used_by(key_name), self.running_of(key_name) - beside
        if limits.tokens is not None and used.tokens + running * RESERVED_TOKENS >= limits.tokens:
            what, is_used = f"{limits.tokens} tokens", used.tokens >= limits.tokens
        elif limits.audio_sec is not None and used.audio_ms + running * RESERVED_AUDIO_MS >= limits.audio_sec * 1000:
            what, is_used = f"{limits.audio_sec:g} seconds of audio", used.audio_ms >= limits.audio_sec * 1000
        else:
            return None
        if not is_used:
            message = f"what is left of this key's {what} of the day is reserved for requests that run; retry later"
            return RateLimited(message, retry_after_ms=RUNNING_RETRY_MS)
        wait_ms = math.ceil(((self.day + 1) * DAY_SEC - now) * 1000)
        return RateLimited(f"this key has used its {what} of the day, which ends at 00:00 UTC", retry_after_ms=wait_ms)

    def used_by(self, key_name: str) -> UsedToday:
        """What the key has used today."""
        return self.used.get(key_name, UsedToday())

    def running_of(self, key_name: str) -> int:
        """How many requests of the key have begun and not ended."""
        return self.running[key_name]

    def _turn(self, now: float) -> None:
        today = int(now // DAY_SEC)
        if today > self.day:
            self.day = today
            self.used = {}
        elif today < self.day - 1:  # the clock was wrong when the day began, and would be awaited
            self.day = today
