"""The threads of all sessions: who is served next, and by how much a backlog delays others. One thread, no clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np
import pytest

from omni_ws.engine.threads import SLICE_SEC, Lane, ListeningThreads, decoded_in_slices


@contextmanager
def busy(threads: ListeningThreads) -> Iterator[None]:
    """The only thread is occupied while the block runs."""
    begun, may_end = threading.Event(), threading.Event()

    def occupy() -> None:
        begun.set()
        may_end.wait()

    done = Lane(threads).submit(occupy)
    begun.wait()
    try:
        yield
    finally:
        may_end.set()
        done.result()


def put(threads: ListeningThreads, lane: Lane, seconds: float, name: str, into: list[str]) -> Future[None]:
    done: Future[None] = Future()

    def run(work: list[str]) -> None:
        into.extend(work)
        done.set_result(None)

    threads.put(lane, seconds, run, name)
    return done


def test_a_short_piece_waits_for_no_backlog() -> None:
    """Nor for that of many sessions that have just begun, which is one client's way to a greater share."""
    threads, order = ListeningThreads(1), list[str]()
    backlogs = [Lane(threads) for _ in range(200)]
    with busy(threads):
        done = [put(threads, lane, SLICE_SEC, "backlog", order) for lane in backlogs for _ in range(3)]
        done.append(put(threads, Lane(threads), 0.1, "innocent", order))
    for each in done:
        each.result()
    assert order.index("innocent") == 0


def test_every_session_gets_the_same_share_of_decoded_seconds() -> None:
    threads, order = ListeningThreads(1), list[str]()
    one, other = Lane(threads), Lane(threads)
    with busy(threads):
        done = [put(threads, one, 1, "a", order) for _ in range(12)]
        done += [put(threads, other, 0.25, "b", order) for _ in range(48)]
    for each in done:
        each.result()
    for end in range(5, 60):
        served = order[:end].count("a") * 1 - order[:end].count("b") * 0.25
        assert abs(served) <= 1.25, order


def test_what_turns_out_longer_counts_as_what_it_was() -> None:
    threads, order = ListeningThreads(1), list[str]()
    bomb, other = Lane(threads), Lane(threads)
    bomb.submit(lambda: None).result()
    bomb.charge(5)
    with busy(threads):
        done = [put(threads, bomb, 1, "bomb", order)]
        done += [put(threads, other, 1, "other", order) for _ in range(5)]
    for each in done:
        each.result()
    assert order == ["other"] * 4 + ["bomb", "other"] or order == ["other"] * 5 + ["bomb"]


def test_who_was_away_has_saved_nothing_up() -> None:
    threads, order = ListeningThreads(1), list[str]()
    away, other = Lane(threads), Lane(threads)
    for _ in range(50):
        put(threads, other, 1, "", order).result()
    order.clear()
    with busy(threads):
        done = [put(threads, away, 1, "away", order) for _ in range(4)]
        done += [put(threads, other, 1, "other", order) for _ in range(4)]
    for each in done:
        each.result()
    assert order[:4].count("other") >= 1


def test_work_of_one_kind_is_done_together_as_far_as_it_follows() -> None:
    threads = ListeningThreads(1)
    batches: list[list[int]] = []

    def run(work: list[int]) -> None:
        batches.append(work)

    with busy(threads):
        for number in range(5):
            threads.put(Lane(threads), 0.1, run, number, at_most=3)
        alone = Lane(threads).submit(lambda: None)
    alone.result()
    assert batches == [[0, 1, 2], [3, 4]]


def test_what_is_done_together_is_not_long() -> None:
    threads = ListeningThreads(1)
    batches: list[list[int]] = []
    with busy(threads):
        for number in range(7):
            threads.put(Lane(threads), SLICE_SEC, batches.append, number, at_most=8)
        last = Lane(threads).submit(lambda: None)
    last.result()
    assert batches == [[0, 1, 2], [3, 4, 5], [6]]


async def test_a_call_that_is_cancelled_while_it_waits_is_not_made() -> None:
    threads = ListeningThreads(1)
    made: list[int] = []
    with busy(threads):
        call = Lane(threads).submit(made.append, 1)
        assert call.cancel()
    after = Lane(threads).submit(divmod, 1, 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(after)
    assert made == []


async def test_a_decoder_runs_no_further_than_it_is_asked_to() -> None:
    """However much its input is: what is not made takes no memory."""
    made = 0

    def pieces() -> Iterator[np.ndarray]:
        nonlocal made
        while True:
            made += 1
            yield np.zeros(4000, np.float32)

    slices = decoded_in_slices(Lane(), pieces(), 16_000)
    for number in range(1, 4):
        assert sum(map(len, await anext(slices))) == 16_000
        assert made == 4 * number
    await slices.aclose()
