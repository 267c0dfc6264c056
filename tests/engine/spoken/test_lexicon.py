"""Words that are said otherwise than they are written."""

from __future__ import annotations

from collections.abc import Callable
from threading import current_thread, main_thread

import pytest

from omni_ws.core.chunks import Word
from omni_ws.engine.spoken.languages import (
    lexicon_of,
    prepare,
)
from omni_ws.engine.spoken.speakable_text import SpeakableText, Spoken, WrittenWords

LEXICON = {
    "nginx": "engine x",
    "Siobhan": "shi-vawn",
    "New York": "noo york",
    "New York City": "the big apple",
    "US": "you ess",
    "iPhone": "eye phone",
    "C++": "see plus plus",
    "GPT-4": "gee pee tee four",
    "O'Brien": "oh bryan",
    "東京": "tokyo",
    "Zoë": "zoh ee",
    "नमस्ते": "namaste",
    "kB": "kilo bite",
}


def spoken(
    text: str, *, lexicon: dict[str, str] = LEXICON, language: str = "en", literal: bool = False, by: int = 1
) -> list[Spoken]:
    speakable = SpeakableText(language, literal=literal, lexicon=lexicon)
    pieces: list[Spoken] = []
    for start in range(0, len(text), by):
        pieces += speakable.feed(text[start : start + by])
    return pieces + speakable.rest()


def said(text: str, **options: object) -> str:
    return "".join(piece.text for piece in spoken(text, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Whole words, whatever signs stand around them.
        ("nginx", "engine x"),
        ("(nginx), “nginx”: nginx!", "(engine x), “engine x”: engine x!"),
        ("an nginx-based one", "an engine x based one"),
        ("nginxes and knginx", "nginxes and knginx"),
        ("nginx's own", "engine x's own"),
        ("nginx/nginx", "engine x/engine x"),
        ("nginx nginx", "engine x engine x"),
        # In any case, unless a capital is inside.
        ("NGINX and Nginx", "engine x and engine x"),
        ("SIOBHAN, siobhan", "shi-vawn, shi-vawn"),
        ("the US told us", "the you ess told us"),
        ("an iPhone, an Iphone", "an eye phone, an Iphone"),
        # The longest of those that match.
        ("in New York City now", "in the big apple now"),
        ("in new york now", "in noo york now"),
        ("New York", "noo york"),
        ("New York, New Jersey", "noo york, New Jersey"),
        ("New New York", "New noo york"),
        ("newyork", "newyork"),
        # Signs within an entry.
        ("C++, not C", "see plus plus, not C"),
        ("GPT-4 beats GPT-3", "gee pee tee four beats GPT-three"),
        ("O’Brien or o'brien", "oh bryan or oh bryan"),
        # Other scripts; a letter and its accent may be two characters.
        ("私は東京です", "私はtokyoです"),
        ("Zoe\u0308 and Zoë", "zoh ee and zoh ee"),
        ("नमस्ते नम", "namaste नम"),
        # Numbers beside it are still read in words.
        ("nginx-1.25 took $20.", "engine x one point two five took twenty dollars."),
        ("It has 5 kB.", "It has five kilo bite."),
        ("many kB", "many kilo bite"),
    ],
)
def test_words_are_said_as_the_lexicon_says(text: str, expected: str) -> None:
    for by in (1, 3, len(text)):
        assert said(text, by=by) == expected, by


@pytest.mark.parametrize("text", ["**nginx**", "_nginx_", "`nginx`", "[nginx](https://nginx.example/x?y)", "~~nginx~~"])
def test_markup_is_no_part_of_a_word(text: str) -> None:
    assert said(f"So {text} it is.") == "So engine x it is."


@pytest.mark.parametrize(("language", "read"), [("", "engine x took $20"), ("en", "engine x took twenty dollars")])
def test_a_literal_text_is_left_alone_but_for_its_words(language: str, read: str) -> None:
    assert said("**nginx** took $20", language=language, literal=True) == f"**engine x** {read[9:]}"


def test_a_name_is_not_sought_beyond_its_line() -> None:
    assert said("New\nYork") == "New\nYork"


def test_a_word_is_held_back_only_while_an_entry_may_go_on() -> None:
    speakable = SpeakableText(lexicon=LEXICON)
    assert [piece.text for piece in speakable.feed("the nginx and New ")] == ["the", " engine x", " and"]
    assert not speakable.looks_complete
    assert [piece.text for piece in speakable.feed("York ")] == []  # City?
    assert [piece.text for piece in speakable.feed("too. ")] == [" noo york", " too.", " "]


def test_a_sentence_looks_complete_with_a_word_that_is_held_back() -> None:
    speakable = SpeakableText(lexicon={"the end. Really": "x"})
    speakable.feed("It is the end. ")
    assert speakable.looks_complete
    assert "".join(piece.text for piece in speakable.rest()) == " the end."


@pytest.mark.parametrize(
    ("entries", "text", "expected"),
    [
        ({"Us": "one", "US": "two"}, "us Us US", "one one two"),  # the capitals count before any case
        ({"Read": "one", "read": "two"}, "Read read READ", "two two two"),  # the last one counts
        ({" New  York ": " noo \n york "}, "New York", "noo york"),
        ({"=>": "arrow"}, "a => b", "a arrow b"),
        ({".NET": "dott nett"}, "ASP.NET or .net", "ASP dott nett or dot net"),
        ({"C++": "see plus plus"}, "C++11", "see plus plus eleven"),
        ({"nginx": "nginx"}, "nginx", "nginx"),
        ({"C": "see", "+": "plus"}, "C++", "see plus plus"),
        ({"你好": "nee how", "世界": "shijie"}, "你好世界", "nee how shijie"),
    ],
)
def test_which_entry_counts(entries: dict[str, str], text: str, expected: str) -> None:
    assert said(text, lexicon=entries) == expected


def test_what_is_said_never_takes_the_place_of_what_is_written() -> None:
    text = "So **nginx** in (New York), she said."
    written = WrittenWords()
    written.add(spoken(text))
    read = ["So", "engine", "x", "in", "noo", "york", "she", "said"]
    placed = written.place([Word(word, 10 * number, 10 * number + 9) for number, word in enumerate(read)])
    assert [(word.text, word.start_ms, word.end_ms) for word in placed] == [
        ("So", 0, 9),
        ("nginx", 10, 29),
        ("in", 30, 39),
        ("New York", 40, 59),
        ("she", 60, 69),
        ("said", 70, 79),
    ]
    assert [text[: word.text_end].split()[-1] for word in placed if word.text_end] == [
        *("So", "**nginx**", "in", "York),", "she", "said."),
    ]


def test_words_that_are_said_long_are_placed_as_well() -> None:
    """As much as is converted at a time, of words that get as long as they can."""
    long = f"{'a' * 63} {'a' * 64}"
    text = "b " * 128
    written = WrittenWords()
    written.add(spoken(text, lexicon={"b": long}, by=256))
    placed = written.place([Word("a" * (63 + number % 2), number, number + 1) for number in range(256)])
    assert [word.text for word in placed] == ["b"] * 128


def test_a_lexicon_is_made_once_for_all_answers() -> None:
    assert lexicon_of({"nginx": "engine x"}) is lexicon_of({"nginx": "engine x"})
    assert lexicon_of({"nginx": "engine x"}) is not lexicon_of({"nginx": "engine ex"})


async def test_a_long_lexicon_is_made_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    noted = "omni_ws.engine.spoken.languages.lexicon_of"
    monkeypatch.setattr(noted, lambda entries: made.append(current_thread() is main_thread()))
    await prepare({str(number): "x" for number in range(40)})
    assert made == []  # where it is first used
    await prepare({str(number): "x" for number in range(41)})
    assert made == [False]


@pytest.mark.parametrize("make", [lambda n: {"好" * n + "aB": "x"}, lambda n: {" ".join(["aB"] * n): "x"}])
def test_entries_within_entries_are_told_apart(make: Callable[[int], dict[str, str]]) -> None:
    entries = {word: str(number) for number in range(1, 12) for word in make(number)}
    word = next(reversed(entries))
    assert said(f"Say {word} now.", lexicon=entries) == "Say 11 now."
    assert said(f"Say {word.lower()} now.", lexicon=entries) == f"Say {word.lower()} now."
