"""Stages that work on one request at the same time, joined by bounded channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from omni_ws.engine.base import AudioOutput, EngineOutput
from omni_ws.engine.channel import Channel, ChannelClosed
from omni_ws.profiler import events

T_contra = TypeVar("T_contra", contravariant=True)

#: Finished outputs that may wait for the client, in bytes of audio and text.
OUTPUT_BYTES = 256 * 1024
_OUTPUT_OVERHEAD_BYTES = 128


class Stage(Protocol[T_contra]):
    """One step of the work: Thinker, Talker, Code2Wav.

    ``run`` reads ``source`` to its end. What the next stage works on goes into ``sink`` (None for the last stage), what
    the client gets goes into ``outputs``; both wait while they are full. It may return early, upon which the stages
    before it are cancelled; cancelling it frees whatever it holds.
    """

    name: str

    async def run(
        self, source: AsyncIterator[T_contra], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class StageLink:
    """The channel between two stages, in the unit of what flows there: characters, milliseconds, bytes."""

    capacity: float
    cost: Callable[[Any], float]


@asynccontextmanager
async def pipeline(
    source: AsyncIterator[Any], stages: Sequence[Stage[Any]], links: Sequence[StageLink]
) -> AsyncIterator[AsyncIterator[EngineOutput]]:
    """Runs ``stages`` over ``source``, one link between each two; what is yielded are their outputs, in order.

    Reading raises the first error of a stage, after the outputs that came before it. Leaving the block cancels all
    stages and waits for them.
    """
    if len(links) != len(stages) - 1:
        raise ValueError("between each two stages there is one link")
    outputs: Channel[EngineOutput] = Channel(OUTPUT_BYTES, cost=_cost)
    channels = [_channel(link, before, after) for link, before, after in zip(links, stages, stages[1:], strict=False)]
    tasks: list[asyncio.Task[None]] = []
    cancelled: set[asyncio.Task[None]] = set()

    def cancel(some: Sequence[asyncio.Task[None]]) -> None:
        """Each once: the second time would break off its winding up, and leave the engine at work."""
        for task in some:
            if task not in cancelled:
                cancelled.add(task)
                task.cancel()

    sources = [source, *(aiter(channel) for channel in channels)]
    for index, stage in enumerate(stages):
        sink = channels[index] if index < len(channels) else None
        work = _run(stage, sources[index], sink, outputs, cancel_upstream=partial(cancel, tuple(tasks)))
        tasks.append(asyncio.create_task(work, name=f"stage {stage.name}"))
    closing = asyncio.create_task(_close_when_done(tasks, outputs), name="pipeline end")
    try:
        yield aiter(outputs)
    finally:
        outputs.discard()
        cancel((*tasks, closing))
        await asyncio.gather(*tasks, closing, return_exceptions=True)


async def _run(
    stage: Stage[Any],
    source: AsyncIterator[Any],
    sink: Channel[Any] | None,
    outputs: Channel[EngineOutput],
    *,
    cancel_upstream: Callable[[], None],
) -> None:
    if events.recorder is not None:
        source = _Noted(source, stage.name)
    try:
        await stage.run(source, sink, outputs)
    except ChannelClosed:
        pass  # whoever read what this stage makes has ended
    except Exception as error:
        if not outputs.closed:
            outputs.fail(error)
    finally:
        events.emit(stage.name, events.STAGE_END, terminal=sink is None)
        if sink is not None:
            sink.close()
        cancel_upstream()  # nobody reads what they make any more


def _channel(link: StageLink, before: Stage[Any], after: Stage[Any]) -> Channel[Any]:
    if events.recorder is None:
        return Channel(link.capacity, cost=link.cost)
    return _NotedChannel(link, before.name, after.name)


class _NotedChannel(Channel[Any]):
    """Tells the profiler what goes in and what comes out. Made only where it listens."""

    def __init__(self, link: StageLink, before: str, after: str) -> None:
        super().__init__(link.capacity, cost=link.cost)
        self._before, self._after = before, after
        self._put = self._taken = 0

    def put_nowait(self, item: Any) -> None:
        super().put_nowait(item)
        events.emit(self._before, "stage_stream_chunk_sent", to_stage=self._after, chunk_id=self._put)
        self._put += 1

    def take_nowait(self) -> Any:
        item = super().take_nowait()
        if item is not None:
            events.emit(self._after, "stage_stream_chunk_received", from_stage=self._before, chunk_id=self._taken)
            self._taken += 1
        return item


class _Noted(AsyncIterator[Any]):
    """A source that tells when the first item came: from there to its end the stage is there, at work or not."""

    def __init__(self, source: AsyncIterator[Any], stage: str) -> None:
        self._source = source
        self._stage = stage
        self._begun = False

    async def __anext__(self) -> Any:
        item = await anext(self._source)
        if not self._begun:
            self._begun = True
            events.emit(self._stage, events.STAGE_START, resident=True)
        return item


async def _close_when_done(tasks: Sequence[asyncio.Task[None]], outputs: Channel[EngineOutput]) -> None:
    await asyncio.wait(tasks)
    outputs.close()


def _cost(output: EngineOutput) -> float:
    size = output.samples.nbytes if isinstance(output, AudioOutput) else 0
    return size + _OUTPUT_OVERHEAD_BYTES
