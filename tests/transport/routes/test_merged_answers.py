"""Merging of answers, over sessions whose messages the test provides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.parts_of_sessions import GivenAnswer, final, text

from omni_ws.core.chunks import FinalChunk, FinishReason, OutputChunk, Usage
from omni_ws.errors import EngineFailed
from omni_ws.transport.routes.sole_request import MergedAnswers, collect_answer, next_message

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]


async def test_choices_are_numbered_over_all_sessions_and_usage_is_summed() -> None:
    sessions = [GivenAnswer(), GivenAnswer()]
    sessions[0].put(text("a"), text("b", choice=1), final(FinishReason.STOP, FinishReason.LENGTH, tokens=1))
    sessions[1].put(text("c", choice=1), final(FinishReason.STOP, tokens=2))
    merged = MergedAnswers(sessions, choices=2)
    async with merged.receiving():
        outputs, last = await collect_answer(merged, lambda size: None)
    assert sorted((output.choice, output.text) for output in outputs) == [(0, "a"), (1, "b"), (3, "c")]
    assert last.finish_reasons == (FinishReason.STOP, FinishReason.LENGTH, FinishReason.STOP, FinishReason.STOP)
    assert (last.usage.input_tokens, last.usage.output_tokens) == (3, 30)


async def test_tokens_that_were_computed_before_are_summed() -> None:
    sessions = [GivenAnswer(), GivenAnswer(), GivenAnswer()]
    for session, cached in zip(sessions, (3, None, 4), strict=True):
        usage = Usage(input_tokens=5, cached_tokens=cached)
        session.put(replace(final(FinishReason.STOP), usage=usage))
    merged = MergedAnswers(sessions, choices=1)
    async with merged.receiving():
        _, last = await collect_answer(merged, lambda size: None)
    assert (last.usage.input_tokens, last.usage.cached_tokens) == (15, 7)


async def test_outputs_do_not_wait_for_another_session() -> None:
    sessions = [GivenAnswer(), GivenAnswer()]
    merged = MergedAnswers(sessions, choices=1)
    async with merged.receiving():
        sessions[1].put(text("b"))
        message = await next_message(merged)
        assert isinstance(message, OutputChunk)
        assert (message.choice, message.text) == (1, "b")
        assert not await merged.wait(idle_sec=5)
        merged.written()
    assert [session.writes for session in sessions] == [1, 1]


async def test_cancelled_final_is_passed_on_at_once() -> None:
    sessions = [GivenAnswer(), GivenAnswer()]
    merged = MergedAnswers(sessions, choices=1)
    async with merged.receiving():
        sessions[0].put(final(FinishReason.CANCELLED))
        message = await next_message(merged)
    assert isinstance(message, FinalChunk)
    assert message.finish_reason is FinishReason.CANCELLED


async def test_error_of_one_session_is_that_of_all() -> None:
    sessions = [GivenAnswer(), GivenAnswer()]
    merged = MergedAnswers(sessions, choices=1)
    async with merged.receiving():
        sessions[1].put(EngineFailed("no"))
        with pytest.raises(EngineFailed, match="no"):
            await next_message(merged)
