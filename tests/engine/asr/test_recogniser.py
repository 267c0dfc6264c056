"""Utterances, and interim texts of a model that reads them from their beginning: when it is asked, what is shown."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise

import numpy as np

from omni_ws.audio.pcm import Pcm16
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, StretchedText, Utterance
from omni_ws.engine.vllm.recogniser import INTERIM_GROWTH, interim_gap_sec


def test_an_utterance_grows_and_is_read_in_any_part() -> None:
    utterance = Utterance(8000)
    for start in (0, 3, 6):
        utterance.append(np.arange(start, start + 3, dtype=np.int16))
    assert (utterance.start_ms, utterance.length) == (500, 9)
    assert utterance.pcm().tolist() == list(range(9))
    utterance.append(np.array([9], np.int16))
    assert utterance.pcm(start=7).tolist() == [7, 8, 9]
    assert utterance.pcm(2, 4).tolist() == [2, 3]


class Reader:
    """A StretchedText on a clock of its own, and the recognitions that it asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[tuple[int, Future[str]]] = []
        #: Told of the end of a recognition before the StretchedText is.
        self.told_first: Callable[[Future[str]], None] | None = None
        self.text = StretchedText(self._recognise, lambda: self.now, first=SAMPLE_RATE, gap=interim_gap_sec)
        self.utterance = Utterance(0)

    def _recognise(self, pcm: Pcm16) -> Future[str]:
        work: Future[str] = Future()
        if self.told_first is not None:
            work.add_done_callback(self.told_first)
        self.asked.append((len(pcm), work))
        return work

    def hear(self, seconds: float) -> str:
        self.utterance.append(np.zeros(int(seconds * SAMPLE_RATE), np.int16))
        self.now += seconds
        return self.text.read(self.utterance)

    def settle(self, text: str) -> None:
        self.asked[-1][1].set_result(text)


def test_it_asks_once_there_is_a_second_and_shows_the_answer_later() -> None:
    reader = Reader()
    assert reader.hear(0.9) == ""
    assert reader.asked == []
    assert reader.hear(0.1) == ""
    assert len(reader.asked) == 1
    assert reader.hear(5) == ""  # one at a time
    assert len(reader.asked) == 1
    reader.settle("one")
    assert reader.hear(0.1) == "one"


def test_what_lies_before_the_speech_does_not_count() -> None:
    reader = Reader()
    reader.utterance = Utterance(0, lead=SAMPLE_RATE // 2)
    reader.hear(1.4)
    assert reader.asked == []
    reader.hear(0.1)
    assert [length for length, _ in reader.asked] == [1.5 * SAMPLE_RATE]


def test_it_does_not_ask_while_the_speaker_pauses() -> None:
    reader = Reader()
    reader.utterance.quiet = True
    reader.hear(3)
    assert reader.asked == []
    reader.utterance.quiet = False
    reader.hear(0.1)
    assert len(reader.asked) == 1


def test_intervals_stretch() -> None:
    reader = Reader()
    for _ in range(300):
        reader.hear(0.1)
        if reader.asked and not reader.asked[-1][1].done():
            reader.settle("so far")
    lengths = [length for length, _ in reader.asked]
    assert len(lengths) <= 15  # of 30 seconds
    assert all(after >= INTERIM_GROWTH * before for before, after in pairwise(lengths))
    assert lengths[-1] > 20 * SAMPLE_RATE


def test_a_slow_model_is_asked_seldom() -> None:
    reader = Reader()
    reader.hear(1)
    reader.now += 2
    reader.settle("slow")
    reader.hear(3)
    assert len(reader.asked) == 1
    reader.hear(1.1)
    assert len(reader.asked) == 2


def test_a_failure_shows_nothing_and_the_next_is_asked() -> None:
    reader = Reader()
    reader.hear(1)
    reader.asked[-1][1].set_exception(ValueError("broken"))
    assert reader.hear(1) == ""
    assert len(reader.asked) == 2


def test_the_end_of_an_utterance_withdraws_what_is_under_way() -> None:
    reader = Reader()
    reader.hear(10)
    (_, first), *_ = reader.asked
    reader.text.end()
    reader.text.end()
    assert first.cancelled()
    reader.utterance = Utterance(0)
    assert reader.hear(1) == ""
    assert len(reader.asked) == 2
    reader.settle("next")
    assert reader.hear(0.1) == "next"


def test_what_still_runs_for_an_utterance_that_has_ended_is_waited_for() -> None:
    reader = Reader()
    reader.hear(1)
    (_, first), *_ = reader.asked
    assert first.set_running_or_notify_cancel()
    reader.text.end()
    reader.utterance = Utterance(0)
    reader.hear(1)
    assert len(reader.asked) == 1
    first.set_result("of the utterance before")
    assert reader.hear(0.1) == ""
    assert len(reader.asked) == 2


def test_what_was_left_ends_after_what_followed_it() -> None:
    """A recognition is done before all who wait for it have been told."""
    reader = Reader()

    def hear_on(_: Future[str]) -> None:
        reader.hear(1)
        reader.settle("of the next")

    reader.told_first = hear_on
    reader.hear(1)
    reader.told_first = None
    (_, left), *_ = reader.asked
    assert left.set_running_or_notify_cancel()
    reader.text.end()
    reader.utterance = Utterance(0)
    left.set_result("of the utterance before")
    assert len(reader.asked) == 2
    assert reader.hear(0.1) == "of the next"
