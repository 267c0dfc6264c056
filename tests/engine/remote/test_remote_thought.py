"""What models think before they answer: it is not the answer, wherever it is cut."""

from __future__ import annotations

import time
from typing import Any

import orjson
import pytest

from omni_ws.engine.base import TextOutput, ThoughtOutput
from omni_ws.engine.remote.answer_stream import ChatAnswer, ThoughtFilter
from omni_ws.engine.remote.event_stream import ServerSentEvent


def filtered(*pieces: str) -> tuple[str, str]:
    thoughts = ThoughtFilter()
    parts = [*map(thoughts.feed, pieces), thoughts.finish()]
    return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)


CASES = [
    ("<think>hm</think>\n\nYes.", "hm", "Yes."),
    ("\n <think>\nhm\n</think> Yes.", "\nhm\n", "Yes."),
    ("<think>\n\n</think>\n\nYes.", "\n\n", "Yes."),
    ("<think>a < b </thin or </b> so</think>Yes.", "a < b </thin or </b> so", "Yes."),
    ("<think>it never ends", "it never ends", ""),
    ("<think>it never ends </thi", "it never ends </thi", ""),
    ("<think>hm</think>", "hm", ""),
    ("Yes.", "", "Yes."),
    (" Yes.", "", " Yes."),
    ("<thinner> than that", "", "<thinner> than that"),
    ("<thi", "", "<thi"),
    ("  ", "", "  "),
    ("", "", ""),
    ("Write <think>hm</think>.", "", "Write <think>hm</think>."),
    ("<think>hm</think>Yes. <think>is a tag</think>", "hm", "Yes. <think>is a tag</think>"),
    (" " * 200 + "<think>", "", " " * 200 + "<think>"),
]


@pytest.mark.parametrize(("text", "thought", "answer"), CASES)
def test_a_thought_is_taken_out(text: str, thought: str, answer: str) -> None:
    assert filtered(text) == (thought, answer)


@pytest.mark.parametrize(("text", "thought", "answer"), CASES)
def test_the_result_does_not_depend_on_the_pieces(text: str, thought: str, answer: str) -> None:
    for size in (1, 2, 3, 5, 7):
        assert filtered(*(text[place : place + size] for place in range(0, len(text), size))) == (thought, answer)


def test_long_thoughts_take_linear_time() -> None:
    def seconds(pieces: int) -> float:
        thoughts = ThoughtFilter()
        thoughts.feed("<think>")
        began = time.process_time()
        for _ in range(pieces):
            thoughts.feed("<<<<</th" * 8)
        return time.process_time() - began

    assert seconds(40_000) < 40 * max(seconds(4_000), 0.001)


def read(answer: ChatAnswer, *deltas: dict[str, Any]) -> list[object]:
    events = [orjson.dumps({"choices": [{"index": 0, "delta": one}]}) for one in deltas]
    return [output for data in [*events, b"[DONE]"] for output in answer.read(ServerSentEvent("message", data))]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_thoughts_in_fields_of_their_own(field: str) -> None:
    answer = ChatAnswer(sample_rate=24_000)
    assert read(answer, {"content": "", field: "hm"}, {"content": "Yes."}) == [ThoughtOutput("hm"), TextOutput("Yes.")]


def test_thoughts_in_the_text() -> None:
    answer = ChatAnswer(sample_rate=24_000)
    deltas = [{"content": piece} for piece in ("<th", "ink>h", "m</thi", "nk>", "\n\n", "Yes", ".")]
    assert read(answer, *deltas) == [ThoughtOutput("h"), ThoughtOutput("m"), TextOutput("Yes"), TextOutput(".")]


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = ChatAnswer(sample_rate=24_000)
    assert read(answer, {"content": "<thi"}) == [TextOutput("<thi")]
    answer = ChatAnswer(sample_rate=24_000)
    assert read(answer, {"content": "<think>hm</"}) == [ThoughtOutput("hm"), ThoughtOutput("</")]


def test_a_thought_shows_that_the_model_works() -> None:
    worked: list[dict[str, Any]] = [{"reasoning": "hm"}, {"content": "<think>hm"}, {"content": "x"}]
    for delta in worked:
        answer = ChatAnswer(sample_rate=24_000)
        assert not answer.begun
        read(answer, delta)
        assert answer.begun
    answer = ChatAnswer(sample_rate=24_000)
    answer.read(ServerSentEvent("message", b'{"choices":[{"delta":{"role":"assistant","content":""}}]}'))
    assert not answer.begun
