"""What is left of a command that ran in a session of its own."""

from __future__ import annotations

import asyncio
from multiprocessing.process import BaseProcess
from pathlib import Path

from support.until import until


def left_of(leader: int) -> dict[int, str]:
    """The processes that live in the session of ``leader``, and its reaper, by what they are called."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and (int(session) == leader or f"processes.py {leader} " in title):
            found[int(folder.name)] = title
    return found


async def until_nothing_is_left(process: BaseProcess | asyncio.subprocess.Process) -> None:
    """Waits for the end of all processes of a command, but for those that its parent has not yet waited for."""
    assert process.pid is not None
    leader = process.pid
    await until(lambda: not left_of(leader))
