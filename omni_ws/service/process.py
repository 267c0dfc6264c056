"""Care for the server's process: its limit of open files, its disk, the delay of its event loop, its memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

from omni_ws.engine.child_main import return_freed_memory

logger = logging.getLogger(__name__)

#: Files that the server may open besides the connections of its clients.
_OWN_FILES: Final = 128


def allow_connections(count: int) -> None:
    """Raise the soft limit on open files to the hard limit, and warn if that is too low for ``count`` connections."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):  # macOS refuses an infinite limit
            logger.debug("the limit of open files stays at %d", soft)
    if soft != resource.RLIM_INFINITY and count + _OWN_FILES > soft:
        logger.warning(
            "limits.max_connections is %d, but this process can open only %d files: raise the limit (ulimit -Hn, "
            "LimitNOFILE) to %d, or lower limits.max_connections",
            count,
            soft,
            count + _OWN_FILES,
        )


#: Bytes that the probe writes: at least a block of the file system, so that one has to be free.
_PROBE_BYTES: Final = 4096


def check_space(folder: Path) -> None:
    """Raise OSError if no file in ``folder`` can be written. It writes one, since a full disk still opens new files."""
    with TemporaryFile(dir=folder, buffering=0) as probe:
        probe.write(bytes(_PROBE_BYTES))


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, Any], *, name: str) -> bool:
    """Run ``work`` until it ends, or cancel it once ``event`` is set. Returns whether it ended. Raises what it raises.

    ``name`` is that of its task.
    """
    working = asyncio.create_task(work, name=name)
    interrupted = asyncio.create_task(event.wait(), name=f"signal during {name}")
    try:
        await asyncio.wait({working, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        working.cancel()
        interrupted.cancel()
        await asyncio.gather(working, interrupted, return_exceptions=True)


# The delay of the event loop, which everything in a real-time server has to wait for.

#: Seconds between two measurements of a busy loop.
INTERVAL_SEC: Final = 0.1
#: For an idle loop, which is hardly ever late: ten measurements a second cost more than all else that an idle server
#: does.
LONGEST_INTERVAL_SEC: Final = 1.0
#: The loop is idle if its thread takes less than this share of a core.
IDLE_SHARE: Final = 0.02


@contextmanager
def watching_loop(
    observe: Callable[[float], object], *, cpu_time: Callable[[], float] = time.thread_time
) -> Iterator[None]:
    """Within the block, call ``observe`` ten times a second with the seconds by which that call is late.

    While the loop is idle, the time between two calls doubles, up to a second. ``cpu_time`` returns the CPU time of the
    loop's thread in seconds.
    """
    watch = _Watch(observe, cpu_time)
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    """A timer that measures how late it fires."""

    def __init__(self, observe: Callable[[float], object], cpu_time: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._observe = observe
        self._cpu_time = cpu_time
        self._interval = INTERVAL_SEC
        self._begin()

    def stop(self) -> None:
        self._timer.cancel()

    def _begin(self) -> None:
        self._cpu_before = self._cpu_time()
        self._due = self._loop.time() + self._interval
        self._timer = self._loop.call_at(self._due, self._wake)

    def _wake(self) -> None:
        late = max(0.0, self._loop.time() - self._due)
        self._observe(late)
        is_idle = self._cpu_time() - self._cpu_before < IDLE_SHARE * (self._interval + late)
        self._interval = min(2 * self._interval, LONGEST_INTERVAL_SEC) if is_idle else INTERVAL_SEC
        self._begin()


# Memory: the C library keeps memory that was freed, instead of returning it to the system.

#: By how many bytes ``held()`` has to fall before freed memory is returned. The objects around those bytes take several
#: times as much memory.
_MUCH_BYTES: Final = 8 << 20
#: Seconds between two looks at ``held()``. Memory that is freed and taken again in between is reused.
_LOOKS_EVERY_SEC: Final = 5.0
#: After such a fall, so many looks in a row return memory: the sessions that held it may end, and free more, later.
_RETURNS: Final = 12


@contextmanager
def returning_memory(held: Callable[[], int]) -> Iterator[None]:
    """Within the block, call ``held()`` (bytes) every few seconds; after it fell by much, return freed memory.

    By itself, the C library returns freed memory only if nothing at a higher address is in use.
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
        if highest - now >= _MUCH_BYTES:
            highest, times = now, _RETURNS
        highest = max(highest, now)
        if times:
            times -= 1
            await asyncio.to_thread(return_freed_memory)
