"""Which part of a spoken text was heard."""

from __future__ import annotations

import sys

import pytest

from omni_ws.core.chunks import Word
from omni_ws.core.ledger_entry import (
    USUAL_PACE,
    USUAL_PACE_UNSPACED,
    Clause,
    SpokenSpan,
    audible,
    end_of_clauses,
    end_of_words,
    read_all,
    usual_pace,
)

TEXT = "It is 9 o'clock, sir. Time for tea!"
WORDS = [
    Word("It", 0, 100),
    Word("is", 100, 200),
    Word("nine", 200, 400),  # spelled out: not to be found
    Word("o'clock", 400, 700),
    Word("sir", 700, 900),
    Word("Time", 1000, 1200),
]


@pytest.mark.parametrize(("count", "end"), [(0, 0), (1, 2), (2, 5), (3, 5), (4, 16), (5, 21), (6, 26)])
def test_words_end_behind_the_marks_that_follow(count: int, end: int) -> None:
    assert end_of_words(TEXT, WORDS[:count]) == end


def test_words_that_know_their_place_end_there() -> None:
    text = "Pay **$20** now:\n```\ntwenty now\n```\nNow."
    words = [Word("Pay", 60, 100, 3), Word("$20", 100, 200, 11), Word("now", 200, 300, 16), Word("Now", 400, 500, 999)]
    assert [end_of_words(text, words[:count]) for count in range(5)] == [0, 3, 11, 16, len(text)]


def test_words_are_found_where_lower_case_is_longer() -> None:
    text = "İİİ: İstanbul'a İzmir'den gel dedim"
    words = [Word("İstanbul'a", 0, 400), Word("izmir'den", 400, 800)]
    assert text[: end_of_words(text, words)] == "İİİ: İstanbul'a İzmir'den"


def test_only_one_character_has_a_lower_case_of_another_length() -> None:
    assert [one for one in map(chr, range(sys.maxunicode + 1)) if len(one.lower()) != 1] == ["İ"]


def cut(text: str, clauses: list[Clause], heard_ms: float, *, whole: bool = True, pace: float | None = None) -> str:
    return text[: end_of_clauses(text, clauses, heard_ms, whole=whole, pace=pace, read=read_all)]


@pytest.mark.parametrize(
    ("heard_ms", "heard"), [(0, ""), (400, "one"), (600, "one two"), (999, "one two"), (1000, "one two three")]
)
def test_within_a_clause_by_its_share_in_whole_words_rounded_down(heard_ms: float, heard: str) -> None:
    assert cut("one two three", [Clause(0, 1000, 0, 13)], heard_ms).rstrip() == heard


SLOW, FAST = Clause(0, 3000, 0, 11), Clause(3000, 4000, 12, 31)
CLAUSES = "Slow words. Quick words follow."


@pytest.mark.parametrize(
    ("heard_ms", "heard"),
    [
        (1000, ""),
        (1500, "Slow"),
        (2700, "Slow"),
        (2999, "Slow words."),
        (3000, "Slow words."),
        (3400, "Slow words. Quick"),
        (4000, CLAUSES),
    ],
)
def test_clause_by_clause(heard_ms: float, heard: str) -> None:
    assert cut(CLAUSES, [SLOW, FAST], heard_ms).rstrip() == heard


def test_what_is_between_clauses_is_not_read() -> None:
    text = "one\n```\ncode\n```\ntwo three"
    clauses = [Clause(0, 500, 0, 3), Clause(500, 1500, 17, 26)]
    assert [cut(text, clauses, heard_ms)[-4:] for heard_ms in (499, 500, 1000)] == ["", "one", "two "]


def test_the_last_clause_lasts_at_least_as_long_as_its_text() -> None:
    """What was sent says nothing about how much is still to come."""
    text = " ".join(f"w{number}" for number in range(150))
    heard = cut(text, [Clause(0, 3400, 0, len(text))], 3000, whole=False)
    assert 7 <= len(heard.split()) <= 12
    assert cut(text, [Clause(0, 3400, 0, len(text))], 3000, whole=False, pace=5).split()[-1] == "w4"
    assert len(cut(text, [Clause(0, 3400, 0, len(text))], 3000).split()) > 100  # when all of its sound was made
    assert cut("one two", [Clause(0, 9000, 0, 7)], 9000, whole=False) == "one two"  # a slow voice


@pytest.mark.parametrize(("heard_ms", "heard"), [(249, "你"), (250, "你好"), (499, "你好世"), (999, "你好世界再见了")])
def test_a_character_is_a_word_where_there_are_no_blanks(heard_ms: float, heard: str) -> None:
    assert cut("你好世界再见了朋", [Clause(0, 1000, 0, 8)], heard_ms) == heard


def test_a_piece_counts_as_long_as_it_is_read() -> None:
    def read(text: str) -> list[SpokenSpan]:
        return [SpokenSpan(0, 4, 4), SpokenSpan(4, 7, 16), SpokenSpan(7, 11, 4)]  # "Pay", "twenty dollars", "now"

    text = "Pay $20 now"
    clauses = [Clause(0, 2400, 0, 11)]
    ends = [end_of_clauses(text, clauses, ms, whole=True, pace=None, read=read) for ms in (200, 400, 1900, 2000, 2400)]
    assert [text[:end].rstrip() for end in ends] == ["", "Pay", "Pay", "Pay $20", text]


def test_clauses_without_sound_or_text() -> None:
    assert cut("", [], 100) == ""
    assert cut("one", [Clause(0, 0, 0, 3)], 0.1, whole=False) == ""
    assert cut("one two", [Clause(0, 0, 0, 3), Clause(0, 500, 4, 7)], 250) == "one "


@pytest.mark.parametrize(
    ("part", "heard"),
    [
        ("¿", ""),
        ("**", ""),
        ("(", ""),
        ("", ""),
        ("Hello! (", "Hello!"),
        ("He said “", "He said"),
        ("¿Cómo estás?", "¿Cómo estás?"),
        ("**Note**", "**Note**"),
        ("one\n```", "one"),
        ("f(", "f"),
        ("“Yes.” ", "“Yes.”"),
    ],
)
def test_marks_that_nobody_heard(part: str, heard: str) -> None:
    assert audible(part) == heard


def test_the_pace_of_a_voice_that_is_not_known() -> None:
    assert usual_pace("some words") == usual_pace("") == USUAL_PACE
    assert usual_pace("你好 ok") == USUAL_PACE
    assert usual_pace("你好世界") == USUAL_PACE_UNSPACED
