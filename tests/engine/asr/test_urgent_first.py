"""Threads that take the most urgent work first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest
from support.patience import PATIENCE_SEC

from omni_ws.engine.asr.whisper import UrgentFirst


@pytest.fixture
def one() -> Iterator[UrgentFirst]:
    threads = UrgentFirst(1, name="one", patient=2)
    yield threads
    threads.close()


def held(threads: UrgentFirst) -> threading.Event:
    """Keeps a thread busy until the event is set."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_SEC)

    threads.submit(0, wait)
    assert begun.wait(PATIENCE_SEC)
    return goes_on


def test_the_most_urgent_goes_first_and_then_the_oldest(one: UrgentFirst) -> None:
    goes_on = held(one)
    order: list[str] = []
    works = [one.submit(int(name[0]), partial(order.append, name)) for name in ("1a", "0a", "1b", "0b", "2a")]
    goes_on.set()
    for work in works:
        work.result(PATIENCE_SEC)
    assert order == ["0a", "0b", "1a", "1b", "2a"]


def test_what_has_not_begun_can_be_cancelled(one: UrgentFirst) -> None:
    goes_on = held(one)
    done: list[int] = []
    first, second = (one.submit(0, partial(done.append, number)) for number in (1, 2))
    assert first.cancel()
    goes_on.set()
    second.result(PATIENCE_SEC)
    assert done == [2]


def test_a_failure_is_for_those_who_wait_for_it(one: UrgentFirst) -> None:
    def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        one.submit(0, fail).result(PATIENCE_SEC)
    assert one.submit(0, lambda: 7).result(PATIENCE_SEC) == 7


def test_threads_work_at_the_same_time() -> None:
    threads, together = UrgentFirst(3, name="three", patient=2), threading.Barrier(3, timeout=PATIENCE_SEC)
    for work in [threads.submit(0, together.wait) for _ in range(3)]:
        work.result(PATIENCE_SEC)
    threads.close()


def test_patient_work_leaves_a_thread_free() -> None:
    threads = UrgentFirst(3, name="three", patient=2)
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def patient() -> None:
        begun.release()
        assert goes_on.wait(PATIENCE_SEC)

    works = [threads.submit(2, patient) for _ in range(4)]
    for _ in range(2):
        assert begun.acquire(timeout=PATIENCE_SEC)
    assert threads.submit(1, lambda: "meanwhile").result(PATIENCE_SEC) == "meanwhile"
    assert not begun.acquire(blocking=False)
    goes_on.set()
    for work in works:
        work.result(PATIENCE_SEC)
    threads.close()


def test_closing_waits_for_what_has_begun_and_drops_the_rest() -> None:
    threads = UrgentFirst(1, name="one", patient=2)
    begun, goes_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        assert goes_on.wait(PATIENCE_SEC)
        return "done"

    running = threads.submit(1, slow)
    assert begun.wait(PATIENCE_SEC)
    waiting: Future[None] = threads.submit(0, lambda: None)
    waiting.add_done_callback(lambda work: goes_on.set())  # only then
    threads.close()
    threads.close()
    assert waiting.cancelled()
    assert running.result(0) == "done"
    with pytest.raises(RuntimeError, match="ended"):
        threads.submit(0, lambda: None)
