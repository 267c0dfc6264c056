"""The heap of the C library: what a process keeps of the memory that it freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,  # starts processes
    pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is another one"),
]

MEASURE = """
import ctypes, threading
from omni_ws.engine.child_main import return_freed_memory, share_heaps
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
PIECE = 64 << 10  # less than what the C library takes from the system by itself

def taken(mib):
    pieces = [libc.malloc(PIECE) for _ in range(mib * 16)]
    for piece in pieces:
        ctypes.memset(piece, 1, PIECE)
    return pieces

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) >> 10
"""

RETURNED = """
*pieces, last = taken(100)
for piece in pieces:
    libc.free(piece)
before = resident()
return_freed_memory()
print(before - resident())
"""

SHARED = """
share_heaps(1)
before = resident()
turn, turns = threading.Semaphore(0), []

def work():
    *pieces, last = taken(20)
    for piece in pieces:
        libc.free(piece)
    turn.release()
    done.wait()

done = threading.Event()
for _ in range(8):  # which live at the same time and work one after another
    turns.append(threading.Thread(target=work))
    turns[-1].start()
    turn.acquire()
print(resident() - before)
done.set()
"""


def measured(code: str) -> int:
    """What a process that runs ``code`` prints."""
    return int(subprocess.run([sys.executable, "-c", MEASURE + code], check=True, capture_output=True).stdout)


def test_freed_memory_is_returned() -> None:
    assert measured(RETURNED) > 80


def test_what_one_thread_freed_another_takes() -> None:
    assert measured(SHARED) < 60
