"""Blocking calls in worker threads, with a cancellation that leaves no thread behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(executor: Executor, call: Callable[..., T], *arguments: object) -> T:
    """Runs ``call(*arguments)`` in ``executor``.

    When cancelled, a call that has not begun is dropped, and one that runs is waited for before the cancellation goes
    on: whoever is cancelled may then close what the call was using. Such calls must therefore be short.
    """
    work = executor.submit(call, *arguments)
    try:
        return await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        if not work.cancel():
            await _settled(asyncio.wrap_future(work))
        raise


async def run_in_any_thread(call: Callable[..., T], *arguments: object) -> T:
    """As ``run_in_thread``, in the event loop's own executor; when cancelled, the call is always waited for."""
    work = asyncio.get_running_loop().run_in_executor(None, call, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await _settled(work)
        raise


async def release_in_thread(executor: Executor, call: Callable[[], None]) -> None:
    """Runs ``call`` to its end even when cancelled: for giving back what is held."""
    try:
        work = executor.submit(call)
    except RuntimeError:
        # The executor was shut down, and has waited for its threads: nobody else uses what is given back.
        call()
        return
    try:
        await asyncio.shield(asyncio.wrap_future(work))
    except asyncio.CancelledError:
        await _settled(asyncio.wrap_future(work))
        raise


async def _settled(work: asyncio.Future[T]) -> None:
    """Waits until ``work`` has ended in whatever way, however often the waiting task is cancelled meanwhile."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()
