"""TokenRanges: a set of token positions, as half-open ranges."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

from omni_ws.errors import InvalidValue


class TokenRanges:
    """The union of ranges [start, end), which may overlap, touch or be empty.

    Raises InvalidValue, naming ``param`` and the index of the range, for a range that ends before its start.
    """

    __slots__ = ("_ends", "_starts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = (), *, param: str | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        given = list(ranges)
        for index, (start, end) in enumerate(given):
            if start > end:
                raise InvalidValue(
                    f"the end of a range ({end}) must not be less than its start ({start})",
                    param=param and f"{param}[{index}]",
                )
        for start, end in sorted(one for one in given if one[0] < one[1]):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __contains__(self, position: int) -> bool:
        place = bisect_right(self._starts, position) - 1
        return place >= 0 and position < self._ends[place]

    @property
    def first(self) -> int | None:
        """The lowest position, or None for an empty set."""
        return self._starts[0] if self._starts else None

    def pairs(self) -> list[tuple[int, int]]:
        """Return the union as sorted ranges that neither touch nor overlap."""
        return list(zip(self._starts, self._ends, strict=True))

    def below(self, limit: int) -> Iterator[int]:
        """Yield the positions below ``limit`` in ascending order."""
        for start, end in zip(self._starts, self._ends, strict=True):
            if start >= limit:
                return
            yield from range(start, min(end, limit))

    def reaches(self, limit: int) -> bool:
        """Whether the set contains a position at or after ``limit``."""
        return bool(self._ends) and self._ends[-1] > limit
