"""Speech workers without threads or a model, judges of pauses that answer as a test says, and audio for both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

import numpy as np
from support.live_server import LiveServer

from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import StreamPiece, Watched
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector
from omni_ws.engine.threads import Lane
from omni_ws.service.listening import (
    Done,
    SpeechWorkers,
    TurnJudge,
)

#: Bytes of a millisecond of pcm16 at 16 kHz.
MS = 32


def loud(ms: int, *, khz: int = 16) -> bytes:
    """Speech to LoudnessDetector, pcm16. Samples differ, so that a lost one shows."""
    ramp = 8000 + np.arange(ms * khz) % 9973
    return ramp.astype("<i2").tobytes()


def quiet(ms: int, *, khz: int = 16) -> bytes:
    """Silence to LoudnessDetector, pcm16. Samples differ, so that a lost one shows."""
    return (np.arange(ms * khz) % 97).astype("<i2").tobytes()


#: The same at the 24 kHz of OpenAI's APIs for voice.
loud_24k, quiet_24k = partial(loud, khz=24), partial(quiet, khz=24)


class LoudnessDetector(SpeechDetector):
    """Takes each loud window for speech, without a model."""

    def process(self, samples: Samples) -> list[float]:
        waiting = np.concatenate((self._rest, samples))
        count = len(waiting) // WINDOW_SAMPLES
        windows = waiting[: count * WINDOW_SAMPLES].reshape(count, WINDOW_SAMPLES)
        self._rest = waiting[count * WINDOW_SAMPLES :]
        return [float(np.abs(window).mean() > 0.05) for window in windows]

    def reset(self) -> None:
        self._rest = np.empty(0, np.float32)


class InlineWorkers(SpeechWorkers):
    """Does the work in the next pass of the event loop. ``pieces`` counts what was done."""

    def __init__(self) -> None:
        super().__init__()
        self.new_detector = LoudnessDetector
        self.pieces = 0
        self._unfinished = 0
        #: Set while no work is unfinished.
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def available(self) -> bool:
        return True

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        def run() -> None:
            self.pieces += 1
            outcome: Watched | Exception
            try:
                outcome = piece.hear()
            except Exception as error:
                outcome = error
            done(outcome)
            self._unfinished -= 1
            if not self._unfinished:
                self.idle.set()

        self._unfinished += 1
        self.idle.clear()
        asyncio.get_running_loop().call_soon(run)


def inline(server: LiveServer) -> LiveServer:
    """Have a server listen without threads and without a model."""
    server.app.sessions.speech_workers = InlineWorkers()
    return server


class HeldWorkers(InlineWorkers):
    """Does no work before ``listen`` is called."""

    def __init__(self) -> None:
        super().__init__()
        self._held: list[Callable[[], None]] = []
        self._listening = False

    def submit(self, piece: StreamPiece, done: Done, lane: Lane) -> None:
        if self._listening:
            super().submit(piece, done, lane)
        else:
            self._held.append(lambda: super(HeldWorkers, self).submit(piece, done, lane))

    def hold(self) -> None:
        """Do no further work before ``listen`` is called again."""
        self._listening = False

    def listen(self) -> None:
        """Do the work submitted so far, and all that follows."""
        self._listening = True
        held, self._held = self._held, []
        for submit in held:
            submit()


class ScriptedJudge(TurnJudge):
    """Answers each question with the next of ``answers``; None, and whatever comes after them, is for the test."""

    def __init__(self, answers: Iterable[float | None] = ()) -> None:
        self._answers = iter(answers)
        #: What the judge has heard, and its answers.
        self.heard: list[Samples] = []
        self.questions: list[Future[float]] = []

    def ask(self, turn: Samples) -> Future[float]:
        question: Future[float] = Future()
        self.heard.append(turn)
        self.questions.append(question)
        if (answer := next(self._answers, None)) is not None:
            question.set_result(answer)
        return question

    def close(self) -> None:
        pass


class ScriptedModel:
    """A turn model that is always sure."""

    def __init__(self) -> None:
        self.probability = 1.0
        self.turns: list[Samples] = []

    def finished(self, turn: Samples) -> float:
        self.turns.append(turn)
        return self.probability
