"""Runs blocking calls in threads, such that a cancellation does not leave one running."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(executor: Executor, call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in ``executor`` and return its result.

    On cancellation, a call that has not started is dropped, and a running one is awaited before the CancelledError
    continues: resources that the call uses can then be closed. Calls should therefore be short.
    """
    work = executor.submit(call, *arguments)
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        if not work.cancel():
            await _wait_until_done(asyncio.wrap_future(work))
        raise


async def run_in_any_thread(call: Callable[..., T], *arguments: object) -> T:
    """Run a call in the event loop's default executor. On cancellation it is always awaited."""
    work = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await _wait_until_done(work)
        raise


async def release_in_thread(executor: Executor, call: Callable[[], None]) -> None:
    """Run ``call``, which releases a resource, to completion, even when cancelled."""
    try:
        work = executor.submit(call)
    except RuntimeError:
        # The executor was shut down and has waited for its threads, so nothing else uses the resource.
        call()
        return
    try:
        await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        await _wait_until_done(asyncio.wrap_future(work))
        raise


async def _wait_until_done(work: asyncio.Future[T]) -> None:
    """Wait until ``work`` is done, however often the waiting task is cancelled meanwhile."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()
