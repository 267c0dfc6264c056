"""Numbers, and what stands around them, as a person reads them."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.spoken.english import (
    ABBREVIATIONS,
    SHORT_WORDS,
    TITLES,
    UNITS,
)
from omni_ws.engine.spoken.speakable_text import SpeakableText, Spoken, spoken_form

with (Path(__file__).parents[2] / "data/spoken_numbers.tsv").open(encoding="utf-8", newline="") as table:
    PAIRS = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE))


def literally(*pieces: str) -> list[Spoken]:
    speakable = SpeakableText(literal=True)
    return [*(spoken for piece in pieces for spoken in speakable.feed(piece)), *speakable.rest()]


def said(pieces: list[Spoken]) -> str:
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("pair", PAIRS, ids=[pair["written"] for pair in PAIRS])
def test_a_number_is_read_by_what_stands_around_it(pair: dict[str, str]) -> None:
    written = pair["written"]
    assert said(spoken_form(written)) == pair["spoken"]
    speakable = SpeakableText()
    assert said([spoken for sign in written for spoken in speakable.feed(sign)] + speakable.rest()) == pair["spoken"]


def test_a_third_of_the_pairs_come_from_reports_of_others() -> None:
    assert len({pair["written"] for pair in PAIRS}) == len(PAIRS) >= 300
    assert sum(pair["seen"] != "-" for pair in PAIRS) >= len(PAIRS) / 3


@pytest.mark.parametrize(
    ("before", "after", "spoken"),
    [
        ("She is in her ", "20s.", "She is in her twenties."),
        ("In their 20s and ", "30s now.", "In their twenties and thirties now."),
        ("Wait for ", "20s.", "Wait for twenty seconds."),
        ("It takes 5m ", "30s.", "It takes five minutes thirty seconds."),
        ("The code is ", "4821.", "The code is four eight two one."),
        ("A ", "$5 bill.", "A five dollar bill."),
        ("It costs $ 5.", "", "It costs five dollars."),
        ("It costs $ ", "5 today.", "It costs five dollars today."),
        ("That is x ", "* y.", "That is x times y."),
    ],
)
def test_the_words_before_count_when_they_have_been_said(before: str, after: str, spoken: str) -> None:
    speakable = SpeakableText()
    assert said([*speakable.feed(before), *speakable.feed(after), *speakable.rest()]) == spoken


def test_a_sentence_does_not_tell_about_the_next_one() -> None:
    assert said(spoken_form("It is on her. 20s later it ends.")) == "It is on her. twenty seconds later it ends."


def test_a_literal_text_has_no_markup_and_loses_nothing() -> None:
    text = "# 5 km\n```\nx = 2**8\n```\n[1] costs $5\n| a | 3 |"
    words = "number five kilometers x equals two to the power of eight one costs five dollars a three"
    assert " ".join(said(literally(text)).split()) == words


#: What numbers are written with, between letters of several scripts.
SIGNS = st.text(
    st.sampled_from("0123456789abcdehkmsxMKBGE$€£%°.,:;/-–−+*=^_#@&'’\"½²₂٣Ⅷ①ſKİéßяあ \n()[]<>|~`"), max_size=60
)
#: Words that stay what they are whatever is beside them.
WORDS = st.text(st.characters(categories=["L"], exclude_characters="ªºπαβγδΔεθλμσΣφωΩ"), min_size=4, max_size=9).filter(
    lambda word: not {word, word.lower(), f"{word.lower()}."} & {*UNITS, *TITLES, *SHORT_WORDS, *ABBREVIATIONS}
)


@given(st.one_of(st.text(max_size=80), SIGNS))
def test_no_word_is_dropped(text: str) -> None:
    pieces = literally(text)
    assert pieces == literally(*text)
    assert all(before.end <= after.end for before, after in pairwise(pieces))
    at = 0
    for word in text.split():
        at = text.index(word, at)
        if any(map(str.isalnum, word)):
            assert any(
                piece.start < at + len(word) and piece.end > at and any(map(str.isalnum, piece.text))
                for piece in pieces
            ), (word, pieces)
        at += len(word)


@given(st.lists(st.one_of(WORDS, st.sampled_from([pair["written"].split()[-1] for pair in PAIRS])), max_size=12))
def test_words_beside_numbers_stay(words: list[str]) -> None:
    read = said(literally(" ".join(words))).split()
    for word in words:
        if word.isalpha() and not word.isupper():
            assert word in read


def test_a_greek_word_is_no_row_of_signs() -> None:
    assert said(literally("Σωκράτης said: 2π, Δx and αβ")) == "Σωκράτης said: two pi, delta x and alpha beta"
