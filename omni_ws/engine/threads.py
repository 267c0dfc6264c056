"""Runs blocking calls in threads: each kind of work in its own, and so that a cancellation leaves none running.

The event loop's default executor is left to look-ups of names and to what begins and ends with the server.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

T = TypeVar("T")


class Work(enum.Enum):
    """The kinds of short work that are done off the event loop, and how many threads each has.

    None waits for another: a body of 20 MB must not delay the next 20 ms of a call, nor a slow disk either of them.
    (What decodes audio and detects speech is in ``listening_threads``.)
    """

    #: JSON of large bodies, and of what is made of them: holds the GIL, so that more threads would gain nothing.
    BODIES = 2
    #: The audio of calls, a packet at a time.
    CALLS = 1
    #: The audio of other answers, where it is compressed or long.
    ENCODING = 4
    #: Files that a request names, and pages of metrics.
    FILES = 3


@cache
def _threads(work: Work) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(work.value, thread_name_prefix=work.name.lower())


async def run_work(work: Work, call: Callable[..., T], *arguments: object) -> T:
    """Run ``call(*arguments)`` in the threads for ``work`` and return its result."""
    return await asyncio.wrap_future(_threads(work).submit(call, *arguments))


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
