"""``python -m support.parts --part NAME COMMAND … -- ARGUMENTS`` runs parts of the tests side by side, as one run.

Each command is a run of pytest of its own, and gets ``ARGUMENTS``. The first has the terminal, and the processor when
it wants it: its tests wait in real time, and those of the others fill that time at a lower priority. What the others
print goes to .cache/test-NAME.log, and is shown when they have ended. Tests marked ``real_time`` that failed beside
others run again with the machine to themselves, unless they are many: that counts, and the output names them. The last
line counts the tests of all, and tells how long they took together.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

FOLDER: Final = Path(".cache")
#: Of the parts beside the first. Not the lowest: they have to go on where a machine does other things, too.
NICE: Final = 10
#: The most tests that run again alone: more have failed for another reason than the machine's load.
MAX_ALONE: Final = 5
#: In which a part that was interrupted tears down what it has set up.
INTERRUPTED_WITHIN_SEC: Final = 60.0


@dataclass(frozen=True)
class Part:
    name: str
    command: str

    @property
    def log(self) -> Path:
        return FOLDER / f"test-{self.name}.log"

    @property
    def outcomes(self) -> Path:
        return FOLDER / f"test-outcomes-{self.name}.json"

    @property
    def alone(self) -> Part:
        """The part that runs some of these tests again."""
        return Part(f"{self.name}-alone", self.command)

    def kept(self) -> dict[str, list[dict[str, Any]]]:
        """Reports by outcome; none where the run broke off."""
        if not self.outcomes.exists():
            return {}
        kept: dict[str, list[dict[str, Any]]] = json.loads(self.outcomes.read_text("utf-8"))
        return kept

    def start(self, arguments: Sequence[str], prefix: Sequence[str] = (), **options: Any) -> subprocess.Popen[bytes]:
        self.outcomes.unlink(missing_ok=True)
        # What failed last is remembered for each: they would write over one another's file.
        kept = (f"--keep-outcomes={self.outcomes}", "-o", f"cache_dir=.pytest_cache/{self.name}")
        return subprocess.Popen([*prefix, *shlex.split(self.command), *kept, *arguments], **options)


class Parts:
    """A plugin whose tests are those of other runs."""

    def __init__(self, parts: Sequence[Part], arguments: Sequence[str]) -> None:
        self._parts = parts
        self._arguments = arguments
        self._in_front: subprocess.Popen[bytes] | None = None

    def interrupt(self, *_: object) -> None:
        """A handler of signals: as Ctrl-C, which the part in front gets by itself."""
        if self._in_front is not None:
            self._in_front.send_signal(signal.SIGINT)
        raise KeyboardInterrupt

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        return True  # none here

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        FOLDER.mkdir(exist_ok=True)
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        assert isinstance(reporter, pytest.TerminalReporter)
        kept = []
        for part, status in self._again_alone(self._run(reporter), reporter):
            counts = {name: len(each) for name, each in part.kept().items()}
            if part.outcomes.exists():
                kept.append(part.outcomes)
            session.testscollected += sum(counts.values())
            if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.testsfailed += max(counts.get("failed", 0) + counts.get("error", 0), 1)
                reporter.write_line(f"{part.name} ended with status {status}", red=True)
        session.config.option.outcomes_before = [*session.config.getoption("--outcomes-before"), *kept]
        return True

    def _run(self, reporter: pytest.TerminalReporter) -> list[tuple[Part, int]]:
        """Each part with its exit status."""
        first, *others = self._parts
        beside = []
        try:
            for part in others:
                with part.log.open("wb") as output:
                    process = part.start(
                        self._arguments,
                        prefix=("nice", "-n", str(NICE)),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C is for this process to pass on
                    )
                beside.append((part, process))
            self._in_front = first.start(self._arguments)
            ended = [(first, self._in_front.wait())]
            for part, process in beside:
                status = process.wait()
                reporter.section(part.name)
                reporter.write(part.log.read_text("utf-8", errors="replace"))
                ended.append((part, status))
            return ended
        finally:
            for _, process in beside:
                process.send_signal(signal.SIGINT)
            for each in (self._in_front, *(process for _, process in beside)):
                if each is not None:
                    _wait_or_kill(each)

    def _again_alone(self, ended: list[tuple[Part, int]], reporter: pytest.TerminalReporter) -> list[tuple[Part, int]]:
        """Run the tests in real time that failed once more, one after another; return the parts with what counts."""
        failed = {part: _failed_in_real_time(part) for part, _ in ended}
        if not 0 < sum(map(len, failed.values())) <= MAX_ALONE:
            return ended
        again = []
        for part, status in ended:
            if tests := failed[part]:
                reporter.section(f"{part.name}: in real time, again alone")
                reporter.write_line("\n".join(tests))
                self._in_front = part.alone.start(tests)
                if self._in_front.wait() in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                    status = _replace_failed(part, tests)
            again.append((part, status))
        return again


def _failed_in_real_time(part: Part) -> list[str]:
    """Node ids."""
    kept = part.kept()
    failed = itertools.chain(kept.get("failed", ()), kept.get("error", ()))
    return sorted({report["nodeid"] for report in failed if "real_time" in report.get("keywords", ())})


def _replace_failed(part: Part, tests: Collection[str]) -> int:
    """Put what the tests did alone in the place of their failures; return the exit status of the part with that."""
    kept = part.kept()
    for outcome in ("failed", "error"):
        kept[outcome] = [report for report in kept.get(outcome, ()) if report["nodeid"] not in tests]
    for outcome, reports in part.alone.kept().items():
        kept.setdefault(outcome, []).extend(reports)
    part.outcomes.write_text(json.dumps({outcome: reports for outcome, reports in kept.items() if reports}), "utf-8")
    return int(pytest.ExitCode.TESTS_FAILED if kept["failed"] or kept["error"] else pytest.ExitCode.OK)


def _wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(INTERRUPTED_WITHIN_SEC)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", nargs=2, action="append", required=True, metavar=("NAME", "COMMAND"))
    parser.add_argument("--outcomes-before", metavar="FILE", help="what a run before kept")
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options = parser.parse_args(own)
    parts = Parts([Part(*each) for each in options.part], arguments[len(own) + 1 :])
    # Where a shell starts this in the background, Ctrl-C is ignored, and so it would be by each part.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, parts.interrupt)
    before = [f"--outcomes-before={options.outcomes_before}"] if options.outcomes_before else []
    # Without capture, which would take what the first part prints.
    return int(pytest.main(["-s", "-p", "no:cacheprovider", *before], plugins=[parts]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
