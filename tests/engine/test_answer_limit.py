"""Where an answer is cut off does not depend on its pieces, and finding out takes linear time."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import FinishReason
from omni_ws.engine.answer_limit import MAX_HELD_SPACE, AnswerText, WordCounter, count_words


def run(text: str, sampling: dict[str, Any], cuts: list[int] | None = None) -> tuple[str, FinishReason | None]:
    limit = AnswerText(sampling)
    borders = [0, *sorted(cuts or []), len(text)]
    passed = "".join(limit.feed(text[start:end]) for start, end in itertools.pairwise(borders))
    passed += limit.finish()
    return passed, limit.reached


@pytest.mark.parametrize(
    ("text", "sampling", "passed", "reached"),
    [
        ("one two three", {}, "one two three", None),
        ("one two three", {"max_tokens": 3}, "one two three", None),
        ("one two three ", {"max_tokens": 3}, "one two three ", None),
        ("one two three", {"max_tokens": 2}, "one two", FinishReason.LENGTH),
        ("  one\n two", {"max_tokens": 1}, "  one", FinishReason.LENGTH),
        ("one two", {"stop": "two"}, "one ", FinishReason.STOP),
        ("one two", {"stop": ["two", "one"]}, "", FinishReason.STOP),
        ("one two", {"stop": ""}, "one two", None),
        ("one two", {"stop": [""]}, "one two", None),
        ("aab", {"stop": "ab"}, "a", FinishReason.STOP),
        ("ababac", {"stop": "abac"}, "ab", FinishReason.STOP),
        ("aaba", {"stop": ["aaba", "ab"]}, "a", FinishReason.STOP),
        ("almost sto", {"stop": "stop"}, "almost sto", None),
        ("one two stop", {"stop": "stop", "max_tokens": 1}, "one", FinishReason.LENGTH),
        ("one stop two", {"stop": "stop", "max_tokens": 1}, "one ", FinishReason.STOP),
        ("one two", {"stop": "two", "max_tokens": 1}, "one ", FinishReason.STOP),
        ("", {"stop": "x", "max_tokens": 1}, "", None),
    ],
)
def test_limits(text: str, sampling: dict[str, Any], passed: str, reached: FinishReason | None) -> None:
    assert run(text, sampling) == (passed, reached)
    assert run(text, sampling, list(range(1, len(text)))) == (passed, reached)


@given(
    st.text(alphabet="ab \n", max_size=30),
    st.fixed_dictionaries({}, optional={"max_tokens": st.integers(1, 5), "stop": st.lists(st.text("ab ", max_size=4))}),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_borders_of_pieces_mean_nothing(text: str, sampling: dict[str, Any], cuts: list[int]) -> None:
    assert run(text, sampling, [min(cut, len(text)) for cut in cuts]) == run(text, sampling)


@given(st.text(alphabet="ab \n", max_size=30), st.lists(st.integers(0, 30), max_size=6))
def test_words_are_counted_across_pieces(text: str, cuts: list[int]) -> None:
    counter = WordCounter()
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for start, end in itertools.pairwise(borders):
        counter.feed(text[start:end])
    assert counter.words == count_words(text)


def test_nothing_passes_after_the_limit() -> None:
    limit = AnswerText({"max_tokens": 1})
    assert limit.feed("one two") == "one"
    assert limit.feed(" three") == ""
    assert limit.finish() == ""


def test_space_takes_linear_time_and_bounded_memory() -> None:
    limit = AnswerText({"max_tokens": 1})
    begin = time.thread_time()
    assert limit.feed("word" + " " * 1_000_000) == "word"
    for _ in range(10_000):
        assert limit.feed(" " * 100) == ""
    assert limit.finish() == " " * MAX_HELD_SPACE
    assert time.thread_time() - begin < 1
