"""The end of vLLM's processes: none of them outlives the server, the process that started the first of them.

vLLM's processes do not notice the death of the server, and then keep the GPU and hold ports. Some are started by
others, and all start long before vLLM reports their IDs. So all processes get a mark when they start, and a small
process, the reaper, kills those with the mark when the server has ended, in whatever way. The reaper runs this file by
its path, so the file imports nothing of the package.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Final

#: The environment variable with the mark.
MARK: Final = "_MODEL_OF_OMNI_WS"

#: How often the reaper looks for the server, in seconds.
WATCH_SEC: Final = 0.1
#: How long a killed process may take to be gone before it is looked for again, in seconds.
_AGAIN_SEC: Final = 0.02
#: After so many looks without a process there is none. One look may miss a process that is being replaced (exec).
_LOOKS: Final = 3

_lock = threading.Lock()
#: The process whose reaper runs, and the mark that it looks for.
_server = 0
_mark = ""
#: How many blocks of ``marked_processes`` run now.
_starts = 0


@contextlib.contextmanager
def marked_processes() -> Iterator[None]:
    """Mark all processes that are started during the block, so that they are killed when this process has ended.

    Processes that run other programs inherit the mark in their environment; forks inherit an open file whose name is
    the mark. The first call starts the reaper. Raises OSError if the reaper or the file cannot be made.
    """
    global _starts
    with _lock:
        mark = _watched_mark()
        _starts += 1
        os.environ[MARK] = mark
    try:
        file = os.memfd_create(mark)
        try:
            yield
        finally:
            os.close(file)
    finally:
        with _lock:
            _starts -= 1
            if not _starts:
                del os.environ[MARK]


def _watched_mark() -> str:
    """Return the mark of this process; the first call in each process, also in a fork, starts a reaper."""
    global _mark, _server, _starts
    if _server != os.getpid():
        mark = f"omni-ws-{uuid.uuid4().hex}"
        command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
        # Not by subprocess, which warns of processes that are left. In a session of its own: Ctrl-C is not for it.
        os.posix_spawn(sys.executable, command, os.environ, setsid=True)
        _server, _mark, _starts = os.getpid(), mark, 0
    return _mark


def kill_marked(mark: str) -> None:
    """Kill all processes of this machine that have ``mark``, including processes that they start meanwhile.

    Blocks until _LOOKS looks in succession have found none.
    """
    looks = 0
    while looks < _LOOKS:
        found = [int(name) for name in os.listdir("/proc") if name.isdigit() and is_marked(name, mark)]
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        looks = 0 if found else looks + 1
        time.sleep(_AGAIN_SEC)


def is_marked(process: str, mark: str) -> bool:
    """Whether a process has the mark in the environment of its start, or as the name of a file that it has open.

    ``process`` is the process ID in digits.
    """
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


def reap(server: int, mark: str) -> None:
    """Wait for the end of ``server``, the parent of this process, and kill all processes with ``mark``.

    Meanwhile this process ignores SIGINT, SIGTERM and SIGHUP.
    """
    # Whoever ends all processes of a service together ends the server, too, which may take its time.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.getppid() == server:
        time.sleep(WATCH_SEC)
    kill_marked(mark)


if __name__ == "__main__":
    reap(int(sys.argv[1]), sys.argv[2])
