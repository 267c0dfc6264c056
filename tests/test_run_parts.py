"""Parts of a test run beside one another end as one run, also where one of them fails, breaks or is interrupted."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PYTEST = f"{shlex.quote(sys.executable)} -m pytest"
#: Says by a pipe that it runs, and in a file that it was torn down.
WAITING = """
import pathlib, pytest, threading

@pytest.fixture
def held():
    yield
    pathlib.Path("{name}.torn").touch()

@pytest.mark.{name}
def test_{name}(held):
    pathlib.Path("{name}.pipe").write_text("runs")
    threading.Event().wait(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\naddopts = -p support.report -ra\nmarkers = front\n    side\n    real_time\n",
        encoding="utf-8",
    )
    return tmp_path


def start(folder: Path, *arguments: str, side: str = f"{PYTEST} -m side") -> subprocess.Popen[str]:
    """A run without the plugins that are installed, which take longer to import than the tests take."""
    parts = ("--part", "first", f"{PYTEST} -m front", "--part", "second", side)
    return subprocess.Popen(
        [sys.executable, "-m", "support.parts", *parts, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def write_tests(folder: Path) -> None:
    (folder / "tests" / "test_one.py").write_text(
        "import pytest\n@pytest.mark.front\ndef test_a(): pass\n@pytest.mark.front\ndef test_b(): pass\n"
        "@pytest.mark.side\ndef test_c(): pass\n@pytest.mark.side\ndef test_d(): assert 0\n",
        encoding="utf-8",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "last"),
    [
        ((), 1, "1 failed, 3 passed in"),
        (("--", "-k", "not test_d"), 0, "3 passed in"),
        (("--", "-k", "test_c or test_b", "-v"), 0, "2 passed in"),
        (("--", "-k", "test_e"), 5, "no tests ran in"),
        (("--", "--no-such-option"), 1, "no tests ran in"),
    ],
)
def test_the_end_counts_all_parts(folder: Path, arguments: tuple[str, ...], status: int, last: str) -> None:
    write_tests(folder)
    with start(folder, *arguments) as parts:
        output, _ = parts.communicate(timeout=60)
    assert parts.returncode == status, output
    assert last in output.splitlines()[-1]
    assert ("FAILED tests/test_one.py::test_d - assert 0" in output.splitlines()) is (last.startswith("1 failed"))


#: Tests in real time, of which one fails the first time and others always, and another test.
LATE = """
import pathlib, pytest

@pytest.mark.front
@pytest.mark.real_time
def test_late():
    tried = pathlib.Path("tried")
    before = tried.exists()
    tried.touch()
    assert before

@pytest.mark.front
@pytest.mark.real_time
@pytest.mark.parametrize("number", range({never}))
def test_never(number): assert 0

@pytest.mark.{mark}
def test_other(): assert {passes}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("never", "passes", "mark", "status", "last"),
    [
        (1, 1, "side", 1, "1 failed, 2 passed"),
        (0, 1, "side", 0, "2 passed, 1 skipped"),
        (0, 0, "side", 1, "1 failed, 1 passed, 1 skipped"),
        (0, 0, "front", 1, "1 failed, 1 passed, 1 skipped"),
        (5, 1, "side", 1, "6 failed, 1 passed"),
    ],
)
def test_in_real_time_what_a_test_does_alone_counts(
    folder: Path, never: int, passes: int, mark: str, status: int, last: str
) -> None:
    late = LATE.format(never=never, passes=passes, mark=mark)
    (folder / "tests" / "test_late.py").write_text(late, encoding="utf-8")
    with start(folder) as parts:
        output, _ = parts.communicate(timeout=60)
    assert parts.returncode == status, output
    assert last in output.splitlines()[-1]
    assert ("real time, again alone" in output) is (never < 5)


@pytest.mark.slow
def test_a_run_before_counts_and_does_not_fail_it(folder: Path) -> None:
    write_tests(folder)
    before = [sys.executable, "-m", "pytest", "--outcomes-of=bare", "--keep-outcomes=bare.json"]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    assert subprocess.run(before, cwd=folder, env=environment, check=False, capture_output=True).returncode == 1
    with start(folder, "--outcomes-before=bare.json", "--", "-k", "not test_d") as parts:
        output, _ = parts.communicate(timeout=60)
    assert parts.returncode == 0, output
    assert "FAILED tests/test_one.py::test_d (bare) - assert 0" in output.splitlines()
    assert "1 failed, 6 passed in" in output.splitlines()[-1]


@pytest.mark.slow
def test_a_part_that_breaks_fails_all_whatever_an_earlier_run_left(folder: Path) -> None:
    write_tests(folder)
    with start(folder, "--", "-k", "not test_d") as parts:
        assert parts.wait(60) == 0
    with start(folder, side=f"{shlex.quote(sys.executable)} -c 'raise SystemExit(3)'") as parts:
        output, _ = parts.communicate(timeout=60)
    assert parts.returncode == 1
    assert "second ended with status 3" in output.splitlines()
    assert "2 passed in" in output.splitlines()[-1]


@pytest.mark.slow
def test_all_parts_tear_down_what_they_have_set_up_when_they_are_interrupted(folder: Path) -> None:
    for name in ("front", "side"):
        os.mkfifo(folder / f"{name}.pipe")
        (folder / "tests" / f"test_{name}.py").write_text(WAITING.format(name=name), encoding="utf-8")
    with start(folder) as parts:
        for name in ("front", "side"):
            assert (folder / f"{name}.pipe").read_text(encoding="utf-8") == "runs"
        parts.send_signal(signal.SIGTERM)
        parts.communicate(timeout=60)
    assert parts.returncode == 2
    assert (folder / "front.torn").exists()
    assert (folder / "side.torn").exists()
