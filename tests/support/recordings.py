"""Recordings made by a real server, and replays of them by the command."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson


@dataclass(frozen=True)
class Replayed:
    status: int
    output: str
    errors: str

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = orjson.loads(self.output)
        return report


async def replay(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Replayed:
    """The command, in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "omni_ws", "replay", *map(str, arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    )
    try:
        async with asyncio.timeout(60):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Replayed(process.returncode, output.decode(), errors.decode())


def recordings(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line.get("event") == kind]
