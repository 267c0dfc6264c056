"""A call in a thread has ended when its caller has, even if that was cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from omni_ws.engine.threads import run_in_any_thread


async def test_the_result_and_the_failure_of_a_call() -> None:
    assert await run_in_any_thread(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_in_any_thread(divmod, 1, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_call_that_runs_is_waited_for_however_often_it_is_cancelled(fails: bool) -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        ended.set()
        if fails:
            raise ValueError

    running = asyncio.create_task(run_in_any_thread(work))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
