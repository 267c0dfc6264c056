"""Node, for tests of the package for JavaScript."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.commands import run_command

#: Older ones have the global WebSocket behind a switch.
_NODE_WITH_WEBSOCKET = 22


async def run(*command: str, cwd: Path) -> str:
    ended = await run_command(*command, cwd=cwd)
    assert ended.status == 0, (ended.output + ended.errors)[-6000:]
    return ended.output


async def node_command() -> list[str]:
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node is not installed")
    version = int((await run(path, "--version", cwd=Path())).removeprefix("v").partition(".")[0])
    if version < 20:
        pytest.skip(f"Node {version} is too old")
    return [path] if version >= _NODE_WITH_WEBSOCKET else [path, "--experimental-websocket"]
