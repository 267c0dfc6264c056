"""Each kind of work has threads of its own: one that is stuck delays no other."""

from __future__ import annotations

import asyncio
import threading

import pytest

from omni_ws.engine.threads import Work, run_work


async def test_the_result_and_the_failure_of_a_call() -> None:
    assert await run_work(Work.CALLS, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await run_work(Work.CALLS, divmod, 1, 0)


@pytest.mark.parametrize("stuck", Work)
async def test_work_that_is_stuck_delays_neither_other_kinds_nor_names(stuck: Work) -> None:
    may_end = threading.Event()
    waiting = [asyncio.create_task(run_work(stuck, may_end.wait)) for _ in range(2 * stuck.value)]
    try:
        for other in set(Work) - {stuck}:
            assert await run_work(other, int, "3") == 3
        assert await asyncio.get_running_loop().getaddrinfo("127.0.0.1", 80)
        assert not any(task.done() for task in waiting)
    finally:
        may_end.set()
        await asyncio.gather(*waiting)
