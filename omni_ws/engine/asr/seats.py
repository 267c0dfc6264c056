"""Seats: the number of requests that may be listened to at once."""

from __future__ import annotations

from typing import Final

from omni_ws.errors import EngineOverloaded

RETRY_AFTER_MS: Final = 1000


class Seats:
    """Counts requests, each from its first audio to its end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def take(self) -> None:
        """Raise EngineOverloaded when all are taken: refused at once rather than slow for everybody."""
        if self.taken >= self.count:
            raise EngineOverloaded(f"all {self.count} recognisers are in use", retry_after_ms=RETRY_AFTER_MS)
        self.taken += 1

    def leave(self) -> None:
        self.taken -= 1
