"""The closing report of a test run names what passed where, and what was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"


def pytest_run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run without the plugins that are installed, which take longer to import than the tests take."""
    plugins = ["report", "no:cacheprovider", *(["xdist.plugin"] if "-n2" in arguments else [])]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *(f"-p{name}" for name in plugins), "-ra", *arguments, "tests"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(SUPPORT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_report_counts_by_area_and_names_skips(tmp_path: Path) -> None:
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    (tmp_path / "tests" / "core" / "test_one.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): pass\n"
        "@pytest.mark.skip(reason='no flute')\ndef test_c(): pass\n",
        encoding="utf-8",
    )
    (tmp_path / "tests" / "test_cli.py").write_text("def test_d(): assert 0\n", encoding="utf-8")
    (tmp_path / "tests" / "core" / "test_two.py").write_text(
        "import pytest\npytest.skip('no harp', allow_module_level=True)\n", encoding="utf-8"
    )
    ended = pytest_run(tmp_path)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert "cli   1 failed" in lines
    assert "core  2 passed, 2 skipped" in lines
    assert "tests/core/test_one.py::test_c: no flute" in lines
    assert "tests/core/test_two.py: no harp" in lines
    assert "1 failed, 2 passed, 2 skipped" in lines[-1]


@pytest.mark.slow
def test_the_report_of_a_run_tells_of_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests" / "core").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = far\n    near\n", encoding="utf-8")
    (tmp_path / "tests" / "core" / "test_one.py").write_text(
        "import pytest\ndef test_a(): pass\n"
        "@pytest.mark.far\ndef test_b(): pass\n"
        "@pytest.mark.far\ndef test_c(): assert 0\n"
        "@pytest.mark.far\ndef test_d(): pytest.skip('no flute')\n"
        "@pytest.mark.near\ndef test_e(): pass\n",
        encoding="utf-8",
    )
    for name in ("two", "three"):
        (tmp_path / "tests" / "core" / f"test_{name}.py").write_text(
            f"import os, pytest\nif os.environ.get('HARP') != '{name}':\n"
            "    pytest.skip('no harp', allow_module_level=True)\ndef test_f(): pass\n",
            encoding="utf-8",
        )
    before = pytest_run(tmp_path, "-k", "test_a or test_c", "--outcomes-of=bare", "--keep-outcomes=kept/bare.json")
    assert before.returncode == 1
    assert "FAILED tests/core/test_one.py::test_c - assert 0" in before.stdout.splitlines(), "its own needs no name"
    first = pytest_run(tmp_path, "-m", "far", "--keep-outcomes=kept/outcomes.json")
    assert first.returncode == 1
    assert "1 failed, 1 passed, 3 skipped, 2 deselected" in first.stdout.splitlines()[-1]
    monkeypatch.setenv("HARP", "two")
    second = pytest_run(tmp_path, "-m", "not far and not near", "--outcomes-before=kept/outcomes.json")
    assert second.returncode == 0, "each run answers for its own"
    lines = second.stdout.splitlines()
    assert "core  3 passed, 1 failed, 2 skipped" in lines
    assert "tests/core/test_one.py::test_d: no flute" in lines
    assert "FAILED tests/core/test_one.py::test_c - assert 0" in lines
    assert "1 failed, 3 passed, 2 skipped, 1 deselected" in lines[-1]
    # And a chain of three, one of them in two processes.
    kept = ("-n2", "--keep-outcomes=kept/outcomes.json", "--outcomes-before=kept/bare.json")
    assert "2 failed, 2 passed" in pytest_run(tmp_path, "-m", "far", *kept).stdout.splitlines()[-1]
    third = pytest_run(tmp_path, "-m", "not far and not near", "--outcomes-before=kept/outcomes.json")
    assert third.returncode == 0
    lines = third.stdout.splitlines()
    assert "core  4 passed, 2 failed, 4 skipped" in lines
    assert "FAILED tests/core/test_one.py::test_c (bare) - assert 0" in lines
    assert "2 failed, 4 passed, 4 skipped, 1 deselected" in lines[-1]


@pytest.mark.slow
def test_a_failure_is_told_also_where_garbage_is_parsed_into_it(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    many = "".join(f"def f{at}(a, b): return [a + b, (a, b), {{'x': a}}]\n" for at in range(400))
    (tmp_path / "tests" / "test_one.py").write_text(
        "import ast, gc\ndef test_a():\n"
        "    gc.callbacks.append(lambda phase, info: ast.parse('a + b'))\n    assert [1, 2] == [3]\n" + many,
        encoding="utf-8",
    )
    lines = pytest_run(tmp_path).stdout.splitlines()
    assert "FAILED tests/test_one.py::test_a - assert [1, 2] == [3]" in lines
