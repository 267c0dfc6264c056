"""Prints the tables of a run, and records whether every target was met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of measurement: rounds (of seconds each), pairs (of milliseconds each), and seconds of steady load."""

    rounds: int
    pairs: int
    seconds: float


class Report:
    """Prints tables: ``table`` starts one, ``row`` adds a row."""

    def __init__(self) -> None:
        self.met = True

    def table(self, what: str, *columns: str) -> None:
        print(f"\n**{what}**\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)

    def row(self, *cells: str, met: bool | None = None) -> None:
        """Adds a row; ``met`` is the verdict on the target in the last cell."""
        verdict = "" if met is None else (": met" if met else ": MISSED")
        self.met = self.met and met is not False
        print(f"| {' | '.join(cells)}{verdict} |", flush=True)


def milliseconds(seconds: Sequence[float]) -> str:
    """Median, and the range of the middle 90 %."""
    ordered = sorted(seconds)
    rank = len(ordered) // 20
    low, high = ordered[rank], ordered[-1 - rank]
    return f"{statistics.median(ordered) * 1000:.2f} ({low * 1000:.2f} … {high * 1000:.2f})"


def median_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Median over the pairs of the second minus the first."""
    return statistics.median(b - a for a, b in zip(first, second, strict=True))


def median_ratio(first: Sequence[float], second: Sequence[float]) -> float:
    """Median over the pairs of the first divided by the second."""
    return statistics.median(a / b for a, b in zip(first, second, strict=True))
