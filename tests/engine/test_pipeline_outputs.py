"""Outputs of several stages, which reach the client in the order in which they are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine_answers import Answer
from support.patience import PATIENCE_SEC

from omni_ws.engine.base import AudioOutput, EngineOutput, OutputWriter, TextOutput
from omni_ws.engine.channel import OUTPUT_BYTES, Channel, StageLink, pipeline

pytestmark = pytest.mark.usefixtures("no_task_left")

#: Two of these fill the channel of the outputs.
LARGE = OUTPUT_BYTES // 4 // 2


@dataclass(frozen=True)
class Script:
    """What happens to one item in one stage: passes of the event loop before it, and the outputs that it makes."""

    passes: int
    outputs: int
    large: bool
    waits: bool


class Client(Answer):
    """Takes outputs; ``passes`` are those of the event loop that each wait for it takes."""

    def __init__(self, passes: Sequence[int] = ()) -> None:
        super().__init__()
        self._passes = iter(passes)

    async def drain(self) -> None:
        for _ in range(next(self._passes, 0)):
            await asyncio.sleep(0)


class Making:
    """Makes outputs for each item of its source, as its script says, and passes the item on."""

    def __init__(self, name: str, script: Sequence[Script], made: list[EngineOutput]) -> None:
        self.name = name
        self._script = script
        self._made = made
        self._numbers = count()

    async def run(self, source: AsyncIterator[int], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        async for number in source:
            step = self._script[number % len(self._script)]
            for _ in range(step.passes):
                await asyncio.sleep(0)
            for _ in range(step.outputs):
                output = self._output(large=step.large)
                outputs.write(output)
                self._made.append(output)
                if step.waits:
                    await outputs.drain()
            if sink is not None:
                await sink.put(number)

    def _output(self, *, large: bool) -> EngineOutput:
        if large:
            return AudioOutput(np.full(LARGE, next(self._numbers), np.float32), 16_000)
        return TextOutput(f"{self.name} {next(self._numbers)}")


async def run(client: Client, scripts: Sequence[Sequence[Script]], items: int) -> list[EngineOutput]:
    """Run the stages to their end; return what they made, in that order."""
    made: list[EngineOutput] = []

    async def source() -> AsyncIterator[int]:
        for number in range(items):
            yield number

    stages = [Making(str(index), script, made) for index, script in enumerate(scripts)]
    links = [StageLink(2, cost=lambda item: 1)] * (len(stages) - 1)
    async with asyncio.timeout(PATIENCE_SEC):
        await pipeline(source(), stages, links, client)
    return made


SCRIPTS = st.lists(
    st.builds(Script, passes=st.integers(0, 3), outputs=st.integers(0, 4), large=st.booleans(), waits=st.booleans()),
    min_size=1,
    max_size=4,
)
BUSY = Script(passes=0, outputs=4, large=True, waits=True)


@given(st.lists(SCRIPTS, min_size=1, max_size=3), st.integers(0, 6), st.lists(st.integers(0, 5), max_size=30))
@example([[BUSY], [BUSY], [BUSY]], 6, [5] * 40)
async def test_outputs_are_sent_in_the_order_in_which_they_were_made(
    scripts: list[list[Script]], items: int, passes: list[int]
) -> None:
    client = Client(passes)
    made = await run(client, scripts, items)
    # Compared by identity: each is sent once.
    assert [id(output) for output in client.outputs] == [id(output) for output in made]


async def test_nothing_is_written_to_a_client_that_has_gone() -> None:
    client = Client()
    ended = asyncio.Event()

    class Late:
        name = "late"

        async def run(self, source: AsyncIterator[Any], sink: Any, outputs: OutputWriter) -> None:
            try:
                async for _ in source:
                    await asyncio.get_running_loop().create_future()
            finally:
                ended.set()
                outputs.write(TextOutput("after the end"))

    async def source() -> AsyncIterator[int]:
        yield 0

    answering = asyncio.create_task(pipeline(source(), [Late()], [], client))
    for _ in range(5):
        await asyncio.sleep(0)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)
    assert ended.is_set()
    assert client.outputs == []


async def test_a_writer_that_fails_ends_the_answer_with_its_error() -> None:
    class Broken(Client):
        def write(self, output: EngineOutput) -> None:
            raise ValueError("broken")

    steps = [Making("a", [Script(passes=1, outputs=1, large=False, waits=False)], [])]

    async def source() -> AsyncIterator[int]:
        yield 0

    with pytest.raises(ValueError, match="broken"):
        await pipeline(source(), steps, [], Broken())
