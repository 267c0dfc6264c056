"""Whether a speaker who pauses has more to say, by the words."""

from __future__ import annotations

import pytest

from omni_ws.audio.speech_watch import Unfinished
from omni_ws.service.conversation.unfinished import LANGUAGES, TurnWords, how_unfinished

NO, PERHAPS, YES = Unfinished.NO, Unfinished.PERHAPS, Unfinished.YES


@pytest.mark.parametrize(
    "text",
    [
        "Set a timer for.",
        "Set a timer for",
        "What is three plus?",
        "My number is.",
        "How much is?",
        "I was thinking, um.",
        "Turn on the",
        "I would like",
        "Could you remind me to call.",
        "Because",
        "I went home and...",
        "Well,",
        "One moment —",
        "Do you have it in a",
        # digits and letters in a row
        "My number is 415.",
        "415.",
        "415-330",
        "4, 4, 2.",
        "four four two",
        "It's spelled K-A-T.",
        "The code is seven.",
        "call 555 0199",
        "double four two",
    ],
)
def test_the_speaker_goes_on(text: str) -> None:
    assert how_unfinished(text, "en") is YES


@pytest.mark.parametrize(
    "text",
    [
        "What is three plus four?",
        "What is 3 + 4?",
        "What is 12 times 12?",
        "Wake me up at 7:30.",
        "Wake me up at 7 30.",
        "He was born in 1969.",
        "It costs 1,000 dollars or 98.6.",
        "Turn the lights on.",
        "Tell me a joke.",
        "So do I.",
        "A train leaves at 9.",
        "Yeah.",
        "Vitamin C.",
        "Seven.",
    ],
)
def test_a_sentence_is_whole(text: str) -> None:
    assert how_unfinished(text, "en") is NO


@pytest.mark.parametrize(
    "text",
    [
        "",
        "...?!"[3:],
        "What is this for?",
        "Who did you give it to?",
        "Tell me what it is.",
        "turn the lights on",  # a recogniser that writes no marks
    ],
)
def test_words_that_do_not_tell(text: str) -> None:
    assert how_unfinished(text, "en") is PERHAPS


@pytest.mark.parametrize(
    ("asked", "text", "found"),
    [
        ("What is your phone number?", "Seven.", YES),
        ("Sure. Could you spell your last name for me?", "A.", YES),
        ("What's your address?", "It's 12.", YES),
        ("What is your phone number?", "I don't know.", NO),
        ("Your number is saved. How many people?", "Seven.", NO),
        ("How many people?", "Seven.", NO),
    ],
)
def test_the_assistant_has_asked_for_something_that_is_dictated(asked: str, text: str, found: Unfinished) -> None:
    assert how_unfinished(text, "en", asked=asked) is found


@pytest.mark.parametrize(
    ("language", "open_text", "row", "whole"),
    [
        ("es", "Pon un temporizador de", "Mi número es 612.", "¿Cuál es la capital de Francia?"),
        ("fr", "Mets un minuteur pour", "Mon numéro est le 06 12.", "Quelle est la capitale de la France ?"),
        ("it", "Metti un timer di", "Il mio numero è 347.", "Qual è la capitale della Francia?"),
        ("pt", "Ponha um alarme para", "O meu número é 912.", "Qual é a capital da França?"),
        ("de", "Stell einen Wecker für", "Meine Nummer ist 0171.", "Was ist die Hauptstadt von Frankreich?"),
    ],
)
def test_other_languages(language: str, open_text: str, row: str, whole: str) -> None:
    assert [how_unfinished(text, language) for text in (open_text, row, whole)] == [YES, YES, NO]


def test_nothing_is_known_of_a_language_without_lists() -> None:
    assert "ja" not in LANGUAGES
    assert how_unfinished("415", "ja") is how_unfinished("Set a timer for", "") is PERHAPS


@pytest.mark.parametrize(("signs", "found"), [("4 4", NO), ("4 4 2", YES)])
def test_so_many_digits_are_a_row(signs: str, found: Unfinished) -> None:
    assert how_unfinished(f"I said {signs}.", "en") is found


def test_only_the_end_of_a_long_text_is_read() -> None:
    assert how_unfinished("set a timer for " * 100_000, "en") is YES
    assert how_unfinished("The end of it all. " * 100_000, "en") is NO


# the words of a turn


def turn_words() -> TurnWords:
    return TurnWords(expected=lambda: True)


def test_groups_that_were_settled_count() -> None:
    words = turn_words()
    words.tell("My number is 4.", "en", asked="", settled=True, now=0)
    words.tell(" 7.", "en", asked="", settled=False, now=1)
    assert (words.told, words.unfinished) == (2, YES)
    words.begin(now=2)
    words.tell("7.", "en", asked="", settled=False, now=3)
    assert (words.told, words.unfinished) == (3, NO)


def test_a_guess_that_is_withdrawn_tells_nothing() -> None:
    words = turn_words()
    words.tell("", "en", asked="", settled=False, now=0)
    assert words.told == 0


@pytest.mark.parametrize(
    ("times", "stalled"),
    [
        ([1.0, 2.0, 2.99], False),  # three, and too soon
        ([1.0, 2.0, 3.0], True),
        ([1.0, 5.0], False),  # two only
        ([1.0, 2.0, 3.0, 4.0], True),
    ],
)
def test_no_words_come_any_more(times: list[float], stalled: bool) -> None:
    words = turn_words()
    words.begin(now=-10)
    words.interim("what time is", now=0)
    for now in times:
        words.interim("what time as", now=now)
    assert words.stalled is stalled


def test_a_new_word_is_news() -> None:
    words = turn_words()
    words.begin(now=0)
    for now in (1.0, 2.0, 3.0):
        words.interim("", now=now)
    assert words.stalled
    words.interim("what", now=4)
    assert not words.stalled
    for now in (5.0, 6.0, 7.0):
        words.interim("what", now=now)
    assert words.stalled
    words.begin(now=8)
    assert not words.stalled
