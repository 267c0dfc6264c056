"""How long tests wait for an event before they count as failed, and waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Barrier
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

from support.virtual_clock import VirtualClockLoop

from omni_ws.engine.threads import Lane

if TYPE_CHECKING:
    from omni_ws.engine.asr.recogniser_engine import RecogniserEngine

#: Far longer than anything takes on a machine with fifteen programs to a core; less than pytest gives a test, so that
#: the wait that failed is named.
PATIENCE_SEC: Final = 500.0
#: More than there are between the end of one step of listening and the beginning of the next.
_IDLE_PASSES = 20
#: Looks in every pass of the loop before those that leave the processor to others.
_AT_ONCE = 1000
#: Between two of those.
PERIOD_SEC = 0.005


async def until(condition: Callable[[], bool], *, seconds: float = PATIENCE_SEC, moves: bool = False) -> None:
    """Lets the loop run until ``condition`` holds. Raises TimeoutError when it does not come true.

    It is looked at in every pass of the loop at first, so that a test cannot count on what becomes true next. A virtual
    clock stands still meanwhile, unless it ``moves``.
    """
    stands = isinstance(asyncio.get_running_loop(), VirtualClockLoop) and not moves
    async with asyncio.timeout(seconds):
        looks = 0
        while not condition():
            looks += 1
            await asyncio.sleep(0 if stands or looks < _AT_ONCE else PERIOD_SEC)


async def until_heard(asr: RecogniserEngine) -> None:
    """Waits until an ASR of this process has dealt with the audio that it has been given: its threads have nothing to
    do, and a few passes of the loop give them nothing more. What comes next does not come too fast."""
    threads, shared = asr.threads, Lane().threads
    assert threads is not None
    submit, given = threads.submit, 0

    def counted(*call: Any) -> Future[Any]:
        nonlocal given
        given += 1
        return submit(*call)

    with patch.object(threads, "submit", counted):
        while True:
            before = given
            await _all_free(submit, threads._max_workers)
            for _ in range(_IDLE_PASSES):
                await asyncio.sleep(0)
            if given == before and not shared._active:
                return


async def _all_free(submit: Callable[..., Future[Any]], threads: int) -> None:
    """Waits until all threads of a pool have come to the same place, each with nothing left to do before it."""
    together = Barrier(threads)
    await asyncio.gather(*(asyncio.wrap_future(submit(together.wait, PATIENCE_SEC)) for _ in range(threads)))
