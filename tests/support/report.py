"""A pytest plugin that ends a run with what passed in each area, and with every skipped test by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import PurePosixPath

import pytest

OUTCOMES = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")


def area(node_id: str) -> str:
    """The folder below tests/, or for a test beside the folders what its file is called after."""
    path = PurePosixPath(node_id.partition("::")[0])
    inside = path.parts[path.parts.index("tests") + 1 :] if "tests" in path.parts else path.parts
    return inside[0] if len(inside) > 1 else path.stem.removeprefix("test_")


def area_lines(outcomes: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each area, from pairs of node id and outcome."""
    counts: dict[str, Counter[str]] = {}
    for node_id, outcome in outcomes:
        counts.setdefault(area(node_id), Counter())[outcome] += 1
    width = max((len(name) for name in counts), default=0)
    return [
        f"{name:<{width}}  " + ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES if found[outcome])
        for name, found in sorted(counts.items())
    ]


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    lines = area_lines((report.nodeid, outcome) for outcome in OUTCOMES for report in stats.get(outcome, []))
    if lines:
        terminalreporter.section("by area")
        terminalreporter.write_line("\n".join(lines))
    skipped = [f"{report.nodeid}: {reason(report)}" for report in stats.get("skipped", [])]
    if skipped:
        terminalreporter.section("skipped, each by name")
        terminalreporter.write_line("\n".join(sorted(skipped)))
