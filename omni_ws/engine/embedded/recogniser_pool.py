"""Recognisers for many requests: seats for those who may speak, and threads that write down what was said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.embedded.recogniser import RecognisedWord, Recogniser
from omni_ws.errors import EngineOverloaded

RETRY_AFTER_MS = 1000


class Seats:
    """How many requests may listen at once. A request takes a seat with its first audio and keeps it to its end."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.taken = 0

    def take(self) -> None:
        """Raises EngineOverloaded when all are taken: refused at once rather than slow for everybody."""
        if self.taken >= self.count:
            raise EngineOverloaded(f"all {self.count} recognisers are in use", retry_after_ms=RETRY_AFTER_MS)
        self.taken += 1

    def leave(self) -> None:
        self.taken -= 1


class Scribes:
    """Threads that decode whole utterances, each with a recogniser of its own; utterances queue for them in order."""

    def __init__(self, threads: int, *, load: Callable[[], Recogniser] = Recogniser) -> None:
        self.threads = threads
        self._load = load
        self._own = threading.local()
        self._loaded: list[Recogniser] = []
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="scribe")

    def transcribe(self, pcm: NDArray[np.int16]) -> Future[tuple[RecognisedWord, ...]]:
        """The words of ``pcm``. Cancelling works until a thread has begun; after that, the result may be ignored."""
        return self._executor.submit(self._transcribe, pcm)

    def close(self) -> None:
        """Waits for the running utterances (about a second at most), drops the queued ones, frees all. Idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        while self._loaded:
            self._loaded.pop().close()

    def _transcribe(self, pcm: NDArray[np.int16]) -> tuple[RecognisedWord, ...]:
        recogniser: Recogniser | None = getattr(self._own, "recogniser", None)
        if recogniser is None:
            recogniser = self._load()
            self._own.recogniser = recogniser
            with self._lock:
                self._loaded.append(recogniser)
        return recogniser.transcribe(pcm)
