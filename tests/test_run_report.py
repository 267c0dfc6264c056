"""The closing report of a test run names what passed where, and what was skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SUPPORT = Path(__file__).parent / "support"


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
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "report", "-p", "no:cacheprovider", "tests"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(SUPPORT)}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert "cli   1 failed" in lines
    assert "core  2 passed, 2 skipped" in lines
    assert "tests/core/test_one.py::test_c: no flute" in lines
    assert "tests/core/test_two.py: no harp" in lines
    assert "1 failed, 2 passed, 2 skipped" in lines[-1]
