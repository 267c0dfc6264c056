"""Who may come in: sessions of the whole server and of each key, counted for as long as they live."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from omni_ws.config.keys import ApiKey
from omni_ws.errors import EngineOverloaded, RateLimited, ShuttingDown


class Admission:
    """A session takes a place with ``session`` and gives it back when the block is left, however it is left."""

    def __init__(self, *, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.draining = False
        self.sessions = 0
        self._by_key: Counter[str] = Counter()
        self._empty = asyncio.Event()
        self._empty.set()

    async def wait_empty(self) -> None:
        """Waits until no session is left."""
        await self._empty.wait()

    @contextmanager
    def session(self, key: ApiKey | None) -> Iterator[None]:
        """Raises ShuttingDown, EngineOverloaded (the server is full) or RateLimited (the key has its share)."""
        if self.draining:
            raise ShuttingDown("the server is shutting down", retry_after_ms=1000)
        if self.sessions >= self.max_sessions:
            raise EngineOverloaded(f"all {self.max_sessions} sessions are taken", retry_after_ms=1000)
        if key is not None and key.max_sessions is not None and self._by_key[key.name] >= key.max_sessions:
            raise RateLimited(f"this key may have {key.max_sessions} sessions at a time", retry_after_ms=1000)
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
