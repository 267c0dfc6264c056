"""What a user says is kept word for word if somebody must still know it hours later."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from omni_ws.core.history import HistoryItems, Message
from omni_ws.core.quota import ByteBudget
from omni_ws.service.conversation.summing import (
    MAX_WEIGHED,
    Sizes,
    asks,
    is_readable,
    lightened,
    may_select,
    remarks,
    says,
    selected,
    sentences_of,
    weight,
)

TALKS = tomllib.loads((Path(__file__).parents[2] / "data" / "worth_keeping.toml").read_text("utf-8"))


def notes_on(*messages: str) -> str:
    """Notes on messages of the user and the assistant in turn."""
    history = HistoryItems(4000, ByteBudget(1 << 20))
    history.add(Message("assistant" if number % 2 else "user", text) for number, text in enumerate(messages))
    return selected(history.items)


@pytest.mark.parametrize(
    ("talk", "kept", "needless"),
    [("first", (20, 20), (0, 40)), ("further", (20, 20), (3, 36)), ("others", (9, 9), (0, 11))],
)
def test_facts_are_kept_and_the_rest_is_not(talk: str, kept: tuple[int, int], needless: tuple[int, int]) -> None:
    noted = [(one.get("keep"), notes_on(one["say"]).partition("Topics:")[0]) for one in TALKS[talk]]
    facts = [re.search(keep, notes) is not None for keep, notes in noted if keep]
    assert (sum(facts), len(facts)) == kept
    rest = [bool(notes) for keep, notes in noted if not keep]
    assert (sum(rest), len(rest)) == needless


def test_notes_are_quotations_and_topics() -> None:
    notes = notes_on(
        'Oh, hello. My dog is called "Rex".\nHow old do dogs get?',
        "Some get very old. What is your favourite colour?",
        "Blue.",
        "How nice. Would you like to hear more?",
        "Yes.",
        "Well, there is a lot to say.",
        "Tell me about bees; and wasps.",
    )
    assert notes.splitlines() == [
        "- \"My dog is called 'Rex'.\"",
        '- asked "What is your favourite colour?": "Blue."',
        "Topics: How old do dogs get; Tell me about bees, and wasps",
    ]
    assert notes_on("What is tea?", "A drink.", "I see.") == "Topics: What is tea"
    assert notes_on("Okay.") == ""
    assert notes_on("Topic: my sister comes on Friday.", "Oh.", "What is tea?").splitlines() == [
        '- "Topic: my sister comes on Friday."',
        "Topics: What is tea",
    ]


def test_a_long_sentence_is_trimmed_and_a_fact_that_is_said_twice_is_kept_once() -> None:
    assert notes_on(f"My dog {'x ' * 100}") == f'- "My dog {"x " * 46}…"'
    assert notes_on("My dog is old.", "Oh.", "My dog is old.") == '- "My dog is old."'


def test_so_many_sentences_of_a_message_are_weighed() -> None:
    for before, noted in ((MAX_WEIGHED - 1, '- "My dog is old."'), (MAX_WEIGHED, "")):
        assert notes_on(f"{'Okay. ' * before}My dog is old.") == noted


def test_sentences_end_with_their_marks_but_not_with_titles() -> None:
    assert [*sentences_of("Hi! I saw Dr. Osei and J. Smith. ok? Yes")] == [
        "Hi!",
        "I saw Dr. Osei and J. Smith.",
        "ok?",
        "Yes",
    ]
    assert [*sentences_of("你好。我叫安娜。")] == ["你好。", "我叫安娜。"]


def test_a_sentence_is_weighed_without_what_it_begins_with() -> None:
    assert says("Oh, well, okay, I live here.") == "I live here."
    assert says("Okay.") == ""
    assert remarks("Oh, that's nice.")
    assert asks("Well, tell me more")
    assert weight("What has changed in our winters in 2 years?") < weight("We have 2 dogs, is that too much?")
    assert weight("My sister Marta comes on Friday at nine.") > weight("I like it here.") > weight("It is nice.")


@pytest.mark.parametrize(
    ("text", "language", "readable"),
    [
        ("I live here.", None, True),
        ("Ich wohne in Lübeck.", "de", True),
        ("Ik woon hier.", "nl", False),
        ("Я живу в Осло.", None, False),
        ("Ada wohnt 東京", None, True),
        ("42", None, True),
    ],
)
def test_rules_read_the_languages_that_they_know(text: str, language: str | None, readable: bool) -> None:
    assert is_readable(Message("user", text, language=language)) is readable
    history = HistoryItems(4000, ByteBudget(1 << 20))
    history.add([Message("user", text, language=language), Message("assistant", "Да.")])
    assert may_select(history.items) is readable


def test_the_lines_of_least_weight_go_first_and_of_these_the_oldest() -> None:
    size = Sizes(room=400, longest=200, kept=100, notes=18)
    heavy, one, two = '- "My sister Marta comes on Friday."', '- "I have 1 tree."', '- "I have 2 trees."'
    topics = "Topics: bees and wasps and flies; tea"
    assert lightened("\n".join([heavy, one, two]), size) == "\n".join([heavy, one, two]), "at the limit"
    assert lightened("\n".join([heavy, one, two, topics]), size) == "\n".join([heavy, two, "Topics: tea"])


@pytest.mark.parametrize(
    ("talk", "notes"),
    [(("Oh?",), ""), (("Hm?", "It is.", "What is the capital of France?"), "Topics: What is the capital of France")],
)
def test_a_question_without_words_is_no_topic(talk: tuple[str, ...], notes: str) -> None:
    assert notes_on(*talk) == notes
