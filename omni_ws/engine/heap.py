"""What the C library does with memory that was freed; it keeps most of it, and a part for each thread. glibc only."""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_M_ARENA_MAX: Final = -8
#: Bytes by which what is held has to fall until freed memory is returned: it takes several times that with its objects.
_MUCH: Final = 8 << 20
#: In between, memory may be taken and freed many times, and is used again.
_LOOKS_EVERY_SEC: Final = 5.0
#: So often it is returned then: the sessions that held it may end later, and what they leave lies between other things.
_TIMES: Final = 12


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


@contextmanager
def returning_memory(held: Callable[[], int]) -> Iterator[None]:
    """Within the block, look at ``held()`` (bytes) every few seconds, and return freed memory when that fell by much.

    By itself, the C library keeps what it once had where anything behind it is still in use.
    """
    task = asyncio.create_task(_return_what_was_held(held), name="returning memory")
    try:
        yield
    finally:
        task.cancel()


async def _return_what_was_held(held: Callable[[], int]) -> None:
    highest = times = 0
    while True:
        await asyncio.sleep(_LOOKS_EVERY_SEC)
        now = held()
        if highest - now >= _MUCH:
            highest, times = now, _TIMES
        highest = max(highest, now)
        if times:
            times -= 1
            await asyncio.to_thread(return_freed_memory)


def _function(name: str) -> Any:
    """None where the C library is another one."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
