"""Answers that another server has begun: asked for again, compared, and written from where the client has them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.engine_answers import BOTH, TEXT, Answer, asking
from support.scripted_engines import CapableEngine, finished, said, tool_call

from omni_ws.core.chunks import FinishReason, OutputModality, ToolCall, Word
from omni_ws.engine.answer_limit import (
    ToldCalls,
    can_continue,
    go_on,
)
from omni_ws.engine.base import (
    AnswerOptions,
    AudioOutput,
    EngineOutput,
    Finished,
    StructuredOutput,
    TextOutput,
    ThoughtOutput,
    ToolCallOutput,
)
from omni_ws.errors import EngineFailed

pytestmark = pytest.mark.usefixtures("no_task_left")

REPLY = ("It is ", "noon", " in ", "Lisbon.")


async def forever() -> None:
    await asyncio.Event().wait()


async def rest(script: Iterable[Any], *, calls: ToldCalls | None = None, **fields: Any) -> list[EngineOutput]:
    """The outputs of an engine that cannot continue answers, of which the client has a part."""
    answer = Answer()
    await go_on(CapableEngine(script), asking("Where?", **fields), answer, calls=calls or {})
    return answer.outputs


def text_of(outputs: Iterable[EngineOutput]) -> list[str]:
    return [one.text for one in outputs if isinstance(one, TextOutput)]


@pytest.mark.parametrize("length", range(1, len("".join(REPLY)) + 1))
async def test_text_goes_on_behind_any_character(length: int) -> None:
    whole = "".join(REPLY)
    outputs = await rest([*map(said, REPLY), finished()], begun=whole[:length])
    assert "".join(text_of(outputs)) == whole[length:]
    assert outputs[-1] == finished()


async def test_a_token_that_is_cut_has_no_log_probability() -> None:
    outputs = await rest([said("It is", logprobs=True), said(" noon", logprobs=True)], begun="It")
    assert [(one.text, len(one.logprobs)) for one in outputs if isinstance(one, TextOutput)] == [
        (" is", 0),
        (" noon", 1),
    ]


@pytest.mark.parametrize(
    "script",
    [
        [said("It is "), said("midnight"), forever],
        [said("It is "), finished()],
        [finished()],
        [said("It is "), said("noo"), said("k"), forever],
        [*tool_call("find", "{}"), finished(FinishReason.TOOL_CALLS)],
    ],
    ids=["another", "shorter", "nothing", "within a word", "a call"],
)
async def test_another_answer_ends_it_with_an_error_and_the_engine_at_once(script: list[Any]) -> None:
    answer = Answer()
    with pytest.raises(EngineFailed, match="cannot be continued: asked again, the model answers otherwise") as failed:
        await go_on(CapableEngine(script), asking("Where?", begun="It is noon"), answer)
    assert (failed.value.keeps_answer, failed.value.fatal) == (True, False)
    assert answer.outputs == []


async def test_what_the_model_thinks_is_not_told_again() -> None:
    script = [ThoughtOutput("hm"), said("It is "), ThoughtOutput("ah"), said("noon")]
    assert text_of(await rest(script, begun="It ")) == ["is ", "noon"]
    assert [type(one) for one in await rest(script, begun="It ")] == [TextOutput, TextOutput, Finished]


HALF = {0: ToolCall("call_told", "find", '{"what"')}


async def test_a_call_goes_on_with_its_id_and_the_rest_of_its_arguments() -> None:
    script = [*tool_call("find", '{"wh', 'at": ', "1}"), *tool_call("play", "{}", index=1), finished()]
    outputs = await rest(script, calls=HALF)
    calls = [one.call for one in outputs if isinstance(one, ToolCallOutput)]
    assert [(one.index, one.id, one.name, one.arguments) for one in calls] == [
        *((0, None, None, ": "), (0, None, None, "1}")),
        *((1, "call_play_1", "play", ""), (1, None, None, "{}")),
    ]


@pytest.mark.parametrize(
    "script",
    [
        [*tool_call("play", '{"what"'), forever],
        [*tool_call("find", '{"who"'), forever],
        [*tool_call("find", "{}"), forever],
        [said("No."), finished()],
    ],
    ids=["name", "arguments", "shorter", "none"],
)
@pytest.mark.parametrize("whole", [False, True])
async def test_other_calls_end_the_answer(script: list[Any], whole: bool) -> None:
    """With those that were told, if these are whole: a client can answer them."""
    told = {0: ToolCall("call_told", "find", '{"what": 1}')} if whole else HALF
    if not whole:
        with pytest.raises(EngineFailed, match="cannot be continued"):
            await rest(script, calls=told)
        return
    outputs = await rest(script, calls=told)
    assert isinstance(outputs[-1], Finished)
    assert outputs[-1].reason is FinishReason.TOOL_CALLS
    assert not any(isinstance(one, ToolCallOutput) for one in outputs)


async def test_audio_up_to_the_place_of_the_voice_is_dropped() -> None:
    ramp = np.arange(100, dtype=np.float32)
    words = (Word("It", 0, 40, 2), Word("is", 50, 90, 5))
    script = [said("It is noon"), AudioOutput(ramp, 1000, words), AudioOutput(ramp, 1000, (), 9), finished()]
    outputs = await rest(script, begun="It is noon", voice_from=2, voice_from_ms=45.0, modalities=BOTH)
    first, second = (one for one in outputs if isinstance(one, AudioOutput))
    assert first.samples.tolist() == ramp[45:].tolist()
    assert first.words == (Word("is", 5, 45, 5),)
    assert (second.samples.tolist(), second.text_end) == (ramp.tolist(), 9)


@pytest.mark.parametrize("vary_ms", [-15, 0, 15])
async def test_words_are_dropped_with_their_audio_although_their_places_vary(vary_ms: int) -> None:
    words = tuple(
        Word(text, start + vary_ms, end + vary_ms, text_end)
        for text, start, end, text_end in (("It", 20, 60, 2), ("is", 60, 100, 5), ("noon", 100, 180, 10))
    )
    script = [said("It is noon"), AudioOutput(np.zeros(200, np.float32), 1000, words), finished()]
    outputs = await rest(script, begun="It is noon", voice_from=2, voice_from_ms=60.0, modalities=BOTH)
    told = [word.text for one in outputs if isinstance(one, AudioOutput) for word in one.words]
    assert told == ["is", "noon"]


async def test_an_engine_that_continues_is_asked_once_and_its_outputs_pass() -> None:
    engine = CapableEngine([said(" Lisbon.")], continues=TEXT)
    answer = Answer()
    await go_on(engine, asking("Where?", begun="It is noon in"), answer)
    assert text_of(answer.outputs) == [" Lisbon."]
    assert [one.begun for one in engine.requests] == ["It is noon in"]


@pytest.mark.parametrize(
    ("able", "fields"),
    [
        (TEXT, {"modalities": BOTH}),
        (BOTH, {"options": AnswerOptions(structure=StructuredOutput())}),
        (BOTH, {"options": AnswerOptions(choices=2)}),
        (BOTH, {"options": AnswerOptions(raw_prompt=True)}),
        (BOTH, {"tool_choice": "required"}),
        (frozenset(), {}),
    ],
    ids=["voice", "form", "choices", "raw", "a call", "cannot"],
)
def test_what_is_asked_for_again(able: frozenset[OutputModality], fields: dict[str, Any]) -> None:
    assert not can_continue(CapableEngine(continues=able), asking("Where?", begun="It", **fields))
    assert can_continue(CapableEngine(continues=BOTH), asking("Where?", begun="It", tool_choice="auto"))
