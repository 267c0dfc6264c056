"""The tables of a run, and whether every target was met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: rounds of what takes seconds, pairs of what takes milliseconds, seconds of what lasts."""

    rounds: int
    pairs: int
    seconds: float


class Report:
    """``table`` begins one, ``row`` adds to it."""

    def __init__(self) -> None:
        self.met = True

    def table(self, what: str, *columns: str) -> None:
        print(f"\n**{what}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *cells: str, met: bool | None = None) -> None:
        """``met`` belongs to the last cell, which names the target."""
        verdict = "" if met is None else (": met" if met else ": MISSED")
        self.met = self.met and met is not False
        print(f"| {' | '.join(cells)}{verdict} |", flush=True)


def milliseconds(seconds: Sequence[float]) -> str:
    """The median, and between which values nine of ten lie."""
    ordered = sorted(seconds)
    rank = len(ordered) // 20
    low, high = ordered[rank], ordered[-1 - rank]
    return f"{statistics.median(ordered) * 1000:.2f} ({low * 1000:.2f} … {high * 1000:.2f})"


def median_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The median over the pairs of how much more the second is."""
    return statistics.median(b - a for a, b in zip(first, second, strict=True))


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """The median over the pairs of the first divided by the second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
