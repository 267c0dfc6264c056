"""The event of a single waiter."""

from __future__ import annotations

import asyncio

import pytest

from omni_ws.service.conversation.request_queue import WakeUp


@pytest.mark.counts_passes
async def test_a_waiter_wakes_when_it_is_set_even_if_it_is_cleared_at_once() -> None:
    wake_up = WakeUp()
    waiter = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    wake_up.set()
    wake_up.clear()
    await waiter


async def test_nobody_waits_while_it_is_set() -> None:
    wake_up = WakeUp(is_set=True)
    await wake_up.wait()
    wake_up.set()
    await wake_up.wait()
    wake_up.clear()
    waiter = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    assert not waiter.done()
    waiter.cancel()


async def test_it_may_be_waited_for_again_after_a_cancelled_wait() -> None:
    wake_up = WakeUp()
    waiter = asyncio.create_task(wake_up.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    wake_up.set()
    await wake_up.wait()
