"""The thread that is asked whether speakers have finished."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
from support.patience import PATIENCE_SEC

from omni_ws.audio.pcm import Samples
from omni_ws.metrics import Metrics
from omni_ws.service.listening import (
    MAX_WAITING,
    TurnJudge,
)

TURN = np.zeros(16_000, np.float32)


class Model:
    """Answers once it may; ``answers`` are probabilities or failures."""

    def __init__(self, *answers: float | Exception) -> None:
        self._answers = list(answers)
        self.is_asked = threading.Event()
        self.may_answer = threading.Event()
        self.threads: set[int] = set()

    def finished(self, turn: Samples) -> float:
        self.threads.add(threading.get_ident())
        self.is_asked.set()
        assert self.may_answer.wait(PATIENCE_SEC)
        answer = self._answers.pop(0) if self._answers else 1.0
        if isinstance(answer, Exception):
            raise answer
        return answer


def counted(metrics: Metrics, answer: str) -> float:
    value = metrics.registry.get_sample_value("omni_ws_turn_questions_total", {"answer": answer})
    return value or 0.0


@pytest.mark.parametrize(("probability", "counts"), [(0.5, "unfinished"), (math.nextafter(0.5, 1), "finished")])
def test_the_probability_is_told_and_counted(probability: float, counts: str) -> None:
    metrics, model = Metrics(), Model(probability)
    model.may_answer.set()
    judge = TurnJudge(model, metrics)
    assert judge.ask(TURN).result(PATIENCE_SEC) == probability
    judge.close()
    assert counted(metrics, counts) == 1


def test_it_has_one_thread_of_its_own() -> None:
    model = Model()
    model.may_answer.set()
    judge = TurnJudge(model)
    assert all(question.result(PATIENCE_SEC) for question in [judge.ask(TURN) for _ in range(MAX_WAITING)])
    assert len(model.threads) == 1
    assert threading.get_ident() not in model.threads
    judge.close()


def test_who_asks_too_much_is_answered_at_once() -> None:
    metrics, model = Metrics(), Model()
    judge = TurnJudge(model, metrics)
    questions = [judge.ask(TURN) for _ in range(MAX_WAITING)]
    beyond = judge.ask(TURN)
    assert beyond.done()
    assert not beyond.result()
    assert not any(question.done() for question in questions)
    # One that is withdrawn makes room.
    assert questions.pop().cancel()
    questions.append(judge.ask(TURN))
    model.may_answer.set()
    assert all(question.result(PATIENCE_SEC) for question in questions)
    assert (counted(metrics, "skipped"), counted(metrics, "finished")) == (1, MAX_WAITING)
    judge.close()


def test_a_failure_ends_no_turn_and_does_not_last(caplog: pytest.LogCaptureFixture) -> None:
    metrics, model = Metrics(), Model(RuntimeError("broken"), 0.1)
    model.may_answer.set()
    judge = TurnJudge(model, metrics)
    assert judge.ask(TURN).result(PATIENCE_SEC) == 0
    assert "ends by silence" in caplog.text
    assert judge.ask(TURN).result(PATIENCE_SEC) == 0.1
    assert judge.ask(TURN).result(PATIENCE_SEC)
    judge.close()
    assert [counted(metrics, answer) for answer in ("failed", "unfinished", "finished")] == [1, 1, 1]


def test_a_closed_judge_drops_what_waits_and_ends_no_turn() -> None:
    model = Model()
    judge = TurnJudge(model)
    running, waiting = judge.ask(TURN), judge.ask(TURN)
    assert model.is_asked.wait(PATIENCE_SEC)
    waiting.add_done_callback(lambda _: model.may_answer.set())
    judge.close()
    judge.close()
    assert waiting.cancelled()
    assert running.result(PATIENCE_SEC)
    assert not judge.ask(TURN).result(PATIENCE_SEC)
