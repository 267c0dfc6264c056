"""Seats: the number of requests that may be listened to at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from omni_ws.errors import EngineOverloaded

RETRY_AFTER_MS: Final = 1000


class Seats:
    """Counts requests, each from its first audio to its end: ``most``, and no more than ``carried`` tells just now."""

    def __init__(self, most: int, carried: Callable[[], int] | None = None) -> None:
        self.taken = 0
        self._most = most
        self._carried = carried

    @property
    def count(self) -> int:
        return self._most if self._carried is None else min(self._most, self._carried())

    def take(self) -> None:
        """Raise EngineOverloaded when all are taken: refused at once rather than slow for everybody."""
        if self.taken >= (count := self.count):
            raise EngineOverloaded(f"all {count} recognisers are in use", retry_after_ms=RETRY_AFTER_MS)
        self.taken += 1

    def leave(self) -> None:
        self.taken -= 1
