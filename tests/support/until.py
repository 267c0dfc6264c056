"""Waiting for what no event tells of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from support.virtual_clock import VirtualClockLoop

if TYPE_CHECKING:
    from omni_ws.engine.asr.recogniser_engine import RecogniserEngine

#: Looks in every pass of the loop before those that leave the processor to others.
_AT_ONCE = 1000
_PERIOD_SEC = 0.005


async def until(condition: Callable[[], bool], *, seconds: float = 100) -> None:
    """Lets the loop run until ``condition`` holds. Raises TimeoutError when it does not come true."""
    virtual = isinstance(asyncio.get_running_loop(), VirtualClockLoop)
    async with asyncio.timeout(seconds):
        looks = 0
        while not condition():
            looks += 1
            await asyncio.sleep(0 if virtual or looks < _AT_ONCE else _PERIOD_SEC)


async def until_heard(asr: RecogniserEngine) -> None:
    """Lets an ASR of this process work on the audio that it has been given. What comes next does not come too fast."""
    assert asr.listening is not None
    loop = asyncio.get_running_loop()
    for _ in range(4):
        for executor in (asr._decoding, asr.listening.executor):
            await loop.run_in_executor(executor, int)
