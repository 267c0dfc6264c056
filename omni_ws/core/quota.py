"""Budgets and limits: the bytes that sessions hold, the daily use of an API key, and a rate limit with bursts."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, Self, TypeAlias

import msgspec

from omni_ws.errors import EngineOverloaded, PayloadTooLarge, RateLimited

# Bytes in memory.

#: The bytes of settings, and of history, that any session has: they are part of its base cost, and not charged.
ORDINARY_BYTES: Final = 4096


class ByteBudget:
    """The bytes that all sessions together may hold: of input, decoded media, output, history and settings.

    ``used`` changes on the event loop only. ``decoded``, the bytes of decoded media, changes on the decoding threads,
    under the lock of ``MediaRoom``: separate counters, so the event loop needs no lock.
    """

    __slots__ = ("capacity", "decoded", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.decoded = 0

    @property
    def held(self) -> int:
        """The bytes that count against the capacity."""
        return self.used + self.decoded

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises EngineOverloaded, reserving nothing, if there is no room for them."""
        if self.used + self.decoded + size > self.capacity:
            raise EngineOverloaded(
                "the server's buffer for unprocessed input is full; retry later", retry_after_ms=1000
            )
        self.used += size

    def charge(self, size: int) -> None:
        """Add ``size`` bytes, even beyond the capacity: for data that is in memory already, or must not be lost."""
        self.used += size

    def give(self, size: int) -> None:
        """Release ``size`` bytes."""
        self.used -= size

    def charge_decoded(self, size: int) -> None:
        """Add ``size``, perhaps negative, to the bytes of decoded media. Called under the lock of ``MediaRoom``."""
        self.decoded += size

    def over_half(self, more: int = 0) -> bool:
        """Return whether more than half of the server's capacity would be used with ``more`` bytes.

        The other half is reserved for input.
        """
        return self.used + self.decoded + more > self.capacity // 2


class SessionAccount(ByteBudget):
    """The bytes that one session holds, of all kinds. They are charged to the server's budget, too.

    ``take`` raises PayloadTooLarge beyond the account's own ``capacity``, and EngineOverloaded beyond the server's.
    ``over_half`` is about the server's budget.
    """

    __slots__ = ("_server",)

    def __init__(self, server: ByteBudget, capacity: int) -> None:
        super().__init__(capacity)
        self._server = server

    def take(self, size: int) -> None:
        if self.used + size > self.capacity and size > 0:
            raise PayloadTooLarge(f"a session may hold {self.capacity} bytes together")
        self._server.take(size)
        self.used += size

    def charge(self, size: int) -> None:
        self._server.charge(size)
        self.used += size

    def give(self, size: int) -> None:
        self._server.give(size)
        self.used -= size

    def over_half(self, more: int = 0) -> bool:
        return self._server.over_half(more)


class Room(Protocol):
    """A budget in which a decoder reserves memory before allocating it."""

    def take(self, size: int) -> None:
        """Reserve ``size`` bytes. Raises an OmniError, reserving nothing, if they exceed the budget."""
        ...

    def give(self, size: int) -> None:
        """Release ``size`` bytes."""
        ...


#: A room without limit, for media that are not a client's. Threads share it, so its count means nothing.
UNLIMITED: Final[Room] = ByteBudget(sys.maxsize)


@contextmanager
def reserved(room: Room, size: int, *, keep: bool = False) -> Iterator[None]:
    """Reserve ``size`` bytes while the ``with`` block runs; with ``keep``, also after it, unless it raises."""
    room.take(size)
    try:
        yield
    except BaseException:
        room.give(size)
        raise
    if not keep:
        room.give(size)


class Reservation:
    """A context manager that reserves the largest size requested so far, until its ``with`` block ends."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._size = 0

    def raise_to(self, size: int) -> None:
        """Increase the reservation to ``size`` bytes if it is smaller. Raises the errors of ``Room.take``."""
        if size > self._size:
            self._room.take(size - self._size)
            self._size = size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._room.give(self._size)
        self._size = 0


class Share:
    """The bytes that one holder reserves in a budget, and resizes as its data grows and shrinks."""

    __slots__ = ("budget", "size")

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.size = 0

    def resize(self, size: int) -> None:
        """Set the reservation to ``size`` bytes. Raises as the budget's ``take`` does, changing nothing."""
        if size > self.size:
            self.budget.take(size - self.size)
        else:
            self.budget.give(self.size - size)
        self.size = size

    def force(self, size: int) -> None:
        """Set the reservation to ``size`` bytes, even beyond the capacity: the data is in memory already."""
        self.budget.charge(size - self.size)
        self.size = size

    def move(self, budget: ByteBudget) -> None:
        """Move the reservation to another budget, even beyond the capacity of that."""
        self.budget.give(self.size)
        self.budget = budget
        budget.charge(self.size)


def keep_newest(entries: dict[str, Any], most: int) -> None:
    """Delete the oldest entries of a dict beyond the newest ``most``."""
    while len(entries) > most:
        del entries[next(iter(entries))]


def beyond_ordinary(size: int) -> int:
    """Return how many of ``size`` bytes of settings, or of a history, are charged: those beyond ORDINARY_BYTES."""
    return max(0, size - ORDINARY_BYTES)


def memory_of(value: Any) -> int:
    """Return the bytes of memory of a value and all that it contains: JSON values, bytes, and structs of these.

    An object that occurs more than once is counted once.
    """
    total, left, seen = 0, [value], {0}
    while left:
        one = left.pop()
        kind = type(one)
        if kind is bool or one is None or id(one) in seen:
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if kind is dict:
            left += one
            left += one.values()
        elif kind is list or kind is tuple:
            left += one
        elif issubclass(kind, msgspec.Struct):
            left += [getattr(one, name) for name in one.__struct_fields__]
    return total


# The use of API keys in a day (UTC).

DAY_SEC: Final = 24 * 60 * 60
#: The use that is assumed for a request until it has ended.
RESERVED_TOKENS: Final = 1024
RESERVED_AUDIO_MS: Final = 30_000
#: The wait that is advised to a client, until another request of its key ends.
RUNNING_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class DailyLimits:
    """The daily limits of a key; None for no limit."""

    tokens: int | None = None
    audio_sec: float | None = None


@dataclass(slots=True)
class UsedToday:
    """The use of a key in one day: tokens of input and output, and milliseconds of audio heard and spoken."""

    tokens: int = 0
    audio_ms: int = 0

    def add(self, tokens: int, audio_ms: int) -> None:
        self.tokens += tokens
        self.audio_ms += audio_ms


#: The counts in a form that can be stored: the day, as its number since 1970, and the use of each key in it.
DailyCounts: TypeAlias = tuple[int, Mapping[str, UsedToday]]


@dataclass(slots=True)
class DailyUse:
    """Counts the daily use of the API keys that have a limit. Times are Unix times in seconds.

    A request reserves an amount when it begins (``reserve``), and its actual use is counted when it ends (``add``). A
    request is refused if the use of its key, with the reserved amounts, has reached the limit: the last request may
    exceed it. Reservations stay over midnight. A clock that is set back begins no new day: counts stay until the next
    midnight.
    """

    limits: Mapping[str, DailyLimits]
    day: int = 0
    used: dict[str, UsedToday] = field(default_factory=dict)
    #: For each key, how many requests have begun and not ended.
    running: Counter[str] = field(default_factory=Counter)
    #: Called after every change.
    changed: Callable[[], None] = lambda: None

    def reserve(self, key_name: str | None, now: float) -> None:
        """Reserve RESERVED_TOKENS and RESERVED_AUDIO_MS for a request that begins now.

        If the key has reached a limit, raises the error that ``refusal`` returns, and reserves nothing.
        """
        if key_name is None or key_name not in self.limits:
            return
        if (refusal := self.refusal(key_name, now)) is not None:
            raise refusal
        self.running[key_name] += 1

    def add(self, key_name: str | None, *, tokens: int, audio_ms: int, now: float, reserved: bool = False) -> None:
        """Count the use of a request that has ended; call ``changed``. ``reserved``: release its reservation, too."""
        if key_name is None or key_name not in self.limits:
            return
        self._turn(now)
        if reserved:
            self.running[key_name] -= 1
        self.used.setdefault(key_name, UsedToday()).add(tokens, audio_ms)
        self.changed()

    def refusal(self, key_name: str, now: float, *, beside: int = 0) -> RateLimited | None:
        """Return the error if a request of the key must not begin now; None if it may.

        The reservations of ``beside`` of the running requests do not count.
        """
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
        """Return the tokens and the audio that the key has used today."""
        return self.used.get(key_name, UsedToday())

    def running_of(self, key_name: str) -> int:
        """Return how many requests of the key have begun and not ended."""
        return self.running[key_name]

    def replace(self, day: int, used: Mapping[str, UsedToday]) -> None:
        """Replace all counts with the combined counts of all workers, and call ``changed``."""
        self.day, self.used = day, dict(used)
        self.changed()

    def _turn(self, now: float) -> None:
        today = int(now // DAY_SEC)
        if today > self.day:
            self.day = today
            self.used = {}
        elif today < self.day - 1:  # the clock was ahead when the day began: do not wait for that day
            self.day = today


# A rate limit.


class TokenBucket:
    """A rate limiter that allows bursts: a token bucket, which starts full.

    It refills at ``rate`` tokens a second up to ``capacity``. ``now`` is in seconds of any monotonic clock and must not
    decrease.
    """

    def __init__(self, *, rate: float, capacity: float, now: float) -> None:
        self.rate = rate
        self.capacity = capacity
        #: The tokens as of ``_filled_at``; negative after an overdraft by ``spend``.
        self._tokens = capacity
        self._filled_at = now

    def try_take(self, amount: float = 1, *, now: float) -> float:
        """Take ``amount`` tokens and return 0, or take none and return the seconds until there are enough."""
        self._fill(now)
        if self._tokens < amount:
            return self._until(amount)
        self._tokens -= amount
        return 0

    def spend(self, amount: float, *, now: float) -> float:
        """Take ``amount`` tokens even if there are fewer; return the seconds until the overdraft is made up, or 0."""
        self._fill(now)
        self._tokens -= amount
        return self._until(0)

    def _fill(self, now: float) -> None:
        self._tokens = min(self.capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now

    def _until(self, tokens: float) -> float:
        return max(0.0, (tokens - self._tokens) / self.rate)
