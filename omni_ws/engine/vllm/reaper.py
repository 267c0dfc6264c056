"""The process that kills vLLM's processes when the server has ended: ``python reaper.py SERVER MARK``.

SERVER is the ID of its parent process, MARK what ``marked_processes`` gave the processes to kill. It is run by its
path, and imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Final

#: How often the server is looked for, in seconds.
WATCH_SEC: Final = 0.1
#: How long a killed process may take to be gone before it is looked for again, in seconds.
_AGAIN_SEC: Final = 0.02
#: After so many looks without a process there is none. One look may miss a process that is being replaced (exec).
_LOOKS: Final = 3


def kill_marked(mark: str) -> None:
    """Kill all processes of this machine that have ``mark``, and those that they start meanwhile."""
    looks = 0
    while looks < _LOOKS:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_marked(name, mark)]
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        looks = 0 if found else looks + 1
        time.sleep(_AGAIN_SEC)


def is_marked(process: str, mark: str) -> bool:
    """Return whether a process has the mark in its first environment, or as the name of a file that it has open."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            if mark.encode() in file.read():
                return True
        files = os.listdir(f"/proc/{process}/fd")
    except OSError:  # it has ended, or is another user's
        return False
    return any(mark in _target(f"/proc/{process}/fd/{number}") for number in files)


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:  # closed since
        return ""


def main() -> None:
    # Whoever ends all processes of a service at once ends the server, too, which may take its time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server, mark = int(sys.argv[1]), sys.argv[2]
    while os.getppid() == server:
        time.sleep(WATCH_SEC)
    kill_marked(mark)


if __name__ == "__main__":
    main()
