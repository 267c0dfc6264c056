"""Rounds of speech workers: who joins one, and in which thread its work runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from omni_ws.service.listening.workers import MAX_IN_ROUND, ROUND_SEC, SpeechWorkers


class Broken(Exception):
    pass


@pytest.fixture
async def workers() -> AsyncIterator[SpeechWorkers]:
    speech_workers = SpeechWorkers()
    yield speech_workers
    speech_workers.close()


def failing() -> None:
    raise Broken


async def outcomes(workers: SpeechWorkers, works: list[Callable[[], Any]]) -> list[Any]:
    """The outcomes of works that are submitted within one round."""
    heard: asyncio.Queue[Any] = asyncio.Queue()
    for work in works:
        workers.join_round(partial(workers.submit, work, heard.put_nowait))
    return [await heard.get() for _ in works]


async def test_a_round_runs_in_order_in_one_thread(workers: SpeechWorkers) -> None:
    threads: list[int] = []

    def work(number: int) -> int:
        threads.append(threading.get_ident())
        return number

    numbers = range(MAX_IN_ROUND)
    assert await outcomes(workers, [partial(work, number) for number in numbers]) == list(numbers)
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_a_failure_in_a_round_reaches_its_own_session_alone(workers: SpeechWorkers) -> None:
    first, second, third = await outcomes(workers, [partial(int, 1), failing, partial(int, 3)])
    assert (first, third) == (1, 3)
    assert isinstance(second, Broken)


@pytest.mark.virtual_clock
async def test_the_wait_for_a_round_and_its_size_are_limited(workers: SpeechWorkers) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    times: list[float] = []

    def begins() -> None:
        times.append(round(loop.time() - began, 3))

    for _ in range(MAX_IN_ROUND):
        workers.join_round(begins)
    await asyncio.sleep(ROUND_SEC / 4)
    workers.join_round(begins)  # one too many
    await asyncio.sleep(ROUND_SEC / 4)
    workers.join_round(begins)
    await asyncio.sleep(ROUND_SEC)
    assert times == [ROUND_SEC] * MAX_IN_ROUND + [ROUND_SEC * 5 / 4] * 2


@pytest.mark.virtual_clock
async def test_a_round_that_begins_after_close_does_nothing() -> None:
    workers = SpeechWorkers()
    done: list[Any] = []
    workers.join_round(partial(workers.submit, partial(int, 1), done.append))
    workers.close()
    await asyncio.sleep(2 * ROUND_SEC)
    assert not done
