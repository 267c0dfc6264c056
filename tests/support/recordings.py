"""Recordings made by a real server, and replays of them by the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
from support.commands import Ended, run_command


class Replayed(Ended):
    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = orjson.loads(self.output)
        return report


async def replay(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Replayed:
    """The command, in a process of its own."""
    command = (sys.executable, "-m", "omni_ws", "replay", *map(str, arguments))
    ended = await run_command(*command, seconds=300, environment={**os.environ, **(environment or {})})
    return Replayed(ended.status, ended.output, ended.errors)


def recordings(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line.get("event") == kind]
