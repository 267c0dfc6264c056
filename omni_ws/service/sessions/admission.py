"""Who may come in: sessions of the whole server and of each key, counted for as long as they live, and their rates."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from omni_ws.config.keys import ApiKey
from omni_ws.core.addresses import Addresses
from omni_ws.core.token_bucket import TokenBucket
from omni_ws.errors import EngineOverloaded, OmniError, RateLimited, ShuttingDown
from omni_ws.metrics import Metrics

#: When it is worth another try where a place must become free, which nobody can foretell.
PLACE_RETRY_MS: Final = 1000
#: Input that a key may send at once after a silence, in seconds of its rate.
INPUT_BURST_SEC: Final = 1.0

#: How many bytes came in; returns the seconds for which no more of them should be read.
InputPace = Callable[[int], float]


class Place:
    """A place that was taken. One that is lent may be taken back for another client until it is kept."""

    def __init__(self, admission: Admission, key: ApiKey | None, holder: str | None) -> None:
        self._admission = admission
        self.key = key
        #: What it is counted under; None for nothing.
        self.holder = holder

    def keep(self) -> None:
        """From now on it is not lent any more. Raises as ``Admission.session`` where it was taken back meanwhile."""
        self._admission.keep(self)


class Admission:
    """A session takes a place with ``session`` and gives it back when the block is left, however it is left.

    A session that carries one request counts as that request; those that carry ``many_requests`` ask for each of them
    with ``request``. Rates belong to a key, over all that it has open, and outlive its sessions.

    Above half occupancy one holder, a key or the address of a client without one, has at most a fair share: the places
    divided by the number of holders, with one more than there are, so that one who comes finds room. A key whose
    ``max_sessions`` is set has that instead.
    """

    def __init__(
        self,
        *,
        max_sessions: int,
        metrics: Metrics | None = None,
        addresses: Addresses | None = None,
        keys: Iterable[ApiKey] = (),
    ) -> None:
        self.max_sessions = max_sessions
        #: The names of the keys whose requests may go before those of others.
        self._preferred = frozenset(key.name for key in keys if key.priority)
        self.draining = False
        #: How many keys there are; None where clients need none, and there may be any number of holders.
        self.known_keys: int | None = None
        #: What ends the session that has had no input for longest, and gives its place back at once; None for none.
        self.oldest_empty: Callable[[], Callable[[], None] | None] = lambda: None
        self._metrics = metrics or Metrics()
        self._addresses = addresses or Addresses()
        self._taken: set[Place] = set()
        #: Of these, the ones that are lent, the oldest first.
        self._lent: dict[Place, None] = {}
        self._held: Counter[str] = Counter()
        self._requests: dict[str, TokenBucket] = {}
        self._input: dict[str, TokenBucket] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def sessions(self) -> int:
        return len(self._taken)

    async def wait_empty(self) -> None:
        """Waits until no session is left."""
        await self._empty.wait()

    @contextmanager
    def session(
        self, key: ApiKey | None, *, client: str = "", many_requests: bool = False, lent: bool = False
    ) -> Iterator[Place]:
        """``client`` is the address that it comes from. A place that is ``lent`` is to be kept once it is earned.

        Where all places are taken, the oldest that is lent is taken back, or else the oldest session without input
        ends. Raises ShuttingDown, EngineOverloaded (the server is full) or RateLimited (the holder has its share).
        """
        holder = self._holder(key, client)
        self._check(key, holder)
        if not many_requests:
            self.request(key)
        self._make_room()
        place = Place(self, key, holder)
        self._take(place)
        if lent:
            self._lent[place] = None
        try:
            yield place
        finally:
            self._give_back(place)

    def check(self, key: ApiKey | None, *, client: str = "") -> None:
        """Raises what ``session`` would raise now, but for rates of requests; takes nothing."""
        self._check(key, self._holder(key, client))

    def keep(self, place: Place) -> None:
        """See ``Place``."""
        self._lent.pop(place, None)
        if place not in self._taken:
            self._check(place.key, place.holder)
            self._make_room()
            self._take(place)

    def _holder(self, key: ApiKey | None, client: str) -> str | None:
        return self._addresses.counted(client) if key is None else f"key {key.name}"

    def _take(self, place: Place) -> None:
        self._taken.add(place)
        self._empty.clear()
        if place.holder is not None:
            self._held[place.holder] += 1

    def _give_back(self, place: Place) -> None:
        """Idempotent: a place that was lent may have been taken back."""
        self._lent.pop(place, None)
        if place not in self._taken:
            return
        self._taken.remove(place)
        if not self._taken:
            self._empty.set()
        if place.holder is not None:
            self._held[place.holder] -= 1
            if not self._held[place.holder]:
                del self._held[place.holder]

    def _make_room(self) -> None:
        if self.sessions < self.max_sessions:
            return
        if self._lent:
            self._give_back(next(iter(self._lent)))
        elif (end := self.oldest_empty()) is not None:
            end()

    def _check(self, key: ApiKey | None, holder: str | None) -> None:
        if self.draining:
            raise self._refused("session", ShuttingDown("the server is shutting down", retry_after_ms=PLACE_RETRY_MS))
        own_limit = None if key is None else key.max_sessions
        held = 0 if holder is None else self._held[holder]
        if own_limit is not None and held >= own_limit:
            message = f"this key may have {own_limit} sessions at a time"
            raise self._refused("session", RateLimited(message, retry_after_ms=PLACE_RETRY_MS))
        if self.sessions >= self.max_sessions and not self._lent and self.oldest_empty() is None:
            message = f"all {self.max_sessions} sessions are taken"
            raise self._refused("session", EngineOverloaded(message, retry_after_ms=PLACE_RETRY_MS))
        if own_limit is None and holder is not None and held >= self._share(holder):
            whose = "this address" if key is None else "this key"
            message = f"{whose} has its share of the sessions, {held}, while more than half of all are taken"
            raise self._refused("session", RateLimited(message, retry_after_ms=PLACE_RETRY_MS))

    def _share(self, holder: str) -> int:
        """How many places ``holder`` may have now."""
        if 2 * self.sessions < self.max_sessions:
            return self.max_sessions
        holders = len(self._held.keys() | {holder}) + 1
        return max(1, self.max_sessions // (holders if self.known_keys is None else min(holders, self.known_keys)))

    def _refused(self, what: str, error: OmniError) -> OmniError:
        self._metrics.refused.labels(what, error.code).inc()
        return error

    def request(self, key: ApiKey | None) -> None:
        """Count a request of ``key``. Raises RateLimited past its rate; such a request is not counted."""
        if key is None or key.requests_per_sec is None:
            return
        now = _now()
        bucket = self._requests.get(key.name)
        if bucket is None:
            capacity = max(1.0, key.requests_per_sec) if key.burst is None else key.burst
            bucket = self._requests[key.name] = TokenBucket(rate=key.requests_per_sec, capacity=capacity, now=now)
        if wait := bucket.try_take(now=now):
            message = f"this key may send {key.requests_per_sec:g} requests a second"
            raise self._refused("request", RateLimited(message, retry_after_ms=math.ceil(wait * 1000)))

    def priority(self, owner: str | None, wanted: int) -> int:
        """What ``wanted`` counts as for the key of that name: below 0, before all others, only where it may."""
        return wanted if owner in self._preferred else max(0, wanted)

    def input_pace(self, key: ApiKey | None) -> InputPace | None:
        """What the connections of ``key`` are read at; None where there is no bound."""
        if key is None or key.input_bytes_per_sec is None:
            return None
        bucket = self._input.get(key.name)
        if bucket is None:
            rate = key.input_bytes_per_sec
            bucket = self._input[key.name] = TokenBucket(rate=rate, capacity=rate * INPUT_BURST_SEC, now=_now())
        found = bucket
        return lambda size: found.spend(size, now=_now())


def _now() -> float:
    return asyncio.get_running_loop().time()
