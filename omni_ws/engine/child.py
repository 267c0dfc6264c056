"""Processes that this server starts: how they begin and end, and their memory and the server's own.

What they run imports this module too, and does without asyncio, which takes memory and time to import.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import omni_ws

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger(__name__)


# The server's side: what a process needs, and how it ends. It reads what it is to do from its standard input.

#: How long a process may take to end by itself.
STOP_SEC: Final = 2.0


def child_environment() -> dict[str, str]:
    """Return the environment for a process that has to find this very package, however the server found it."""
    package_folder = str(Path(omni_ws.__file__).parent.parent)
    path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


async def end_process(process: asyncio.subprocess.Process, *, name: str) -> int | None:
    """Close the input of ``process``, which ends it, and kill it where that does not help; also when cancelled.

    Returns its exit status.
    """
    import asyncio

    if process.stdin is not None:
        process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SEC):
            await process.wait()
    except TimeoutError:
        log.warning("the %s does not end by itself and is killed", name)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode


# What a process that the server started does first.


def take_over_stdout() -> BinaryIO:
    """Return the pipe to the server; what C libraries print goes to standard error instead of into it."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return target


def leave_signals_to_server() -> None:
    """Ignore the signals that a terminal or a supervisor sends to the whole process group: the server handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


# Memory that was freed: the C library (glibc; others are left alone) keeps most of it, and a part for each thread.

_M_ARENA_MAX: Final = -8


def share_heaps(most: int) -> None:
    """Limit the heaps that threads share to ``most`` (glibc's default: eight per core), so that they reuse what others
    freed. Threads of one heap wait for one another.

    To be called before there are other threads.
    """
    if (mallopt := _c_function("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, most)


def return_freed_memory() -> None:
    """Return what is free to the system. Blocks for some milliseconds."""
    if (malloc_trim := _c_function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _c_function(name: str) -> Any:
    """None where the C library is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
