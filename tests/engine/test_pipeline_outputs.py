"""Outputs of several stages that reach the client in two ways: handed to its sink, and through the iterator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.engine_answers import reading

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


class Client:
    """Sends outputs one by one, as its server does.

    ``passes`` are those of the event loop that each yielded output takes to be sent, ``refusals`` those of offers.
    """

    def __init__(self, passes: Sequence[int] = (), refusals: Sequence[bool] = ()) -> None:
        self.sent: list[EngineOutput] = []
        self.offered = 0
        self.busy = False
        self._passes = iter(passes)
        self._refusals = iter(refusals)

    def offer(self, output: EngineOutput) -> bool:
        assert not self.busy, "an output was offered before the one that was yielded has been sent"
        if next(self._refusals, False):
            return False
        self.offered += 1
        self.sent.append(output)
        return True

    async def read(self, outputs: AsyncIterator[EngineOutput]) -> None:
        async for output in outputs:
            self.busy = True
            for _ in range(next(self._passes, 0)):
                await asyncio.sleep(0)
            self.sent.append(output)
            self.busy = False


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
                if step.waits:
                    outputs.write(output)
                    await outputs.drain()
                else:
                    await outputs.room()
                    outputs.put_nowait(output)
                self._made.append(output)
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
    async with asyncio.timeout(100), pipeline(source(), stages, links, sink=client) as outputs:
        await client.read(outputs)
    return made


SCRIPTS = st.lists(
    st.builds(Script, passes=st.integers(0, 3), outputs=st.integers(0, 4), large=st.booleans(), waits=st.booleans()),
    min_size=1,
    max_size=4,
)
BUSY = Script(passes=0, outputs=4, large=True, waits=True)


@given(
    st.lists(SCRIPTS, min_size=1, max_size=3),
    st.integers(0, 6),
    st.lists(st.integers(0, 5), max_size=30),
    st.lists(st.booleans(), max_size=40),
)
@example([[BUSY], [BUSY], [BUSY]], 6, [5] * 40, [True] * 80)
async def test_outputs_are_sent_in_the_order_in_which_they_were_made(
    scripts: list[list[Script]], items: int, passes: list[int], refusals: list[bool]
) -> None:
    client = Client(passes, refusals)
    made = await run(client, scripts, items)
    # Compared by identity: each is sent once. Stages that wait for room at the same time note what they made later.
    sent = [id(output) for output in client.sent]
    if not any(step.waits or step.large for script in scripts for step in script):
        assert sent == [id(output) for output in made]
    assert sorted(sent) == sorted(id(output) for output in made)
    for stage in range(len(scripts)):
        own = [output.text for output in client.sent if isinstance(output, TextOutput) and output.text[0] == str(stage)]
        assert own == sorted(own, key=lambda text: int(text.split()[1]))


async def test_a_client_that_takes_everything_is_handed_everything() -> None:
    client = Client()
    made = await run(client, [[Script(passes=1, outputs=3, large=True, waits=True)]] * 2, 4)
    assert client.offered == len(made) == 24


async def test_a_refused_output_and_those_behind_it_pass_through_the_iterator() -> None:
    client = Client(passes=[3], refusals=[False, True])
    made = await run(client, [[Script(passes=0, outputs=5, large=False, waits=False)]], 1)
    assert client.sent == made
    assert client.offered == 1


async def test_a_client_that_has_gone_is_offered_nothing() -> None:
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
                await outputs.drain()

    async def source() -> AsyncIterator[int]:
        yield 0

    async with reading(partial(pipeline, source(), [Late()], [], sink=client)) as outputs:
        reader = asyncio.create_task(client.read(outputs))
        for _ in range(5):
            await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    assert ended.is_set()
    assert client.sent == []


async def test_a_sink_that_fails_ends_the_answer_with_its_error() -> None:
    class Broken:
        def offer(self, output: EngineOutput) -> bool:
            raise ValueError("broken")

    client = Client()
    steps = [Making("a", [Script(passes=1, outputs=1, large=False, waits=False)], [])]

    async def source() -> AsyncIterator[int]:
        yield 0

    async def read() -> None:
        async with reading(partial(pipeline, source(), steps, [], sink=Broken())) as outputs:
            await client.read(outputs)

    with pytest.raises(ValueError, match="broken"):
        await read()
