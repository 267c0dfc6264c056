"""``python -m support.summary NAME…`` tells how parts of the tests ended, by the files that tests/run_part.sh left.

It prints each skipped test by its name, the 25 slowest tests, the processor time and the wall time of each part, and
last one line that counts the tests of all parts. It exits with 1 if a test failed or if a part left no results.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

FOLDER: Final = Path(".cache")
SLOWEST: Final = 25


@dataclass(frozen=True)
class Outcome:
    test: str
    #: passed, failed or skipped
    outcome: str
    seconds: float
    reason: str = ""


def outcomes(file: Path) -> list[Outcome]:
    """What a file in JUnit's format says of each test."""
    found = []
    for case in ElementTree.parse(file).iter("testcase"):
        test = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        seconds = float(case.get("time", 0))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.append(Outcome(test, "failed", seconds))
        elif skipped is not None:
            found.append(Outcome(test, "skipped", seconds, skipped.get("message", "")))
        else:
            found.append(Outcome(test, "passed", seconds))
    return found


def without_modules_that_ran(found: list[Outcome]) -> list[Outcome]:
    """A module that one part skips as a whole, for want of a package, may have run in another part."""
    ran = {each.test.partition("::")[0] for each in found if "::" in each.test}
    return [each for each in found if each.outcome != "skipped" or each.test not in ran]


def times(name: str) -> str:
    user, system, wall = map(float, (FOLDER / f"test-{name}.time").read_text("utf-8").split()[-3:])
    return f"{name}: {user + system:.0f} s of the processors, {wall:.0f} s of the clock"


def main(names: list[str]) -> int:
    found: list[Outcome] = []
    missing = []
    for name in names:
        try:
            found += outcomes(FOLDER / f"test-{name}.xml")
        except (OSError, ElementTree.ParseError):  # its run broke off
            missing.append(name)
    found = without_modules_that_ran(found)
    if skipped := sorted({f"{each.test}: {each.reason}" for each in found if each.outcome == "skipped"}):
        print("skipped, each by name", *skipped, sep="\n  ")
    print(f"the {SLOWEST} slowest")
    for each in sorted(found, key=lambda each: each.seconds, reverse=True)[:SLOWEST]:
        print(f"  {each.seconds:6.1f} s  {each.test}")
    print("parts", *(times(name) for name in names), sep="\n  ")
    for name in missing:
        print(f"{name} broke off", file=sys.stderr)
    counts = Counter(each.outcome for each in found)
    failed = counts["failed"] + len(missing)
    print(f"{counts['passed']} passed, {failed} failed, {counts['skipped']} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
