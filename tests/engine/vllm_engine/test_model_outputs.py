"""Outputs that are taken inside vLLM's own loop, and those that wait for the task that iterates them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.patience import until

from omni_ws.engine.vllm.language_model import GROUP_SEC, ModelOutputs, OutputGroups

if TYPE_CHECKING:
    from vllm import RequestOutput

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("no_task_left")]


class Translated(Exception):
    """What an error of vLLM becomes."""


class Loop:
    """vLLM's side of one request: its collector, into which ``put`` writes from where vLLM does."""

    def __init__(self) -> None:
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.output_processor import RequestOutputCollector

        self.collector = RequestOutputCollector(RequestOutputKind.DELTA, "inner")
        self.aborted: list[str] = []
        #: Whether any output had arrived, for each time that the end was reported.
        self.ends: list[bool] = []
        self.submitted = asyncio.Event()
        self.outputs = ModelOutputs(
            cast("Any", self),
            self._submit,
            translate=lambda error: Translated(str(error)),
            on_end=self._note_end,
            groups=OutputGroups(),
        )

    async def abort(self, request_id: str, *, internal: bool) -> None:
        assert internal
        self.aborted.append(request_id)
        self.put(tokens(-1, finish_reason="abort"))  # as vLLM does

    def put(self, output: RequestOutput | Exception) -> None:
        self.collector.put(output)

    async def _submit(self) -> Any:
        self.submitted.set()
        return self.collector

    async def _note_end(self, arrived: bool) -> None:
        self.ends.append(arrived)


def tokens(*ids: int, finish_reason: str | None = None) -> RequestOutput:
    from vllm.outputs import CompletionOutput, RequestOutput

    piece = CompletionOutput(0, "x" * len(ids), list(ids), None, None, finish_reason=finish_reason)
    return RequestOutput("outer", None, [1], None, [piece], finished=finish_reason is not None)


def ids_of(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def refusing(refusals: Sequence[bool], seen: list[int]) -> Callable[[RequestOutput], bool]:
    turns = iter(refusals)

    def take(output: RequestOutput) -> bool:
        if next(turns, False):
            return False
        seen.extend(ids_of(output))
        return True

    return take


@pytest.mark.virtual_clock
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 4), max_size=30),
    st.lists(st.booleans(), max_size=30),
)
@example([0] * 9, [3] * 9, [True, False] * 4)
async def test_every_token_comes_once_and_in_order(pauses: list[int], passes: list[int], refusals: list[bool]) -> None:
    loop = Loop()
    seen: list[int] = []
    loop.outputs.hand_to(refusing(refusals, seen))

    async def consume() -> None:
        durations = iter(passes)
        async with aclosing(loop.outputs) as outputs:
            async for output in outputs:
                for turn in range(next(durations, 0)):  # still busy with it, so nothing may be taken
                    count = len(seen)
                    await asyncio.sleep(GROUP_SEC / 2 if turn == 3 else 0)
                    assert len(seen) == count
                seen.extend(ids_of(output))

    consumer = asyncio.create_task(consume())
    for number, pause in enumerate(pauses):
        for _ in range(pause):
            await asyncio.sleep(GROUP_SEC / 2 if number % 2 else 0)
        loop.put(tokens(number))
    loop.put(tokens(len(pauses), finish_reason="stop"))
    await consumer
    assert seen == list(range(len(pauses) + 1))
    assert (loop.aborted, loop.ends) == ([], [True])


@pytest.mark.virtual_clock
@pytest.mark.parametrize("pause", [0.3 * GROUP_SEC, 0.9 * GROUP_SEC, 1.1 * GROUP_SEC, 10 * GROUP_SEC])
async def test_outputs_in_quick_succession_are_taken_together(pause: float) -> None:
    """The first at once, and none later than the time that an output may wait."""
    loop, now = Loop(), asyncio.get_running_loop().time
    made: list[float] = []
    taken: list[tuple[float, list[int]]] = []

    def take(output: RequestOutput) -> bool:
        taken.append((now(), ids_of(output)))
        return True

    loop.outputs.hand_to(take)
    task = await waiting(loop)
    for number in range(12):
        made.append(now())
        loop.put(tokens(number))
        await asyncio.sleep(pause)
    made.append(now())
    loop.put(tokens(12, finish_reason="stop"))
    assert ids_of(await task) == [12]
    assert [one for _, ids in taken for one in ids] == list(range(12))
    assert taken[0] == (made[0], [0])
    for at, ids in taken:
        assert 0 <= at - made[ids[0]] < GROUP_SEC * 1.01
    assert all(later - earlier > 0.99 * GROUP_SEC for (earlier, _), (later, _) in pairwise(taken[:-1]))
    assert (len(taken) == 12) == (pause > GROUP_SEC)


@pytest.mark.virtual_clock
@pytest.mark.parametrize("end", ["stop", "error", "cancel"])
async def test_what_waits_for_others_is_taken_before_the_end(end: str) -> None:
    loop = Loop()
    seen: list[int] = []
    loop.outputs.hand_to(refusing((), seen))
    task = await waiting(loop)
    for number in range(3):
        loop.put(tokens(number))
    assert seen == [0]
    if end == "cancel":
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ids_of(await anext(loop.outputs)) == [1, 2]
        await loop.outputs.aclose()
    elif end == "error":
        loop.put(RuntimeError("vLLM broke"))
        with pytest.raises(Translated):
            await task
        assert seen == [0, 1, 2]
    else:
        loop.put(tokens(3, finish_reason="stop"))
        assert ids_of(await task) == [3]
        assert seen == [0, 1, 2]
    count = len(seen)
    await asyncio.sleep(1)
    assert len(seen) == count


@pytest.mark.virtual_clock
async def test_what_waited_and_is_refused_goes_to_the_iteration() -> None:
    loop = Loop()
    seen: list[int] = []
    loop.outputs.hand_to(refusing((False, True), seen))
    task = await waiting(loop)
    for number in range(3):
        loop.put(tokens(number))
    assert ids_of(await task) == [1, 2]
    assert seen == [0]
    await loop.outputs.aclose()


@pytest.mark.virtual_clock
async def test_nothing_that_waited_is_taken_of_a_request_that_was_closed() -> None:
    loop = Loop()
    seen: list[int] = []
    loop.outputs.hand_to(refusing((), seen))
    task = await waiting(loop)
    loop.put(tokens(0))
    loop.put(tokens(1))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await loop.outputs.aclose()
    await asyncio.sleep(1)
    assert seen == [0]


async def waiting(loop: Loop) -> asyncio.Task[Any]:
    """A task that waits for the next output."""

    async def get() -> RequestOutput:
        return await anext(loop.outputs)

    task = asyncio.create_task(get())
    await loop.submitted.wait()
    await asyncio.sleep(0)
    return task


async def test_an_error_of_the_consumer_fails_its_request_alone() -> None:
    loop = Loop()
    error = ValueError("broken")

    def take(output: RequestOutput) -> bool:
        raise error

    loop.outputs.hand_to(take)
    task = await waiting(loop)
    loop.put(tokens(0))  # raises nothing into vLLM's loop
    loop.put(tokens(1))
    with pytest.raises(ValueError, match="broken") as caught:
        await task
    assert caught.value is error
    assert loop.aborted == ["inner"]
    assert [one async for one in loop.outputs] == []


async def test_an_error_of_vllm_is_translated_and_ends_the_request() -> None:
    loop = Loop()
    loop.outputs.hand_to(lambda output: True)
    task = await waiting(loop)
    loop.put(tokens(0))
    loop.put(RuntimeError("vLLM broke"))
    with pytest.raises(Translated, match="vLLM broke"):
        await task
    assert (loop.aborted, loop.ends) == (["inner"], [True])


async def test_a_dead_engine_is_not_asked_to_abort() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    loop = Loop()
    task = await waiting(loop)
    loop.put(EngineDeadError())
    with pytest.raises(Translated):
        await task
    assert (loop.aborted, loop.ends) == ([], [False])


async def test_an_abort_that_nobody_asked_for_is_the_death_of_the_model() -> None:
    """A copy of the model died, and vLLM ends all others, whose last outputs still come."""
    loop = Loop()
    task = await waiting(loop)
    loop.put(tokens(0, finish_reason="abort"))
    with pytest.raises(Translated, match="EngineCore encountered an issue"):
        await task
    assert (loop.aborted, loop.ends) == ([], [True])


async def test_closing_aborts_and_nothing_is_taken_afterwards() -> None:
    loop = Loop()
    seen: list[int] = []
    loop.outputs.hand_to(refusing((), seen))
    feeding = asyncio.create_task(asyncio.Event().wait())
    loop.collector._input_stream_task = feeding
    task = await waiting(loop)
    loop.put(tokens(0))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(2):
        await loop.outputs.aclose()
    loop.put(tokens(1))
    await until(feeding.cancelled)
    assert seen == [0]
    assert (loop.aborted, loop.ends) == (["inner"], [True])
    assert [one async for one in loop.outputs] == []


async def test_what_was_never_submitted_needs_no_abort() -> None:
    loop = Loop()
    await loop.outputs.aclose()
    assert (loop.aborted, loop.ends) == ([], [])


async def test_a_streamed_prompt_ends_without_an_output() -> None:
    from vllm.outputs import STREAM_FINISHED

    loop = Loop()

    async def read() -> AsyncIterator[list[int]]:
        async for output in loop.outputs:
            yield ids_of(output)

    loop.put(tokens(0))
    reading = read()
    assert await anext(reading) == [0]
    loop.put(STREAM_FINISHED)
    assert [ids async for ids in reading] == []
    assert (loop.aborted, loop.ends) == ([], [True])
