"""The words of a voice, told as the answer has them."""

from __future__ import annotations

from omni_ws.core.chunks import Word
from omni_ws.engine.spoken.speakable_text import MAX_KEPT, SpeakableText, WrittenWords

TEXT = "Pay **$20** now, *please*."


def words_of(text: str) -> WrittenWords:
    speakable, words = SpeakableText(), WrittenWords()
    words.add(speakable.feed(text))
    words.add(speakable.rest())
    return words


def test_a_word_that_is_read_as_several_is_told_once() -> None:
    words = words_of(TEXT)
    assert words.place([Word("Pay", 0, 100), Word("twenty", 100, 300)]) == (Word("Pay", 0, 100, 3),)
    assert words.place([Word("dollars", 300, 500), Word("now", 500, 600)]) == (
        Word("$20", 100, 500, 11),
        Word("now", 500, 600, 16),
    )
    assert words.place([Word("please", 600, 900)]) == (Word("please", 600, 900, len(TEXT)),)
    assert words.rest() == ()


def test_a_word_that_is_not_finished_is_told_with_the_next_one() -> None:
    words = words_of(TEXT)
    assert words.place([Word("twenty", 100, 300), Word("please", 300, 400)])[0] == Word("$20", 100, 300, 11)
    assert words.rest() == ()


def test_what_is_said_and_not_written_has_its_place() -> None:
    text = "See:\n```\ncode\n```\nBye."
    placed = words_of(text).place([Word(word, 0, 1) for word in ("See", "Code", "left", "out", "Bye")])
    assert [(word.text, word.text_end) for word in placed] == [
        ("See", 4),
        ("Code", 5),
        ("left", 5),
        ("out", 5),
        ("Bye", len(text)),
    ]


def test_a_word_that_is_not_found_stays_as_it_is() -> None:
    words = words_of("One two three.")
    assert words.place([Word("One", 0, 1), Word("zwei", 1, 2), Word("three", 2, 3)]) == (
        Word("One", 0, 1, 3),
        Word("zwei", 1, 2),
        Word("three", 2, 3, 14),
    )


def test_the_same_word_twice_has_two_places() -> None:
    assert [word.text_end for word in words_of("no no no").place([Word("no", 0, 1)] * 3)] == [2, 5, 8]


def test_text_that_is_never_read_is_forgotten() -> None:
    words = words_of("word " * MAX_KEPT)
    (placed,) = words.place([Word("word", 0, 1)])
    assert placed.text_end is not None
    assert 4 * MAX_KEPT < placed.text_end < 4 * MAX_KEPT + 10
