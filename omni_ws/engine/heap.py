"""What the C library does with memory that was freed; it keeps most of it, and a part for each thread. glibc only."""

from __future__ import annotations

import ctypes
import sys
from typing import Any, Final

_M_ARENA_MAX: Final = -8


def share_heaps(most: int) -> None:
    """Limit the heaps that threads share to ``most`` (glibc's default: eight per core), so that they reuse what others
    freed. Threads of one heap wait for one another.

    To be called before there are other threads.
    """
    if (mallopt := _function("mallopt")) is not None:
        mallopt(_M_ARENA_MAX, most)


def return_freed_memory() -> None:
    """Return what is free to the system. Blocks for some milliseconds."""
    if (malloc_trim := _function("malloc_trim")) is not None:
        malloc_trim(ctypes.c_size_t(0))


def _function(name: str) -> Any:
    """None where the C library is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
