"""Judges of pauses that answer as a test says."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from omni_ws.audio.pcm import Samples
from omni_ws.service.listening import TurnJudge


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
