"""The package omni-ws outside of the page: its own tests in Node, and what npm makes of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.commands import run_command
from support.live_server import live_server
from support.patience import PATIENCE_SEC

PACKAGE = Path(__file__).parents[2] / "clients" / "js"
#: Older ones have the global WebSocket behind a switch.
_NODE_WITH_WEBSOCKET = 22


async def run(*command: str, cwd: Path) -> str:
    ended = await run_command(*command, cwd=cwd)
    assert ended.status == 0, (ended.output + ended.errors)[-6000:]
    return ended.output


async def node() -> list[str]:
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node is not installed")
    version = int((await run(path, "--version", cwd=PACKAGE)).removeprefix("v").partition(".")[0])
    if version < 20:
        pytest.skip(f"Node {version} is too old")
    return [path] if version >= _NODE_WITH_WEBSOCKET else [path, "--experimental-websocket"]


async def test_in_node_against_the_vectors_and_the_server() -> None:
    command = await node()
    tests = [str(file) for file in sorted((PACKAGE / "test").iterdir())]
    async with live_server(streaming_input={"resume_grace_sec": PATIENCE_SEC}) as server:
        url = f"OMNI_WS_URL=http://127.0.0.1:{server.port}/"
        output = await run("env", url, *command, "--test", "--test-force-exit", *tests, cwd=PACKAGE)
    assert re.search(r"# pass 116\b", output), output
    assert re.search(r"# skipped 0\b", output), output


async def test_npm_test_needs_no_server() -> None:
    await node()
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    output = await run("env", "--unset=OMNI_WS_URL", npm, "test", cwd=PACKAGE)
    assert re.search(r"# fail 0\b", output), output
    assert re.search(r"# pass 108\b", output), output


async def test_npm_packs_it_and_what_was_packed_works(tmp_path: Path) -> None:
    command = await node()
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    packed = json.loads(await run(npm, "pack", "--json", "--offline", str(PACKAGE), cwd=tmp_path))[0]
    files = {file["path"] for file in packed["files"]}
    assert files == {"package.json", "README.md", "client.js", "client.d.ts", "call.d.ts"} | {
        f"client/{file.name}" for file in (PACKAGE / "client").iterdir()
    }
    quiet = ("--offline", "--no-audit", "--no-fund", "--ignore-scripts")
    await run(npm, "install", *quiet, str(tmp_path / packed["filename"]), cwd=tmp_path)
    script = 'import("omni-ws").then((found) => console.log(JSON.stringify(Object.keys(found))))'
    names = set(json.loads(await run(*command, "-e", script, cwd=tmp_path)))
    types = (PACKAGE / "client.d.ts").read_text(encoding="utf-8")
    assert names == set(re.findall(r"^export (?:class|function) (\w+)", types, re.MULTILINE))
