"""The module that planted mutants ask; a copy is laid into the tree as ``omni_ws/mutant_probe.py``, and it is a pytest
plugin there.

``MUTANT=17`` makes mutant 17 act, in this process and in its children. ``MUTANT_HITS=FOLDER`` writes a line
``number TAB test`` there for each test that reaches each mutant, and ``test TAB seconds TAB outcome`` into
``FOLDER.tests``. A child process counts for the test that started it.
"""

from __future__ import annotations

import builtins
import os
from typing import Any

_ACTIVE = int(os.environ.get("MUTANT", "-1"))
_HITS = os.environ.get("MUTANT_HITS")
_seen: set[int] = set()
_test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
_is_plugin = False


def _mutant(number: int) -> bool:
    """Whether the mutant acts."""
    if number not in _seen and _HITS is not None:
        _seen.add(number)
        if _test and not _is_plugin:
            _write([number])
    return number == _ACTIVE


def _write(numbers: Any) -> None:
    try:
        with open(f"{_HITS}/{os.getpid()}", "a", encoding="utf-8") as file:
            file.writelines(f"{number}\t{_test}\n" for number in numbers)
    except OSError:  # a test may have filled the disk, or may have opened all files that it can
        pass


builtins._mutant = _mutant  # type: ignore[attr-defined]


def pytest_configure() -> None:
    global _is_plugin
    _is_plugin = _HITS is not None


def pytest_runtest_logstart(nodeid: str) -> None:
    global _test
    _test = nodeid
    _seen.clear()


def pytest_runtest_logreport(report: Any) -> None:
    if _HITS is None or hasattr(report, "node"):  # the report of another process, which xdist passes on
        return
    if report.when == "teardown":
        _write(list(_seen))
    with open(f"{_HITS}.tests", "a", encoding="utf-8") as file:
        file.write(f"{report.nodeid}\t{report.duration:.4f}\t{report.outcome}\n")
