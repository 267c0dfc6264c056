"""ReorderBuffer: restores the order of numbered items, as RFC 9000 (2.2) does for the bytes of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_SEQUENCE_ID = 2**32 - 1


class Arrival(Enum):
    """The place of a sequence number relative to what has been released.

    - NEXT: the number that follows the last one released.
    - AHEAD: beyond a gap, inside the window.
    - DUPLICATE: released before, or waiting already.
    - BEYOND_WINDOW: too far ahead to be kept.
    """

    NEXT = "next"
    AHEAD = "ahead"
    DUPLICATE = "duplicate"
    BEYOND_WINDOW = "beyond_window"


@dataclass(frozen=True, slots=True)
class ReorderStatistics:
    """Totals since the buffer was created; times in seconds.

    ``items`` is the number of items that arrived early and were released, ``waited`` the sum of their
    waiting times, ``gaps`` the time during which there was a gap that was filled.
    """

    items: int = 0
    waited: float = 0
    gaps: float = 0


NONE_REORDERED: Final = ReorderStatistics()


class ReorderBuffer(Generic[T]):
    """Holds items that arrive early until the gap before them is filled.

    Sequence numbers start at 0 and are contiguous. A number is inside the window when it is lower than
    ``next_sequence_id + window``, so the buffer holds fewer than ``window`` items. It is the caller who classifies an
    item and then holds it, releases it or drops it: the buffer stays unchanged until the caller knows that the item can
    be accepted.

    ``now``, in seconds of any monotonic clock, serves the statistics alone; the time-out of a gap is the caller's.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: The lowest number that has not been released. The owner may advance it while nothing waits, in place of a
        #: call of ``release``.
        self.next_sequence_id = 0
        self.statistics = NONE_REORDERED
        #: The items that wait, with their times of arrival.
        self._ahead: dict[int, tuple[T, float]] = {}
        self._gap_since = 0.0

    def __len__(self) -> int:
        """The number of items that wait behind a gap."""
        return len(self._ahead)

    @property
    def missing(self) -> range | None:
        """The first gap: the numbers that have to arrive before any waiting item is released."""
        if not self._ahead:
            return None
        return range(self.next_sequence_id, min(self._ahead))

    @property
    def highest(self) -> int | None:
        """The highest number that waits, or None when none does."""
        return max(self._ahead, default=None)

    def behind(self, sequence_id: int) -> list[tuple[int, T]]:
        """Return the waiting items with a number above ``sequence_id``, unordered."""
        return [(number, item) for number, (item, _) in self._ahead.items() if number > sequence_id]

    def classify(self, sequence_id: int) -> Arrival:
        """Return the place of a number. Changes nothing."""
        if sequence_id == self.next_sequence_id:
            return Arrival.NEXT
        if sequence_id < self.next_sequence_id or sequence_id in self._ahead:
            return Arrival.DUPLICATE
        if sequence_id < self.next_sequence_id + self.window:
            return Arrival.AHEAD
        return Arrival.BEYOND_WINDOW

    def hold(self, sequence_id: int, item: T, *, now: float) -> None:
        """Keep an item that is AHEAD until the gap before it is filled."""
        if not self._ahead:
            self._gap_since = now
        self._ahead[sequence_id] = (item, now)

    def release(self, item: T, *, now: float) -> list[T]:
        """Return the item that is NEXT and the waiting items that follow it without a gap."""
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
        """Remove and return the waiting items, in order; the next number is the one after the highest of them."""
        if not self._ahead:
            return []
        dropped = [self._ahead[sequence_id][0] for sequence_id in sorted(self._ahead)]
        self.next_sequence_id = max(self._ahead) + 1
        self._ahead.clear()
        return dropped
