"""Acknowledgements: when a client is to be told what has come."""

from __future__ import annotations

from typing import Final

#: An acknowledgement goes out after this many accepted chunks (a filled gap counts as one) …
ACK_EVERY_CHUNKS: Final = 16
#: … or this long after the first chunk that is not acknowledged yet, whichever comes first.
ACK_DELAY_SEC: Final = 0.1


class Acknowledgements:
    """Delayed and grouped, as those of RFC 9000, 13.2; ``due`` is set where one should not wait."""

    __slots__ = ("_chunks", "due", "since")

    def __init__(self) -> None:
        #: Whether one should go out now.
        self.due = False
        #: Since when anything was accepted that is not acknowledged.
        self.since: float | None = None
        self._chunks = 0

    def accepted(self, now: float) -> None:
        self._chunks += 1
        if self.since is None:
            self.since = now
        elif self._chunks == ACK_EVERY_CHUNKS:
            self.due = True

    def sent(self) -> None:
        self._chunks = 0
        self.since = None
        self.due = False

    def get_timer(self) -> float | None:
        return None if self.since is None else self.since + ACK_DELAY_SEC

    def handle_timer(self, *, now: float) -> None:
        if self.since is not None and now >= self.since + ACK_DELAY_SEC:
            self.due = True
