"""Merging of answers, over sessions whose messages the test provides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from omni_ws.core.chunks import FinishReason, OutputModality, Usage
from omni_ws.core.output import FinalChunk, OutputChunk
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.transport.routes.merged_answers import MergedAnswers
from omni_ws.transport.routes.response_stream import collect_answer, next_message

pytestmark = [pytest.mark.virtual_clock, pytest.mark.usefixtures("no_task_left")]


class GivenAnswer:
    """An AnswerSource of the messages that were put into it."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[ServerMessage | OmniError] = asyncio.Queue()
        self._arrived: list[ServerMessage | OmniError] = []
        self.writes = 0

    def put(self, *messages: ServerMessage | OmniError) -> None:
        for message in messages:
            self._messages.put_nowait(message)

    def take(self) -> ServerMessage | None:
        if not self._arrived:
            return None
        message = self._arrived.pop(0)
        if isinstance(message, OmniError):
            raise message
        return message

    async def wait(self, *, idle_sec: float | None = None, meanwhile: Callable[[], bool] | None = None) -> bool:
        self._arrived.append(await self._messages.get())
        return True

    def written(self) -> None:
        self.writes += 1


def text(content: str, *, choice: int = 0) -> OutputChunk:
    return OutputChunk(request_id="r", sequence_id=0, modality=OutputModality.TEXT, text=content, choice=choice)


def final(*reasons: FinishReason, tokens: int = 1) -> FinalChunk:
    return FinalChunk(
        request_id="r",
        sequence_id=0,
        finish_reason=reasons[0],
        usage=Usage(input_tokens=tokens, output_tokens=10 * tokens),
        finish_reasons=reasons,
    )


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
