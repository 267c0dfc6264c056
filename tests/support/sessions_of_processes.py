"""What is left of a command that ran in a session of its own."""

from __future__ import annotations

from pathlib import Path


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
        if state != "Z" and (int(session) == leader or f"reaper.py {leader} " in title):
            found[int(folder.name)] = title
    return found
