"""Events of the stages and links of a pipeline, and of generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.engine_answers import reading
from support.recordings import event_lines

from omni_ws.engine.base import OutputWriter, TextOutput
from omni_ws.engine.channel import Channel, StageLink, pipeline
from omni_ws.profiler import events
from omni_ws.profiler.events import EventRecorder
from omni_ws.profiler.report import read, timelines


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[EventRecorder]:
    events.recorder = EventRecorder("run", tmp_path)
    yield events.recorder
    events.recorder.close()
    events.recorder = None


class Passing:
    def __init__(self, name: str) -> None:
        self.name = name

    async def run(self, source: AsyncIterator[Any], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        async for item in events.generated(self.name, aiter(source)):
            if sink is None:
                outputs.write(TextOutput(item))
            else:
                await sink.put(item)


async def words() -> AsyncIterator[str]:
    for word in ("a", "b", "c"):
        await asyncio.sleep(0)
        yield word


async def test_stages_and_links_tell_what_they_do(recorder: EventRecorder) -> None:
    events.current_request.set("req_1")
    stages = [Passing("thinker"), Passing("talker")]
    async with reading(partial(pipeline, words(), stages, [StageLink(2, len)])) as outputs:
        assert [output.text async for output in outputs if isinstance(output, TextOutput)] == ["a", "b", "c"]
    recorder.close()
    (one,) = timelines(read(recorder.paths).events).values()
    assert [(hop.source, hop.target) for hop in one.hops] == [("thinker", "talker")] * 3
    for stage in ("thinker", "talker"):
        named = {interval.name: interval.explains for interval in one.intervals if interval.stage == stage}
        assert named["stage_input_received->stage_complete"] is False
        assert named["scheduler_queue_enter->generation_end"] is True
        assert named["scheduler_queue_enter->scheduler_first_emit"] is True


async def test_a_stage_that_is_cancelled_ends_too(recorder: EventRecorder) -> None:
    events.current_request.set("req_1")
    async with reading(
        partial(pipeline, words(), [Passing("thinker"), Passing("talker")], [StageLink(1, len)])
    ) as outputs:
        await anext(outputs)
    names = [line["event_name"] for line in event_lines(recorder)]
    assert names.count("stage_complete") == 2
