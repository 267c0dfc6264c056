"""The process of the server: the delay of its event loop, and the memory that it returns."""

from __future__ import annotations

import asyncio
import time

import pytest

from omni_ws.service import process
from omni_ws.service.process import IDLE_SHARE, INTERVAL_SEC, LONGEST_INTERVAL_SEC, watching_loop


def busy_for(share: float) -> float:
    """The CPU time of a thread that takes this share of a core, on the loop's clock."""
    return share * asyncio.get_running_loop().time()


@pytest.mark.virtual_clock
@pytest.mark.parametrize("share", [IDLE_SHARE, 1.0])
async def test_a_busy_loop_is_looked_at_ten_times_a_second(share: float) -> None:
    lags: list[float] = []
    with watching_loop(lags.append, cpu_time=lambda: busy_for(share * 1.001)):
        await asyncio.sleep(10.5 * INTERVAL_SEC)
    await asyncio.sleep(10 * INTERVAL_SEC)
    assert len(lags) == 10
    assert max(lags) < INTERVAL_SEC / 10


@pytest.mark.virtual_clock
async def test_an_idle_loop_is_looked_at_every_second_and_more_often_as_it_works() -> None:
    lags: list[float] = []
    used = 0.0
    with watching_loop(lags.append, cpu_time=lambda: used):
        await asyncio.sleep(INTERVAL_SEC * (1 + 2 + 4 + 8) + 10.5 * LONGEST_INTERVAL_SEC)
        assert len(lags) == 4 + 10
        used += 1
        await asyncio.sleep(LONGEST_INTERVAL_SEC / 2 + 1.5 * INTERVAL_SEC)
    assert len(lags) == 4 + 10 + 2
    assert max(lags) < INTERVAL_SEC / 10


async def test_work_that_blocks_the_loop_is_measured() -> None:
    lags: list[float] = []
    with watching_loop(lags.append):
        await asyncio.sleep(0)
        time.sleep(3 * INTERVAL_SEC)  # noqa: ASYNC251 - this is what is to be seen
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert lags[0] >= 1.5 * INTERVAL_SEC


@pytest.mark.virtual_clock
async def test_memory_is_returned_once_much_of_what_was_held_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    much = 8 << 20
    held, returned = 0, asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(process, "return_freed_memory", lambda: loop.call_soon_threadsafe(returned.release))
    with process.returning_memory(lambda: held):
        for now in (much - 1, 0, 10, much + 10, 10):
            held = now
            assert returned.locked()
            await asyncio.sleep(7.5)
        for _ in range(12):
            await returned.acquire()
        await asyncio.sleep(100)
        assert returned.locked()  # nothing more
