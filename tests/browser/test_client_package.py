"""The package omni-ws outside of the page: its own tests in Node, and what npm makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.live_server import live_server
from support.outside import node_command, run_outside
from support.patience import PATIENCE_SEC

PACKAGE = Path(__file__).parents[2] / "clients" / "js"


#: Tests that a server is there for.
NEED_A_SERVER = 8


def counts(output: str) -> dict[str, int]:
    """How many tests there were, by outcome, but for those that passed, which are most."""
    found = {name: int(number) for name, number in re.findall(r"^# (\w+) (\d+)$", output, re.MULTILINE)}
    assert found["pass"] > 100, output
    return {name: found[name] for name in ("fail", "cancelled", "skipped", "todo")}


async def test_in_node_against_the_vectors_and_the_server() -> None:
    command = await node_command()
    tests = [str(file) for file in sorted((PACKAGE / "test").iterdir())]
    async with live_server(streaming_input={"resume_grace_sec": PATIENCE_SEC}) as server:
        url = f"OMNI_WS_URL=http://127.0.0.1:{server.port}/"
        output = await run_outside("env", url, *command, "--test", "--test-force-exit", *tests, cwd=PACKAGE)
    assert counts(output) == {"fail": 0, "cancelled": 0, "skipped": 0, "todo": 0}


async def test_npm_test_needs_no_server() -> None:
    await node_command()
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    output = await run_outside("env", "--unset=OMNI_WS_URL", npm, "test", cwd=PACKAGE)
    assert counts(output) == {"fail": 0, "cancelled": 0, "skipped": NEED_A_SERVER, "todo": 0}


async def test_npm_packs_it_and_what_was_packed_works(tmp_path: Path) -> None:
    command = await node_command()
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    packed = json.loads(await run_outside(npm, "pack", "--json", "--offline", str(PACKAGE), cwd=tmp_path))[0]
    files = {file["path"] for file in packed["files"]}
    assert files == {"package.json", "README.md", "client.js", "widget.js", "react.js"} | {
        *(file.name for file in PACKAGE.glob("*.d.ts")),
        *(f"{part}/{file.name}" for part in ("client", "widget") for file in (PACKAGE / part).iterdir()),
    }
    quiet = ("--offline", "--no-audit", "--no-fund", "--ignore-scripts")
    await run_outside(npm, "install", *quiet, str(tmp_path / packed["filename"]), cwd=tmp_path)
    script = 'import("omni-ws").then((found) => console.log(JSON.stringify(Object.keys(found))))'
    # A page that a server makes imports them, too, where there are no elements.
    others = 'Promise.all(["chat", "widget", "call"].map((one) => import(`omni-ws/${one}`)))'
    await run_outside(*command, "-e", others, cwd=tmp_path)
    names = set(json.loads(await run_outside(*command, "-e", script, cwd=tmp_path)))
    types = (PACKAGE / "client.d.ts").read_text(encoding="utf-8")
    assert names == set(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE))
