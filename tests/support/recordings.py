"""Recordings made by a real server, and replays of them by the command."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import orjson
from support.commands import Ended

from omni_ws.cli import main


class Replayed(Ended):
    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = orjson.loads(self.output)
        return report


async def replay(*arguments: str | Path, environment: Mapping[str, str] | None = None) -> Replayed:
    """The command, in a thread of its own: a process takes most of a second to start."""
    output, errors = io.StringIO(), io.StringIO()

    def command() -> int:
        try:
            return main(["replay", *map(str, arguments)], {**os.environ, **(environment or {})})
        except SystemExit as ended:
            return int(str(ended.code))

    with redirect_stdout(output), redirect_stderr(errors):
        status = await asyncio.to_thread(command)
    return Replayed(status, output.getvalue(), errors.getvalue())


def recordings(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line.get("event") == kind]
