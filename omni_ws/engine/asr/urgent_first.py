"""UrgentFirst: threads that take the most urgent work first."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class UrgentFirst:
    """Threads for work of different urgency: the lowest number goes first, and of equal ones the oldest.

    What has begun is not interrupted. So work of the urgency ``patient``, or less urgent, leaves one thread free unless
    there is only one. Thread-safe.
    """

    def __init__(self, threads: int, *, name: str, patient: int) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = count()
        self._closed = False
        self._patient = patient
        self._patient_running = 0
        self._most_patient = max(1, threads - 1)
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True) for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: int, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` done. Cancelling works until it has begun. Raises RuntimeError after ``close``."""
        future: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads have ended")
            heappush(self._waiting, (urgency, next(self._numbers), future, call))
            self._changed.notify()
        return future

    def close(self) -> None:
        """Drop what waits, and wait for what has begun. Blocks. Idempotent."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for _, _, future, _ in waiting:
            future.cancel()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (next_one := self._take()) is not None:
            urgency, future, call = next_one
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # whoever waits for the result is told
                    future.set_exception(error)
            del next_one, future, call  # not kept until there is more to do
            if urgency >= self._patient:
                with self._changed:
                    self._patient_running -= 1
                    self._changed.notify()

    def _take(self) -> tuple[int, Future[Any], Callable[[], Any]] | None:
        with self._changed:
            while not self._may_begin() and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            urgency, _, future, call = heappop(self._waiting)
            self._patient_running += urgency >= self._patient
            return urgency, future, call

    def _may_begin(self) -> bool:
        if not self._waiting:
            return False
        return self._waiting[0][0] < self._patient or self._patient_running < self._most_patient
