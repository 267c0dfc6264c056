"""Speech workers without threads or a model: for tests about time, order and bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.service.listening.workers import SpeechWorkers

T = TypeVar("T")


class LoudnessDetector(SpeechDetector):
    """Loud is speech, quiet is none: what a window is, is seen at once and without a model."""

    def __init__(self) -> None:
        self._rest: Samples = np.empty(0, np.float32)

    def process(self, samples: Samples) -> list[float]:
        waiting = np.concatenate((self._rest, samples))
        count = len(waiting) // WINDOW_SAMPLES
        windows = waiting[: count * WINDOW_SAMPLES].reshape(count, WINDOW_SAMPLES)
        self._rest = waiting[count * WINDOW_SAMPLES :]
        return [float(np.abs(window).mean() > 0.05) for window in windows]

    def reset(self) -> None:
        self._rest = np.empty(0, np.float32)

    def close(self) -> None:
        pass


class InlineWorkers(SpeechWorkers):
    """Works in the loop's next pass. ``pieces`` counts the work."""

    def __init__(self) -> None:
        super().__init__()
        self.detectors: LoanPool[SpeechDetector] = LoanPool(LoudnessDetector)
        self.pieces = 0

    @property
    def available(self) -> bool:
        return True

    def submit(self, work: Callable[[], T], done: Callable[[T | Exception], None]) -> None:
        def run() -> None:
            self.pieces += 1
            outcome: T | Exception
            try:
                outcome = work()
            except Exception as error:
                outcome = error
            done(outcome)

        asyncio.get_running_loop().call_soon(run)
