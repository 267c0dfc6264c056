"""The Talker's stage over a process of its own: what it hands on, how far ahead it works, and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from support.engine_answers import Answer, reading
from support.patience import PATIENCE_SEC, until
from support.step_models import FATAL_TOKEN, REFUSED_TOKEN

from omni_ws.engine import child
from omni_ws.engine.base import PartFailed
from omni_ws.engine.channel import Channel, Outputs, frames_link, pipeline
from omni_ws.engine.omni.step_process import (
    ROWS_LINK,
    AnswerEnd,
    AnswerRows,
    Codes,
    CodesEnd,
    OmniTalker,
    PromptReset,
    PromptRows,
    SpeechPart,
    StepProcess,
    TalkerItem,
    VocoderStage,
)
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: The Talker may be five seconds ahead.
AHEAD = 50


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def talker() -> AsyncIterator[StepProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "FIRST_BACKOFF_SEC", 0.01)
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        process = StepProcess("Talker", "support.step_models:row_talker", {"slots": 2})
        await process.start()
        yield process
        await process.stop()


def prompt(*tokens: int) -> PromptRows:
    count = len(tokens)
    states = np.zeros(count, np.bool_)
    return PromptRows(np.array(tokens), np.zeros((3, count), np.int64), states, np.zeros((0, 8), np.float32))


def rows(*tokens: int) -> AnswerRows:
    return AnswerRows(np.array(tokens, np.int64), np.zeros((0, 8), np.float32))


class Speech:
    """A stage that runs, between a source that the test writes and a sink that it reads."""

    def __init__(self, host: StepProcess, *items: TalkerItem, settings: dict[str, Any] | None = None) -> None:
        self.source: Channel[TalkerItem] = Channel(ROWS_LINK.capacity, cost=ROWS_LINK.cost)
        self.sink: Channel[Codes] = Channel(AHEAD, cost=lambda codes: len(codes.codes))
        self.stage = OmniTalker(host, settings or {}, frame_ms=100)
        for item in items:
            self.source.put_nowait(item)
        if items and isinstance(items[-1], AnswerEnd):
            self.source.close()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.stage.run(self.source, self.sink, Answer())
        finally:
            self.sink.close()

    async def next(self) -> Codes:
        """Return the next codes, without the first item, which has none."""
        codes = await anext(self.sink)
        return codes if len(codes.codes) or codes.end is not None else await self.next()

    async def frames(self) -> list[list[int]]:
        return [frame async for codes in self.sink for frame in codes.codes.tolist()]


async def idle(host: StepProcess) -> bool:
    occupation = await host.occupation()
    return (occupation.sessions, occupation.busy, host.open_sessions) == (0, False, 0)


async def test_rows_become_frames_and_are_counted(talker: StepProcess) -> None:
    speech = Speech(talker, prompt(9, 9), PromptReset(), prompt(1, 2), rows(5), rows(6, 7), AnswerEnd())
    assert await speech.frames() == [[5, 3], [6, 3], [7, 3]]
    await speech.task
    assert (speech.stage.prompt_tokens, speech.stage.tokens, speech.stage.cut) == (5, 3, False)
    assert await idle(talker)


async def test_the_first_frame_comes_while_the_answer_is_being_written(talker: StepProcess) -> None:
    speech = Speech(talker, prompt(1), rows(5))
    assert (await speech.next()).codes.tolist() == [[5, 1]]
    speech.source.put_nowait(rows(6))
    speech.source.close()  # without an AnswerEnd
    assert await speech.frames() == [[6, 1]]
    await speech.task


async def test_speech_that_ends_at_its_limit_leaves_the_text_to_its_writer(talker: StepProcess) -> None:
    """A stage that returns has those before it cancelled, which would cut the text."""
    speech = Speech(talker, prompt(1), rows(5, 6, 7), settings={"max_tokens": 2})
    assert [(await speech.next()).codes.tolist() for _ in range(2)] == [[[5, 1]], [[6, 1]]]
    last = await speech.next()
    assert (last.codes.tolist(), last.end) == ([], CodesEnd.LENGTH)
    await until(lambda: not talker.open_sessions)
    assert not speech.task.done()
    speech.source.put_nowait(rows(8))
    speech.source.close()
    await speech.task
    assert (speech.stage.tokens, speech.stage.cut) == (2, True)


@pytest.mark.parametrize("items", [(), (prompt(1, 2),), (prompt(1), AnswerEnd()), (prompt(1), rows(), AnswerEnd())])
async def test_a_turn_without_an_answer_makes_no_sound(talker: StepProcess, items: tuple[TalkerItem, ...]) -> None:
    speech = Speech(talker, *items)
    speech.source.close()
    assert await speech.frames() == []
    await speech.task
    assert await idle(talker)


async def test_who_is_still_speaking_has_no_slot(talker: StepProcess) -> None:
    """There are two slots. Three people speak, and two of them are answered."""
    speakers = [Speech(talker, prompt(9), PromptReset(), prompt(1)) for _ in range(3)]
    await until(lambda: all(speech.stage.prompt_tokens == 1 and not speech.source.queued for speech in speakers))
    assert await idle(talker)
    for speech in speakers[:2]:
        speech.source.put_nowait(rows(5))
        assert (await speech.next()).codes.tolist() == [[5, 1]]
    assert talker.open_sessions == 2
    for speech in speakers:
        speech.source.close()
        await speech.task
    assert await idle(talker)


async def test_without_a_slot_an_answer_goes_on_as_text(talker: StepProcess) -> None:
    speaking = [Speech(talker, prompt(1), rows(5)) for _ in range(2)]
    for speech in speaking:
        await speech.next()
    source: Channel[TalkerItem] = Channel(ROWS_LINK.capacity, cost=ROWS_LINK.cost)
    for item in (prompt(1), rows(5), rows(6)):
        source.put_nowait(item)
    source.close()
    answer = Answer()
    await SpeechPart(OmniTalker(talker, {}, frame_ms=100)).run(
        source, Channel(AHEAD, cost=lambda codes: 1), Outputs(answer)
    )
    assert not source.queued  # what follows is read, so that the text is not held up
    (told,) = answer.outputs
    assert isinstance(told, PartFailed)
    assert isinstance(told.error, EngineOverloaded)
    for speech in speaking:
        speech.source.close()
        await speech.frames()
        await speech.task


async def test_a_reader_that_does_not_read_stops_the_talker(talker: StepProcess) -> None:
    speech = Speech(talker, prompt(1), rows(*range(500)), AnswerEnd())
    await until(lambda: speech.sink.queued == AHEAD)
    await until(lambda: speech.stage.tokens > AHEAD)
    for _ in range(3):
        await talker.occupation()
    # What the channel holds, the one frame that waits for room in it, and what was granted and is on its way.
    made = talker._sessions[max(talker._sessions)].made.items
    assert speech.sink.queued == AHEAD
    assert speech.stage.tokens + made <= 2 * AHEAD
    assert len(await speech.frames()) == 500
    await speech.task


async def test_being_cancelled_frees_the_slot(talker: StepProcess) -> None:
    """Once the task has ended, the process knows of it before it is asked."""
    speech = Speech(talker, prompt(1), rows(*range(500)))
    await speech.next()
    speech.task.cancel()
    await asyncio.gather(speech.task, return_exceptions=True)
    assert await idle(talker)


async def test_an_answer_begins_only_with_a_slot_of_the_vocoder(talker: StepProcess) -> None:
    """One whose Talker has ended may still take the vocoder's. The text of the next would be half written by then."""
    process = StepProcess("vocoder", "support.step_models:level_vocoder", {"slots": 1})
    await process.start()
    source: Channel[TalkerItem] = Channel(ROWS_LINK.capacity, cost=ROWS_LINK.cost)
    source.put_nowait(prompt(1))
    source.put_nowait(rows(5))
    stages: list[Any] = [OmniTalker(talker, {}, frame_ms=100), VocoderStage(process)]
    async with process.open({}):
        async with reading(partial(pipeline, source, stages, [frames_link(10)])) as outputs:
            with pytest.raises(EngineOverloaded, match="all 1 sessions of the vocoder"):
                await asyncio.wait_for(anext(outputs), PATIENCE_SEC)
        assert await idle(talker)
    await process.stop()


async def test_what_the_talker_refuses_ends_the_request(talker: StepProcess) -> None:
    for settings, first in ({}, REFUSED_TOKEN), ({"refuse": "no voice"}, 1):
        speech = Speech(talker, prompt(first), rows(5), settings=settings)
        with pytest.raises(InvalidValue):
            await speech.task
    assert await idle(talker)


async def test_a_fault_in_reading_one_prompt_ends_one_answer(talker: StepProcess) -> None:
    other = Speech(talker, prompt(1), rows(5))
    await other.next()
    with pytest.raises(InvalidValue, match="cannot be read"):
        await Speech(talker, prompt(FATAL_TOKEN), rows(5)).task
    other.source.put_nowait(rows(6))
    other.source.close()
    assert await other.frames() == [[6, 1]]
    await other.task
    assert await idle(talker)


async def test_the_death_of_the_process_ends_the_request(talker: StepProcess) -> None:
    speech = Speech(talker, prompt(1), rows(5))
    await speech.next()
    assert talker.pid is not None
    os.kill(talker.pid, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="the Talker died"):
        await asyncio.wait_for(speech.task, PATIENCE_SEC)
    await until(lambda: talker.ready is not None)
