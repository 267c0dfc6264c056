"""Puts numbered items back in order: the reassembly of RFC 9000 streams, for whole chunks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_SEQUENCE_ID = 2**32 - 1


class Arrival(Enum):
    """Where a sequence number stands relative to what has been released."""

    NEXT = "next"
    AHEAD = "ahead"
    DUPLICATE = "duplicate"
    BEYOND_WINDOW = "beyond_window"


@dataclass(frozen=True, slots=True)
class ReorderStatistics:
    """Since the beginning: how many items came ahead of their turn, how long those waited together, and for how long
    there was a gap; in seconds."""

    items: int = 0
    waited: float = 0
    gaps: float = 0


NONE_REORDERED: Final = ReorderStatistics()


class ReorderBuffer(Generic[T]):
    """Numbers start at 0 and are contiguous; of copies of one number the first counts.

    A number is inside the window when it is lower than ``next_sequence_id + window``. ``now`` is for the statistics.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: Everything below it has been released, in order.
        self.next_sequence_id = 0
        self.statistics = NONE_REORDERED
        #: With the time at which each came.
        self._ahead: dict[int, tuple[T, float]] = {}
        self._gap_since = 0.0

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

    def behind(self, sequence_id: int) -> list[tuple[int, T]]:
        """What waits behind a gap with a higher number."""
        return [(number, item) for number, (item, _) in self._ahead.items() if number > sequence_id]

    def classify(self, sequence_id: int) -> Arrival:
        if sequence_id == self.next_sequence_id:
            return Arrival.NEXT
        if sequence_id < self.next_sequence_id or sequence_id in self._ahead:
            return Arrival.DUPLICATE
        if sequence_id < self.next_sequence_id + self.window:
            return Arrival.AHEAD
        return Arrival.BEYOND_WINDOW

    def hold(self, sequence_id: int, item: T, *, now: float) -> None:
        """Keep an item that is AHEAD until its gap is filled."""
        if not self._ahead:
            self._gap_since = now
        self._ahead[sequence_id] = (item, now)

    def release(self, item: T, *, now: float) -> list[T]:
        """Pass on the item that is NEXT, and what waited behind it."""
        self.next_sequence_id += 1
        if not self._ahead:
            return [item]
        run = [item]
        waited = 0.0
        while (waiting := self._ahead.pop(self.next_sequence_id, None)) is not None:
            run.append(waiting[0])
            waited += now - waiting[1]
            self.next_sequence_id += 1
        if len(run) > 1:
            before = self.statistics
            self.statistics = ReorderStatistics(
                before.items + len(run) - 1, before.waited + waited, before.gaps + (now - self._gap_since)
            )
            self._gap_since = now
        return run

    def discard(self) -> list[T]:
        """Give up on what waits behind a gap, gap included: numbering goes on after the highest number held."""
        if not self._ahead:
            return []
        dropped = [self._ahead[sequence_id][0] for sequence_id in sorted(self._ahead)]
        self.next_sequence_id = max(self._ahead) + 1
        self._ahead.clear()
        return dropped
