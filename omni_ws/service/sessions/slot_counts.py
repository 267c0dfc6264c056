"""Counts of the slots that sessions have taken, by holder: of one process."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from omni_ws.core.quota import TokenBucket


class SlotCounts(Protocol):
    """What admission counts for the server as a whole. ``None`` is the holder of what counts against nobody else."""

    @property
    def total(self) -> int:
        """How many slots are taken."""
        ...

    def held(self, holder: str) -> int:
        """How many of them ``holder`` has."""
        ...

    def holders(self, beside: str) -> int:
        """How many holders have a slot, with ``beside`` as one of them."""
        ...

    def add(self, holder: str | None) -> None:
        """Count a slot that this process has given."""

    def remove(self, holder: str | None) -> None:
        """Count it no more."""

    def bucket(self, kind: str, key: str, *, rate: float, capacity: float, now: float) -> TokenBucket:
        """The rate of a key, of the kind ``requests`` or ``input``; called once for each."""
        ...


class OwnSlotCounts:
    """The counts of a server of one process."""

    def __init__(self) -> None:
        self.total = 0
        self._held: Counter[str] = Counter()

    def held(self, holder: str) -> int:
        return self._held[holder]

    def holders(self, beside: str) -> int:
        return len(self._held.keys() | {beside})

    def add(self, holder: str | None) -> None:
        self.total += 1
        if holder is not None:
            self._held[holder] += 1

    def remove(self, holder: str | None) -> None:
        self.total -= 1
        if holder is not None:
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]

    def bucket(self, kind: str, key: str, *, rate: float, capacity: float, now: float) -> TokenBucket:
        return TokenBucket(rate=rate, capacity=capacity, now=now)
