"""The delay of the event loop, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time

import pytest

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
