"""The delay of the event loop, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import time

import pytest

from omni_ws.service.observing.loop_watch import INTERVAL_SEC, watching_loop


@pytest.mark.virtual_clock
async def test_an_idle_loop_is_never_late() -> None:
    lags: list[float] = []
    with watching_loop(lags.append):
        await asyncio.sleep(10.5 * INTERVAL_SEC)
    await asyncio.sleep(10 * INTERVAL_SEC)
    assert len(lags) == 10
    assert max(lags) < INTERVAL_SEC / 10


async def test_work_that_blocks_the_loop_is_measured() -> None:
    lags: list[float] = []
    with watching_loop(lags.append):
        await asyncio.sleep(0)
        time.sleep(3 * INTERVAL_SEC)  # noqa: ASYNC251 - this is what is to be seen
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert lags[0] >= 1.5 * INTERVAL_SEC
