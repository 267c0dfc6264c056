"""Software of others: Node, and what is in the environments that ``make test-outside`` makes and names."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from support.commands import run_command


def tool(variable: str) -> str:
    """What ``make test-outside`` says where it is."""
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} is not set: make test-outside sets it")
    return path


async def run_outside(*command: str, cwd: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
    """The output of a command that succeeds within 500 seconds. It sees neither a key nor the test's own modules."""
    hidden = ("PYTHONPATH", "OPENAI_API_KEY")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | dict(variables or {})
    ended = await run_command(*command, environment=environment, cwd=cwd)
    assert ended.status == 0, (ended.output + ended.errors)[-6000:]
    return ended.output


async def run_in_node(script: Path, folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """Where its packages are: a module looks for them from where it stands."""
    home = Path(tool("OUTSIDE_NODE"))
    place = home / f"{folder.name}-{script.name}"
    await asyncio.to_thread(shutil.copy, script, place)
    try:
        return await run_outside(
            str(home / "node_modules" / ".bin" / "node"), str(place), *arguments, variables=variables
        )
    finally:
        place.unlink()


async def node_command() -> list[str]:
    """Node, which has the global WebSocket behind a switch at first."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node is not installed")
    version = int((await run_outside(path, "--version")).removeprefix("v").partition(".")[0])
    if version < 20:
        pytest.skip(f"Node {version} is too old")
    return [path] if version >= 22 else [path, "--experimental-websocket"]
