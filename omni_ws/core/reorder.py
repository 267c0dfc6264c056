"""Puts numbered items back in order: the reassembly of RFC 9000 streams, for whole chunks."""

from __future__ import annotations

from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")

MAX_SEQUENCE_ID = 2**32 - 1


class Arrival(Enum):
    """Where a sequence number stands relative to what has been released."""

    NEXT = "next"
    AHEAD = "ahead"
    DUPLICATE = "duplicate"
    BEYOND_WINDOW = "beyond_window"


class ReorderBuffer(Generic[T]):
    """Numbers start at 0 and are contiguous; of copies of one number the first counts.

    A number is inside the window when it is lower than ``next_sequence_id + window``.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: Everything below it has been released, in order.
        self.next_sequence_id = 0
        self._ahead: dict[int, T] = {}

    def __len__(self) -> int:
        """How many items wait behind a gap."""
        return len(self._ahead)

    @property
    def missing(self) -> range | None:
        """The first gap: the numbers that the items waiting here wait for."""
        if not self._ahead:
            return None
        return range(self.next_sequence_id, min(self._ahead))

    @property
    def highest(self) -> int | None:
        """The highest number that waits behind a gap."""
        return max(self._ahead, default=None)

    def classify(self, sequence_id: int) -> Arrival:
        if sequence_id == self.next_sequence_id:
            return Arrival.NEXT
        if sequence_id < self.next_sequence_id or sequence_id in self._ahead:
            return Arrival.DUPLICATE
        if sequence_id < self.next_sequence_id + self.window:
            return Arrival.AHEAD
        return Arrival.BEYOND_WINDOW

    def hold(self, sequence_id: int, item: T) -> None:
        """Keep an item that is AHEAD until its gap is filled."""
        self._ahead[sequence_id] = item

    def release(self, item: T) -> list[T]:
        """Pass on the item that is NEXT, and what waited behind it."""
        self.next_sequence_id += 1
        if not self._ahead:
            return [item]
        run = [item]
        while (waiting := self._ahead.pop(self.next_sequence_id, None)) is not None:
            run.append(waiting)
            self.next_sequence_id += 1
        return run

    def discard(self) -> list[T]:
        """Give up on what waits behind a gap, gap included: numbering goes on after the highest number held."""
        if not self._ahead:
            return []
        dropped = [self._ahead[sequence_id] for sequence_id in sorted(self._ahead)]
        self.next_sequence_id = max(self._ahead) + 1
        self._ahead.clear()
        return dropped
