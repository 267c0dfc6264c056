"""TurnJudge: the thread that is asked whether speakers have finished, for all sessions of a server."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import LIKELY
from omni_ws.metrics import Metrics

log = logging.getLogger(__name__)

#: Questions that may wait. One takes some 60 ms, and meanwhile the input of its session waits.
MAX_WAITING: Final = 8


class TurnModel(Protocol):
    """Tells from the sound of speech whether the speaker has finished."""

    def finished(self, turn: Samples) -> float:
        """The probability that the speaker of ``turn``, at 16 kHz, has finished. Called from one thread."""


class TurnJudge:
    """A PauseJudge with a thread of its own, so that no question waits behind other work. Thread-safe.

    With ``MAX_WAITING`` questions in its queue it says at once that nobody has finished: turns then end by silence.
    """

    def __init__(self, model: TurnModel, metrics: Metrics | None = None) -> None:
        self._model = model
        self._metrics = metrics or Metrics()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="turns")
        self._room = threading.BoundedSemaphore(MAX_WAITING)

    def ask(self, turn: Samples) -> Future[float]:
        """See PauseJudge."""
        if not self._room.acquire(blocking=False):
            self._count("skipped")
            return _no()
        try:
            question = self._executor.submit(self._answer, turn)
        except RuntimeError:  # closed
            self._room.release()
            return _no()
        question.add_done_callback(lambda _: self._room.release())
        return question

    def close(self) -> None:
        """Wait for the question that is being answered, and drop the others. Idempotent."""
        self._executor.shutdown(cancel_futures=True)

    def _answer(self, turn: Samples) -> float:
        begun = time.monotonic()
        try:
            probability = self._model.finished(turn)
        except Exception:
            log.exception("a question of turn detection failed; the turn ends by silence")
            self._count("failed")
            return 0.0
        self._metrics.turn_question_seconds.inc(time.monotonic() - begun)
        self._count("finished" if probability > LIKELY else "unfinished")
        return probability

    def _count(self, answer: str) -> None:
        self._metrics.turn_questions.labels(answer).inc()


def _no() -> Future[float]:
    answer: Future[float] = Future()
    answer.set_result(0.0)
    return answer
