"""Stages connected by bounded channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.engine_answers import Answer, reading

from omni_ws.engine.base import OutputWriter, TextOutput
from omni_ws.engine.channel import Channel, Stage, StageLink, pipeline

pytestmark = pytest.mark.usefixtures("no_task_left")


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Passing:
    """Passes every item on; the last stage sends it to the client."""

    def __init__(self, name: str, *, fail_at: int | None = None, stop_at: int | None = None) -> None:
        self.name = name
        self.seen: list[int] = []
        self.ended = False
        self._fail_at = fail_at
        self._stop_at = stop_at

    async def run(self, source: AsyncIterator[int], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        try:
            async for number in source:
                if number == self._fail_at:
                    raise ValueError(f"{self.name} failed")
                if number == self._stop_at:
                    return
                self.seen.append(number)
                if sink is None:
                    outputs.write(TextOutput(str(number)))
                    await outputs.drain()
                else:
                    await sink.put(number)
        finally:
            self.ended = True


class Stuck:
    """Never reads."""

    name = "stuck"

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.ended = False

    async def run(self, source: AsyncIterator[int], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        self.started.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.ended = True


def one_each(capacity: float = 2) -> StageLink:
    return StageLink(capacity, cost=lambda item: 1)


class Slow(Stuck):
    """Takes several passes of the event loop to clean up when cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.wound_up = False

    async def run(self, source: AsyncIterator[int], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        try:
            await super().run(source, sink, outputs)
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.wound_up = True


class Filling:
    """Produces one item without reading, and waits forever."""

    name = "filling"

    def __init__(self, after: asyncio.Event) -> None:
        self._after = after

    async def run(self, source: AsyncIterator[int], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        assert sink is not None
        await self._after.wait()
        await sink.put(0)
        await asyncio.get_running_loop().create_future()


async def texts(stages: Sequence[Stage[Any]], count: int, capacity: float = 2) -> list[str]:
    links = [one_each(capacity)] * (len(stages) - 1)
    async with reading(partial(pipeline, numbers(count), stages, links)) as outputs:
        return [output.text async for output in outputs if isinstance(output, TextOutput)]


async def test_everything_flows_in_order_to_the_end() -> None:
    stages = [Passing("a"), Passing("b"), Passing("c")]
    assert await texts(stages, 50) == [str(number) for number in range(50)]
    assert all(stage.ended for stage in stages)


async def test_one_stage_needs_no_link() -> None:
    assert await texts([Passing("a")], 3) == ["0", "1", "2"]


async def test_links_must_fit_the_stages() -> None:
    with pytest.raises(ValueError, match="one link"):
        await pipeline(numbers(1), [Passing("a")], [one_each()], Answer())


async def test_a_full_link_holds_the_stage_before_it() -> None:
    first, stuck = Passing("first"), Stuck()
    async with reading(partial(pipeline, numbers(1000), [first, stuck], [one_each(3)])):
        await stuck.started.wait()
        for _ in range(100):  # passes of the loop, far more than needed
            await asyncio.sleep(0)
        assert len(first.seen) == 4  # three in the link, one being processed
    assert first.ended
    assert stuck.ended


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_an_error_comes_after_what_came_before_it_and_ends_all_stages(failing: int) -> None:
    stages = [Passing(str(index), fail_at=5 if index == failing else None) for index in range(3)]
    seen: list[str] = []

    async def read() -> None:
        async with reading(partial(pipeline, numbers(1000), stages, [one_each()] * 2)) as outputs:
            async for output in outputs:
                assert isinstance(output, TextOutput)
                seen.append(output.text)

    with pytest.raises(ValueError, match=f"{failing} failed"):
        await read()
    assert seen == [str(number) for number in range(len(seen))]
    assert len(seen) <= 5
    assert all(stage.ended for stage in stages)


async def test_a_stage_that_has_enough_ends_those_before_it() -> None:
    stages = [Passing("a"), Passing("b", stop_at=3), Passing("c")]
    assert await texts(stages, 1000) == ["0", "1", "2"]
    assert stages[0].ended


@pytest.mark.parametrize("taken", [0, 1, 7])
async def test_leaving_early_ends_all_stages(taken: int) -> None:
    stages = [Passing("a"), Passing("b")]
    async with reading(partial(pipeline, numbers(1000), stages, [one_each()])) as outputs:
        for _ in range(taken):
            await anext(outputs)
    assert all(stage.ended or not stage.seen for stage in stages)


@pytest.mark.parametrize("by", ["leaving", "failing", "ending"])
async def test_a_stage_winds_up_undisturbed(by: str) -> None:
    """A second cancellation would interrupt the release of a connection or a request."""
    slow = Slow()
    lasts: dict[str, Stage[Any]] = {
        "leaving": Stuck(),
        "failing": Passing("last", fail_at=0),
        "ending": Passing("last", stop_at=0),
    }
    links = [one_each(), one_each()]
    async with reading(partial(pipeline, numbers(9), [slow, Filling(slow.started), lasts[by]], links)) as outputs:
        await slow.started.wait()
        if by == "failing":
            with pytest.raises(ValueError, match="failed"):
                await anext(outputs)
        if by == "ending":
            assert [output async for output in outputs] == []
    assert slow.wound_up
