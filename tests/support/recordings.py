"""Recordings made by a real server, replays of them by the command, and the lines of a recorder of profiler events."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
from support.commands import Ended, run_here

from omni_ws.profiler.events import EventRecorder
from omni_ws.replay import main


async def replay(*arguments: str | Path) -> Ended:
    """The command beside a server of this loop, on a loop of its own."""
    return await asyncio.to_thread(run_here, main, *map(str, arguments))


def recordings(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in lines(path) if line.get("event") == kind]


def event_lines(recorder: EventRecorder) -> list[dict[str, Any]]:
    """Those of all its files, in the order of time. Closes it."""
    recorder.close()
    told = [line for path in recorder.paths for line in lines(path)]
    return sorted(told, key=lambda line: line["metadata"]["monotonic_ns"])
