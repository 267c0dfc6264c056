"""The transcripts of a Live session: what is told is never taken back, and text is never ahead of its sound."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import Word
from omni_ws.core.ledger_entry import Clause, LedgerEntry
from omni_ws.transport.realtime.live_parts import (
    HeardText,
    SpokenText,
    TranscriptLine,
)


def told(*texts: tuple[str, bool]) -> list[str]:
    """What is told of transcripts, each with whether it is interim."""
    heard = HeardText()
    return [heard.hear(text, interim=interim) for text, interim in texts]


def test_words_are_told_on_which_two_interim_texts_agree() -> None:
    found = told(("where", True), ("where is", True), ("where is my par", True), ("where is my parcel", False))
    assert found == ["", "", "where", " is my parcel"]


def test_a_word_that_may_go_on_is_not_told() -> None:
    assert told(("for", True), ("for", True), ("forward", False)) == ["", "", "forward"]


def test_what_was_told_is_not_taken_back() -> None:
    found = told(("a b c d", True), ("a b c d", True), ("x b c d e", True), ("x b c d e", False))
    assert found == ["", "a b c", "", " d e"]


def test_each_settled_text_begins_anew() -> None:
    assert told((" one", True), (" one two.", False), (" three", True), (" three four", False)) == [
        "",
        " one two.",
        "",
        " three four",
    ]


def test_scripts_without_blanks_are_told_by_characters() -> None:
    assert told(("你好吗", True), ("你好吗我", True), ("你好吗我很", False)) == ["", "你好", "吗我很"]


def test_a_settled_text_that_is_shorter_adds_nothing() -> None:
    assert told(("a b c", True), ("a b c", True), ("a", False)) == ["", "a b", ""]


def test_times_never_go_back_and_none_is_in_the_future() -> None:
    line = TranscriptLine()
    assert line.place("a", 100, 300, now_ms=250, joins=False) == ("a", 100, 250)
    assert line.place("b", 50, 60, now_ms=400, joins=False) == (" b", 100, 250)
    assert line.place(" c", 300, 900, now_ms=400, joins=False) == (" c", 300, 400)
    assert line.place("d", -5, 500, now_ms=600, joins=True) == ("d", 300, 500)


def words(*texts: str, exact: bool = False) -> tuple[Word, ...]:
    ends = [len(" ".join(texts[: index + 1])) for index in range(len(texts))] if exact else [None] * len(texts)
    return tuple(Word(text, index * 100, index * 100 + 100, ends[index]) for index, text in enumerate(texts))


@pytest.mark.parametrize("exact", [True, False])
def test_a_word_is_told_once_its_sound_is_over(exact: bool) -> None:
    text = SpokenText()
    text.write("One two ")
    text.write("three.")
    text.pronounce(words("One", "two", "three.", exact=exact))
    assert text.heard(90, None) is None
    assert text.heard(100, None) == ("One", 0, 100)
    assert text.heard(350, None) == (" two three.", 100, 300)
    assert text.rest() == ""


def test_words_that_come_again_are_not_told_again() -> None:
    text = SpokenText()
    text.write("da da da da")
    spoken = words("da", "da", "da", "da")
    text.pronounce(spoken)
    assert text.heard(200, None) == ("da da", 0, 200)
    text.pronounce(spoken[1:])  # the answer was held, and goes on
    assert text.heard(400, None) == (" da da", 200, 400)
    assert text.heard(900, None) is None


def test_what_is_not_pronounced_is_told_at_the_end() -> None:
    text = SpokenText()
    text.write("See `x = 1`")
    text.pronounce(words("See"))
    assert text.heard(100, None) == ("See", 0, 100)
    assert text.rest() == " `x = 1`"
    assert text.rest() == ""


def entry(*clauses: Clause, finished: bool = False) -> LedgerEntry:
    found = LedgerEntry(request_id="r", clauses=[*clauses])
    found.finished = finished
    return found


def test_a_clause_is_spread_over_its_sound() -> None:
    text = SpokenText()
    text.write("One two three. Four.")
    whole = entry(Clause(0, 1400, 0, 14), Clause(1400, 2000, 14, 20), finished=True)
    assert text.heard(0, whole) is None
    assert text.heard(700, whole) == ("One two", 0, 700)
    assert text.heard(1400, whole) == (" three.", 700, 1400)
    assert text.heard(2000, whole) == (" Four.", 1400, 2000)
    assert text.heard(2100, whole) is None


def test_a_clause_that_is_still_made_is_told_at_a_usual_pace() -> None:
    text = SpokenText()
    text.write("One two three four five six")
    begun = entry(Clause(0, 100, 0, 27))
    assert text.heard(100, begun) is None
    delta = text.heard(1000, begun)
    assert delta is not None
    assert delta.text in ("One two", "One two three")


def test_an_answer_that_the_ledger_has_forgotten_is_told_at_its_end() -> None:
    text = SpokenText()
    text.write("One two")
    assert text.heard(500, None) is None
    assert text.rest() == "One two"


def test_a_long_answer_is_told_piece_by_piece() -> None:
    """The work for a word does not grow with the text before it, or behind it."""
    text, count = SpokenText(), 20_000
    for _ in range(count):
        text.write("word ")
    found = []
    for index in range(count):
        end = index * 5 + 4
        text.pronounce((Word("word", index * 10, index * 10 + 10, end),))
        delta = text.heard(index * 10 + 10, None)
        assert delta is not None
        found.append(delta.text)
        assert len(text._window) <= 3 * 4096
    assert "".join(found) == ("word " * count).rstrip()
