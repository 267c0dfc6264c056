"""What a model writes, as a voice should read it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.engine.spoken.speakable_text import MAX_ROW, MAX_WORD, SpeakableText, Spoken, spoken_form

FORMS = [
    json.loads(line) for line in (Path(__file__).parents[2] / "data/spoken_forms.jsonl").read_text("utf-8").splitlines()
]

#: Whatever markup begins, goes on, or ends; and what is read together with its neighbour.
PIECES = (
    *(
        " ",
        "\n",
        "\t",
        "**bold**",
        "*",
        "_",
        "`",
        "`x_y`",
        "# ",
        "- ",
        "1. ",
        "> ",
        "---",
        "[",
        "](",
        ")",
        "|",
        "5",
        "5.",
    ),
    *("| a | b |\n", "|---|---|\n", "```python\n", "```\n", "~~~", "[a](http://b.c)", '[t](u "v', "[1]", "![alt](u)"),
    *("<b>", "<a href", "=x>", "<!--", "-->", "&amp;", "&", "\\frac{a}{b}", "$x$", "$5", "$", "\\", "{", "}"),
    *("km", "50%", "1/2", "½", "5:30", "p.m.", "March", "15,", "2024", "Dr.", "No.", "St.", "e.g.", "vs.", "War", "II"),
    *(
        "+1 (555) 123-4567",
        "5th",
        "20$",
        "HK$50",
        "Gen",
        "Z",
        "4.5/5",
        "/",
        "Jan",
        "10^-5",
        "123-45-6789",
        "20ºC",
        "https://a.b/c?d=e",
        "a@b.co",
        "C++",
        "w/o",
        "—",
        " - ",
        "...",
        "!",
        "😀",
        "1️⃣",
        "你好",
        "。",
        "é",
    ),
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)


def spoken(*pieces: str, language: str = "en") -> list[Spoken]:
    speakable = SpeakableText(language)
    return [*(spoken for piece in pieces for spoken in speakable.feed(piece)), *speakable.rest()]


def said(text: str, language: str = "en") -> str:
    return "".join(piece.text for piece in spoken_form(text, language))


def test_a_text_is_read_as_a_person_would() -> None:
    for form in FORMS:
        assert said(form["written"]) == form["spoken"], form["written"]


@given(TEXTS, st.data())
def test_the_spoken_form_does_not_depend_on_how_the_text_is_cut(text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert spoken(*pieces) == spoken(text) == spoken(*text)


@given(TEXTS, st.sampled_from(("en", "de", "")))
def test_places_go_forward_and_stay_within_the_text(text: str, language: str) -> None:
    pieces = spoken(text, language=language)
    assert all(0 <= piece.start <= piece.end <= len(text) for piece in pieces)
    assert all(before.start <= after.start and before.end <= after.end for before, after in pairwise(pieces))
    assert all(piece.text for piece in pieces)


#: Digits, signs and letters of several scripts, and those that case folding confuses with ASCII's.
ODD = st.text(st.sampled_from("0123459$€£%°.,:;/-–−+*=^_#@&'\"½²₂٣୫ⅧſKİıßeEkKmMsSxXvVaApPI \n()[]<>|~`"), max_size=60)


@given(st.one_of(st.text(max_size=60), ODD))
def test_any_text_can_be_read(text: str) -> None:
    assert spoken(text) == spoken(*text)


@given(TEXTS)
def test_no_markup_and_no_emoji_is_left(text: str) -> None:
    assert not set("*`[]{}\\<>|😀") & set(said(text))


@given(st.lists(st.sampled_from(("plain", "words,", "and", "a", "line.", "\n", "over")), max_size=20).map(" ".join))
def test_plain_text_is_read_as_it_is_written(text: str) -> None:
    assert said(text).split() == text.split()


def test_a_sentence_is_passed_on_when_its_last_space_arrives() -> None:
    speakable = SpeakableText()
    assert [piece.text for piece in speakable.feed("Hello **there**.")] == ["Hello"]
    assert [piece.text for piece in speakable.feed(" ")] == [" there.", " "]
    assert [piece.text for piece in speakable.feed("It is ")] == ["It", " is"]


def test_a_number_waits_for_its_unit_alone() -> None:
    speakable = SpeakableText()
    assert "".join(piece.text for piece in speakable.feed("About 5 ")) == "About"
    assert "".join(piece.text for piece in speakable.feed("km away ")) == " five kilometers away"
    assert (
        "".join(piece.text for piece in speakable.feed("March 15, 2024, was "))
        == " March fifteenth, twenty twenty-four, was"
    )


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("It is done.", True),
        ("It **is.**", True),
        ("Go to No. 5.", True),
        ("It is 5", False),
        ("```x\na.", False),
        ("", False),
    ],
)
def test_what_looks_like_the_end_of_a_sentence_may_be_spoken_at_once(text: str, complete: bool) -> None:
    speakable = SpeakableText()
    speakable.feed(text)
    assert speakable.looks_complete is complete


def test_a_text_goes_on_after_its_rest_was_taken() -> None:
    speakable = SpeakableText()
    taken = [*speakable.feed("It costs $5."), *speakable.rest(), *speakable.feed(" And $6."), *speakable.rest()]
    assert "".join(piece.text for piece in taken) == "It costs five dollars. And six dollars."
    assert speakable.rest() == []


def test_a_piece_knows_what_it_stands_for() -> None:
    text = "It is **$20** on [Mar 5](https://x.org), see:\n```\ncode\n```\nBye."
    places = [(piece.text.strip(), piece.written, text[piece.start : piece.end]) for piece in spoken_form(text)]
    assert ("twenty dollars", "$20", "**$20**") in places
    assert ("March fifth,", "Mar 5,", "[Mar 5](https://x.org),") in places
    assert ("Code left out.", "", "") in places
    assert ("Bye.", "Bye.", "Bye.") in places


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("**Hallo** [Welt](https://x.de/y), 3 km kosten 5 €!🎉", "Hallo Welt, 3 km kosten 5 €!"),
        ("1. Erstens\n2. Zweitens\n", "1. Erstens.\n2. Zweitens.\n"),
        ("Siehe https://www.example.de/a/b?c=d.", "Siehe example.de."),
        ("```python\nx\n```\nFertig.", "Fertig."),
        ("| Name | Alter |\n|---|---|\n| Anna | 30 |\n", "Anna: Alter 30.\n"),
        ("你好**世界**。请看[链接](https://x.com)。", "你好世界。请看链接。"),
        ("مرحبا **بالعالم**.", "مرحبا بالعالم."),
    ],
)
def test_of_other_languages_only_the_markup_is_changed(text: str, expected: str) -> None:
    assert said(text, "nl-NL") == expected


def test_a_word_without_end_is_cut() -> None:
    speakable = SpeakableText()
    assert sum(len(piece.text) for piece in speakable.feed("w" * 3 * MAX_WORD)) >= 2 * MAX_WORD


def test_a_row_that_is_too_long_is_read_as_text() -> None:
    assert said("| a | b " + "c " * MAX_ROW).startswith(", a, b c c")
    speakable = SpeakableText()
    assert speakable.feed("|" + " a" * (MAX_ROW // 4)) == []


def test_code_is_passed_over_however_it_goes_on() -> None:
    assert said("```\n" + "x " * 5000 + "\n``\n`````\nEnd.") == "Code left out.\nEnd."
    assert said("```py\nnever closed\n") == "Python code left out.\n"


def test_an_attribute_that_is_none_is_text() -> None:
    assert said("a <td class='x'>cell</td> b") == "a cell b"
    assert said("if x <a & y") == "if x and y"


def test_a_long_calculation_stays_as_it_is() -> None:
    assert said("2*3 " + "1*" * 100 + "1") == "two times three " + " times ".join(["one"] * 101)
    assert said("1*" * 200 + "1") == " × ".join(["1"] * 201)
