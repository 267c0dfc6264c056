"""A pytest plugin that ends a run with what passed in each area, and with every skipped test by its name.

Where there are several runs, ``--keep-outcomes=FILE`` for one and ``--outcomes-before=FILE`` for another make the end
of the latter, pytest's last line included, tell of both, and so on where it keeps them too. A run may tell of several.
``--outcomes-of=NAME`` tells in those reports which run a test was part of.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path, PurePosixPath

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


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("report", "one report over several runs")
    group.addoption("--keep-outcomes", metavar="FILE", type=Path, help="for the run that tells of both")
    group.addoption(
        "--outcomes-before", metavar="FILE", type=Path, action="append", default=[], help="what a run before kept"
    )
    group.addoption(
        "--outcomes-of", metavar="NAME", help="stands behind each test of this run in reports of later ones"
    )


def keep_outcomes(file: Path, terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    kept = {
        outcome: [config.hook.pytest_report_to_serializable(config=config, report=report) for report in reports]
        for outcome, reports in terminalreporter.stats.items()
        if outcome in OUTCOMES
    }
    for data in itertools.chain.from_iterable(kept.values()):
        data.pop("node", None)  # the process that ran the test, where there are several
    for data in kept.get("passed", []):
        data["sections"] = []  # output that was captured, hundreds of megabytes together, and never shown
    if name := config.getoption("--outcomes-of"):
        for data in itertools.chain.from_iterable(kept.values()):
            data["nodeid"] += f" ({name})"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept), encoding="utf-8")


def add_outcomes(files: Iterable[Path], terminalreporter: pytest.TerminalReporter) -> None:
    """What the runs before did counts as this one's, and what one of them left to another does not count."""
    config, stats = terminalreporter.config, terminalreporter.stats
    for file in files:
        for outcome, reports in json.loads(file.read_text(encoding="utf-8")).items():
            for data in reports:
                report = config.hook.pytest_report_from_serializable(config=config, data=data)
                if isinstance(report.longrepr, list):  # JSON has no tuples, and pytest insists on one for a skip
                    report.longrepr = tuple(report.longrepr)
                stats.setdefault(outcome, []).append(report)
    ran = {report.nodeid for outcome in OUTCOMES for report in stats.get(outcome, [])}
    files_with_tests = {node_id.partition("::")[0] for node_id in ran if "::" in node_id}
    skipped = {}
    for report in stats.pop("skipped", []):
        if report.nodeid not in files_with_tests:  # else as a whole, for want of what another run had
            skipped[report.nodeid] = report
    if skipped:
        stats["skipped"] = [*skipped.values()]
    left_out = [item for item in stats.pop("deselected", []) if item.nodeid not in ran]
    if left_out:
        stats["deselected"] = left_out


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Lets no garbage be collected while pytest parses the source of a test that failed.

    What is collected may log its traceback, which parses source too, and in Python 3.11 a parser inside another breaks
    that one ("AST constructor recursion depth mismatch"): instead of the failure there would be an internal error.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    stats = terminalreporter.stats
    if files := terminalreporter.config.getoption("--outcomes-before"):
        add_outcomes(files, terminalreporter)
    if (file := terminalreporter.config.getoption("--keep-outcomes")) is not None:
        keep_outcomes(file, terminalreporter)
    lines = area_lines((report.nodeid, outcome) for outcome in OUTCOMES for report in stats.get(outcome, []))
    if lines:
        terminalreporter.section("by area")
        terminalreporter.write_line("\n".join(lines))
    skipped = [f"{report.nodeid}: {reason(report)}" for report in stats.get("skipped", [])]
    if skipped:
        terminalreporter.section("skipped, each by name")
        terminalreporter.write_line("\n".join(sorted(skipped)))
