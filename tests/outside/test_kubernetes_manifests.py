"""The manifests in ``deploy/``, against the schemas of Kubernetes. No cluster has run them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.commands import Ended, run_command
from support.outside import tool

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = DEPLOY / "kubernetes" / "omni_ws.yaml"
#: The oldest and the newest version that the manifests are for.
VERSIONS = ("1.28", "1.37")

pytestmark = pytest.mark.slow


async def validated(path: Path, version: str) -> Ended:
    program = Path(tool("OUTSIDE_PYTHON")).with_name("kubernetes-validate")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return await run_command(str(program), "--strict", "-k", version, str(path), environment=environment)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("path", "count"), [(MANIFESTS, 5), (DEPLOY / "fleet" / "kubernetes" / "valkey.yaml", 3)])
async def test_every_manifest_is_one(path: Path, count: int, version: str) -> None:
    ended = await validated(path, version)
    said = ended.output + ended.errors
    assert ended.status == 0, said
    assert said.count(f"against version {version}") == count


async def test_a_field_that_does_not_exist_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(MANIFESTS.read_text(encoding="utf-8").replace("periodSeconds: 2", "periodSecond: 2"))
    ended = await validated(wrong, VERSIONS[-1])
    assert ended.status == 1
    assert "periodSecond" in ended.output + ended.errors
