"""What a recogniser tells of the words of a turn, and what follows from it."""

from __future__ import annotations

import pytest

from omni_ws.audio.speech_watch import Unfinished
from omni_ws.core.chunks import Hearing
from omni_ws.engine.asr.recogniser import asr_capabilities
from omni_ws.engine.base import TranscriptGuess, TranscriptOutput
from omni_ws.service.conversation.turn_words import TurnWords

ENGLISH = asr_capabilities(sampling=(), languages={"en"}, word_times=False, transcript_guesses=True)


class Turn:
    """A turn that begins at 0 s."""

    def __init__(self, *, asked: str = "") -> None:
        self.now = 0.0
        self.words = TurnWords(lambda: ENGLISH, asked=lambda: asked, now=lambda: self.now)
        self.words.begin()

    def guess(self, text: str, *, language: str | None = None) -> Unfinished:
        self.words.hear(TranscriptGuess(text), language=language)
        return self.words.unfinished

    def interims(self, text: str, *times: float) -> bool:
        for self.now in times:
            self.words.hear(TranscriptOutput(text, interim=True), language=None)
        return self.words.stalled


def test_groups_that_were_settled_count() -> None:
    turn = Turn()
    turn.words.hear(TranscriptOutput("My number is 4."), language=None)
    assert turn.guess(" 7.") is Unfinished.YES
    turn.words.begin()
    assert (turn.guess("7."), turn.words.told) == (Unfinished.NO, 3)


def test_who_has_begun_to_dictate_does_so_until_the_turn_ends() -> None:
    turn = Turn()
    for ordinary in ("I have two dogs.", "My name is", "My name is Laura.", "What is"):
        turn.guess(ordinary)
        assert not turn.words.in_groups
    turn.words.hear(TranscriptOutput("The guests are."), language=None)
    assert (turn.guess("Mary."), turn.words.in_groups) == (Unfinished.NO, True)
    turn.words.begin()
    turn.guess("Mary.")
    assert not turn.words.in_groups


def test_the_only_language_of_the_recogniser_counts_if_none_is_known() -> None:
    assert Turn().guess("Set a timer for") is Unfinished.YES
    assert Turn().guess("Pon un temporizador de", language="es") is Unfinished.YES
    assert Turn().guess("Set a timer for", language="ja") is Unfinished.PERHAPS


def test_what_the_assistant_asked_counts() -> None:
    assert Turn(asked="What is your number?").guess("Seven.") is Unfinished.YES


@pytest.mark.parametrize(
    ("others", "unfinished"),
    [
        (["Tell me about there.", "Tell me about the..."], Unfinished.YES),
        (["Tell me about there.", "Tell me about that...", "tell me about that,"], Unfinished.NO),
        ([], Unfinished.NO),
    ],
)
def test_a_reading_that_is_almost_as_likely_goes_on(others: list[str], unfinished: Unfinished) -> None:
    hearing = Hearing(others=tuple(others))
    for kind in (TranscriptGuess, TranscriptOutput):
        turn = Turn()
        turn.words.hear(kind("Tell me about that.", hearing=hearing), language=None)
        assert turn.words.unfinished is unfinished


def test_no_thread_sees_a_turn_finished_that_a_likely_reading_keeps_open() -> None:
    seen: list[Unfinished] = []

    class Watched(TurnWords):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "unfinished":
                seen.append(self.unfinished)

    words = Watched(lambda: ENGLISH, now=lambda: 0.0)
    seen.clear()
    words.hear(TranscriptGuess("Tell me about that.", Hearing(others=("Tell me about the",))), language=None)
    assert seen == [Unfinished.YES]


def test_a_guess_that_is_withdrawn_tells_nothing() -> None:
    turn = Turn()
    turn.guess("")
    assert turn.words.told == 0


@pytest.mark.parametrize("heard", [False, True])
def test_words_are_expected_while_the_engine_has_the_turn(heard: bool) -> None:
    assert TurnWords(lambda: ENGLISH, heard=lambda: heard).expected is heard


@pytest.mark.parametrize(
    ("times", "stalled"),
    [
        ([1.0, 2.0, 2.99], False),  # three, and too soon
        ([1.0, 2.0, 3.0], True),
        ([1.0, 5.0], False),  # two only
        ([1.0, 2.0, 2.5, 4.0], True),
    ],
)
def test_no_words_come_any_more(times: list[float], stalled: bool) -> None:
    turn = Turn()
    turn.interims("what time is", 0.0)
    assert turn.interims("what time as", *times) is stalled


def test_a_new_word_is_news() -> None:
    turn = Turn()
    found = [turn.interims("", 1, 2, 3), turn.interims("what", 4), turn.interims("what", 5, 6, 7)]
    turn.words.begin()
    assert [*found, turn.words.stalled] == [True, False, True, False]


@pytest.mark.parametrize(("text", "now", "wordless"), [("", 1.99, False), ("", 2.0, True), ("what", 9.0, False)])
def test_a_turn_without_words(text: str, now: float, wordless: bool) -> None:
    turn = Turn()
    assert not turn.words.wordless()
    turn.interims(text, 1.0)
    turn.interims("", 1.5)
    turn.now = now
    assert turn.words.wordless() is wordless


def test_a_turn_that_the_recogniser_has_not_read_is_not_without_words() -> None:
    turn = Turn()
    turn.now = 60.0
    assert not turn.words.wordless()
