"""What a listener says who wants the speaker to go on."""

from __future__ import annotations

import pytest

from omni_ws.service.conversation.mere_acknowledgements import MOST_WORDS, asks, is_acknowledgement


@pytest.mark.parametrize(
    "text",
    [
        "Yeah.",
        "Okay",
        "Right,",
        " I see.",
        "Uh-huh.",
        "Mm-hm",
        "Mm-hmm.",
        "Mhm.",
        "OK, yeah, right.",
        "That’s right.",
        "O.K.",
    ],
)
def test_it_is_known_however_recognisers_write_it(text: str) -> None:
    assert is_acknowledgement(text)


@pytest.mark.parametrize(
    "text", ["", " ", "?!", "No", "Stop", "Yeah, stop", "Right now", "Okay what time is it", "I see you", "Wait", "See"]
)
def test_what_is_more_or_other_is_none(text: str) -> None:
    assert not is_acknowledgement(text)


@pytest.mark.parametrize("past", [False, True])
def test_so_many_words_and_one_more(past: bool) -> None:
    assert is_acknowledgement("yeah " * (MOST_WORDS + past)) is not past


TEXT = "It rained. Shall I go on? The table is for two"


@pytest.mark.parametrize(
    ("heard", "asked"),
    [
        ("", False),
        ("It rained.", False),
        ("It rained. Shall I", False),
        ("It rained. Shall I go", True),
        ("It rained. Shall I go on?", True),
        ("It rained. Shall I go on? The table", True),  # the listener's answer takes a moment
        ("It rained. Shall I go on? The table is", False),
        (TEXT, False),
    ],
)
def test_the_last_sentence_that_was_heard_asks(heard: str, asked: bool) -> None:
    assert asks(TEXT, len(heard)) is asked


def test_a_question_of_two_words_asks_when_it_is_over() -> None:
    assert asks("Fine. Go on?", len("Fine. Go on?"))
    assert asks("Go on?", len("Go"))
