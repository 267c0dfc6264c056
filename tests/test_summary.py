"""The end of a run that has several parts tells of all of them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import summary

PART = Path(__file__).parent / "run_part.sh"
TESTS = """
import pytest

def test_passes():
    pass

@pytest.mark.far
def test_far():
    assert 1 == 2

def test_skips():
    pytest.skip("no such thing")
"""
NEEDS_PACKAGE = """
import pytest
{}

@pytest.mark.far
def test_needs_a_package():
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = far\n", encoding="utf-8")
    (tmp_path / "test_some.py").write_text(TESTS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_part(name: str, *options: str) -> int:
    command = [str(PART), name, sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", *options]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode


def test_each_part_counts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = folder / "test_package.py"
    module.write_text(NEEDS_PACKAGE.format("pytest.importorskip('no_such_package')"), encoding="utf-8")
    assert run_part("near", "-m", "not far") == 0
    module.write_text(NEEDS_PACKAGE.format(""), encoding="utf-8")  # in another environment the package is there
    assert run_part("far", "-m", "far") == 1
    assert summary.main(["near", "far"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["skipped, each by name", "  test_some::test_skips: no such thing"]
    assert any("s of the processors" in line and line.startswith("  near: ") for line in said)
    assert said[-1] == "2 passed, 1 failed, 1 skipped"
    assert summary.main(["near"]) == 0
    # Alone, the module has been left out.
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 0 failed, 2 skipped"


def test_a_part_without_tests_is_no_failure(folder: Path) -> None:
    assert run_part("none", "-k", "nothing_of_this_name") == 0
    assert summary.main(["none"]) == 0


def test_a_part_that_broke_off_is_a_failure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_part("near", "-m", "not far") == 0
    broken = shlex.join([sys.executable, "-c", "import os; os._exit(3)"])
    assert subprocess.run(["bash", "-c", f"{PART} broken {broken}"], check=False).returncode == 3
    assert summary.main(["near", "broken"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 1 skipped"


def test_a_failure_is_told_also_where_garbage_is_parsed_into_it(folder: Path) -> None:
    """The report of a failure parses source; so may what is collected meanwhile (conftest.py)."""
    many = "".join(f"def f{at}(a, b): return [a + b, (a, b), {{'x': a}}]\n" for at in range(400))
    (folder / "test_some.py").write_text(
        "import ast, gc\ndef test_a():\n"
        "    gc.callbacks.append(lambda phase, info: ast.parse('a + b'))\n    assert [1, 2] == [3]\n" + many,
        encoding="utf-8",
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-ra"],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "FAILED test_some.py::test_a - assert [1, 2] == [3]" in ended.stdout.splitlines(), ended.stdout
