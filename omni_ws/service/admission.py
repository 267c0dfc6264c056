"""Who may come in: sessions of the whole server and of each key, counted for as long as they live, and their rates."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from omni_ws.config.keys import ApiKey
from omni_ws.core.token_bucket import TokenBucket
from omni_ws.errors import EngineOverloaded, OmniError, RateLimited, ShuttingDown
from omni_ws.metrics import Metrics

#: When it is worth another try where a place must become free, which nobody can foretell.
PLACE_RETRY_MS: Final = 1000
#: Input that a key may send at once after a silence, in seconds of its rate.
INPUT_BURST_SEC: Final = 1.0

#: How many bytes came in; returns the seconds for which no more of them should be read.
InputPace = Callable[[int], float]


class Admission:
    """A session takes a place with ``session`` and gives it back when the block is left, however it is left.

    A session that carries one request counts as that request; those that carry ``many_requests`` ask for each of them
    with ``request``. Rates belong to a key, over all that it has open, and outlive its sessions.
    """

    def __init__(self, *, max_sessions: int, metrics: Metrics | None = None) -> None:
        self.max_sessions = max_sessions
        self.draining = False
        self.sessions = 0
        self._metrics = metrics or Metrics()
        self._by_key: Counter[str] = Counter()
        self._requests: dict[str, TokenBucket] = {}
        self._input: dict[str, TokenBucket] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no session is left."""
        await self._empty.wait()

    @contextmanager
    def session(self, key: ApiKey | None, *, many_requests: bool = False) -> Iterator[None]:
        """Raises ShuttingDown, EngineOverloaded (the server is full) or RateLimited (the key has its share)."""
        self._check_place(key)
        if not many_requests:
            self.request(key)
        self.sessions += 1
        self._empty.clear()
        if key is not None:
            self._by_key[key.name] += 1
        try:
            yield
        finally:
            self.sessions -= 1
            if not self.sessions:
                self._empty.set()
            if key is not None:
                self._by_key[key.name] -= 1
                self._by_key += Counter()  # forget keys that hold nothing

    def _check_place(self, key: ApiKey | None) -> None:
        if self.draining:
            raise self._refused("session", ShuttingDown("the server is shutting down", retry_after_ms=PLACE_RETRY_MS))
        if self.sessions >= self.max_sessions:
            message = f"all {self.max_sessions} sessions are taken"
            raise self._refused("session", EngineOverloaded(message, retry_after_ms=PLACE_RETRY_MS))
        if key is not None and key.max_sessions is not None and self._by_key[key.name] >= key.max_sessions:
            message = f"this key may have {key.max_sessions} sessions at a time"
            raise self._refused("session", RateLimited(message, retry_after_ms=PLACE_RETRY_MS))

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
