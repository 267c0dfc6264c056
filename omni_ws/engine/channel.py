"""Bounded channels, and pipelines: the stages of an engine, which work concurrently, connected by channels."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from omni_ws.engine.base import AudioOutput, Cut, EngineOutput, OutputFilter, OutputWriter
from omni_ws.profiler import events

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class ChannelClosed(Exception):
    """Raised by ``put``, ``room`` and ``put_nowait`` on a channel that was ended by its reader or by a writer."""


class Channel(Generic[T]):
    """A queue with backpressure for one reader and any number of writers, all on the same event loop.

    ``capacity`` is in bytes, characters or milliseconds rather than items; ``cost`` measures an item in that unit.

    ``put`` waits while the channel is full; an item that costs more than the capacity is accepted once the channel is
    empty. Waiting writers take turns in the order of their calls. ``put_nowait`` is for writers that cannot wait, such
    as socket callbacks: it always accepts the item, and the writer pauses its own source while the channel is ``full``,
    or waits for ``room``.

    The reader iterates over the channel. ``on_take`` is called with the cost of each item taken, and with the cost of
    all items discarded, so that the owner can account for them.

    A writer ends the channel with ``close`` or ``fail``, the reader with ``discard``. Cancelling a task that waits in
    ``put`` or in the iteration leaves the channel as it was.
    """

    def __init__(
        self, capacity: float, *, cost: Callable[[T], float], on_take: Callable[[float], None] | None = None
    ) -> None:
        self.capacity = capacity
        self.queued: float = 0
        self._cost = cost
        self._on_take = on_take
        self._items: deque[T] = deque()
        self._error: BaseException | None = None
        #: Whether further items are refused.
        self.closed = False
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        #: Held by the waiting writer whose turn it is.
        self._turn = asyncio.Lock()

    @property
    def full(self) -> bool:
        """Whether the cost of the queued items reaches the capacity."""
        return self.queued >= self.capacity

    @property
    def items(self) -> int:
        """The number of queued items."""
        return len(self._items)

    def put_nowait(self, item: T) -> None:
        """Queue ``item`` even if the channel is full. Raises ChannelClosed."""
        if self.closed:
            raise ChannelClosed
        self._items.append(item)
        self.queued += self._cost(item)
        self._wake(self._reader)

    async def put(self, item: T) -> None:
        """Wait for room, and queue ``item``. Raises ChannelClosed, also if the channel is closed during the wait."""
        if self._items or self._turn.locked():
            async with self._turn:
                while self._items and self.queued + self._cost(item) > self.capacity and not self.closed:
                    await self._item_taken()
                self.put_nowait(item)
        else:
            self.put_nowait(item)

    async def room(self) -> None:
        """Wait while the channel is full. Raises ChannelClosed, also if the channel is closed during the wait."""
        if self.full:
            async with self._turn:
                while self.full and not self.closed:
                    await self._item_taken()
        if self.closed:
            raise ChannelClosed

    async def _item_taken(self) -> None:
        """Wait until the reader takes an item, or the channel ends."""
        self._writer = asyncio.get_running_loop().create_future()
        await self._writer

    def close(self) -> None:
        """End the channel: the iteration ends after the queued items. Idempotent."""
        self.closed = True
        self._wake(self._reader)
        self._wake(self._writer)

    def fail(self, error: BaseException) -> None:
        """End the channel: the iteration raises ``error`` after the queued items."""
        self._error = error
        self.close()

    def discard(self) -> None:
        """End the channel from the reader's side: queued items count as taken, further items are refused."""
        self._items.clear()
        queued, self.queued = self.queued, 0
        if queued and self._on_take is not None:
            self._on_take(queued)
        self.close()

    def take_nowait(self) -> T | None:
        """Remove and return the next item, or None if there is none."""
        if not self._items:
            return None
        item = self._items.popleft()
        cost = self._cost(item)
        self.queued -= cost
        if self._on_take is not None:
            self._on_take(cost)
        self._wake(self._writer)
        return item

    # The channel is its own iterator. The event loop would close an abandoned async generator in a task without owner.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        while (item := self.take_nowait()) is None:
            if self.closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return item

    @staticmethod
    def _wake(waiter: asyncio.Future[None] | None) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


# Stages connected by channels.

#: The limit on what an engine works ahead, in bytes of samples plus an overhead for each output.
OUTPUT_BYTES = 256 * 1024
_OUTPUT_OVERHEAD_BYTES = 128


class Stage(Protocol[T_contra]):
    """One stage of an answer, such as Thinker, Talker or Code2Wav."""

    name: str

    async def run(self, source: AsyncIterator[T_contra], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Process ``source`` to its end.

        The stage puts items for the next stage into ``sink`` (None for the last stage), and writes outputs for the
        client to ``outputs``; both apply backpressure. When a stage returns before the end of ``source``, the stages
        before it are cancelled, except for a stage that has closed its ``sink`` itself and still produces outputs. On
        cancellation a stage releases everything that it holds.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageLink:
    """The channel between two stages: its capacity, in the unit in which ``cost`` measures its items."""

    capacity: float
    cost: Callable[[Any], float]


async def pipeline(
    source: AsyncIterator[Any],
    stages: Sequence[Stage[Any]],
    links: Sequence[StageLink],
    out: OutputWriter,
    *,
    cut: Cut | None = None,
) -> None:
    """Run ``stages`` over ``source`` to their end; they write their outputs to ``out``.

    ``links`` has the channel between each pair of adjacent stages. Raises the first error of a stage. An error, or the
    cancellation of the call, cancels all stages, and is raised when they have released their resources. Once ``cut`` is
    made, only the first stage works on: its channel to the next stage is closed, and the others are cancelled.
    """
    if len(links) != len(stages) - 1:
        raise ValueError("there must be exactly one link between consecutive stages")
    outputs = Outputs(out)
    channels = [_channel(link, before, after) for link, before, after in zip(links, stages, stages[1:], strict=False)]
    tasks: list[asyncio.Task[None]] = []
    cancelled: set[asyncio.Task[None]] = set()

    def cancel(some: Sequence[asyncio.Task[None]]) -> None:
        """Cancel the tasks that were not cancelled before: a second cancellation would interrupt a task's cleanup."""
        for task in some:
            if task not in cancelled:
                cancelled.add(task)
                task.cancel()

    def cancel_before(index: int) -> None:
        """Cancel the stages whose output nobody reads now that the stage at ``index`` has ended."""
        for before in reversed(range(index)):
            if channels[before].closed:
                return  # this stage has ended, or works on for the client and still reads its source
            cancel(tasks[before : before + 1])

    sources = [source, *(aiter(channel) for channel in channels)]
    for index, stage in enumerate(stages):
        link = channels[index] if index < len(channels) else None
        work = _run(stage, sources[index], link, outputs, cancel_upstream=partial(cancel_before, index))
        tasks.append(asyncio.create_task(work, name=f"stage {stage.name}"))
    running = set(tasks)

    def note_end(task: asyncio.Task[None]) -> None:  # the outputs end with the last stage
        running.discard(task)
        if not running:
            outputs.close()

    for task in tasks:
        task.add_done_callback(note_end)

    try:
        with (cut or Cut()).watched(partial(_leave_first, channels, tasks, cancel)):
            await outputs.until_closed()
    finally:
        outputs.close()
        cancel(tasks)
        await asyncio.gather(*tasks, return_exceptions=True)


def _leave_first(
    channels: Sequence[Channel[Any]],
    tasks: Sequence[asyncio.Task[None]],
    cancel: Callable[[Sequence[asyncio.Task[None]]], None],
) -> None:
    """Cancel all stages except the first, and discard its channel, because the answer was cut off."""
    channels[0].discard()
    cancel(tasks[1:])


async def _run(
    stage: Stage[Any],
    source: AsyncIterator[Any],
    sink: Channel[Any] | None,
    outputs: Outputs,
    *,
    cancel_upstream: Callable[[], None],
) -> None:
    """Run one stage. When it ends, end its ``sink`` and call ``cancel_upstream``; its error ends the pipeline."""
    if events.recorder is not None:
        source = _ProfiledSource(source, stage.name)
    try:
        await stage.run(source, sink, outputs)
    except ChannelClosed:
        pass  # the next stage, or the whole, has ended
    except Exception as error:
        outputs.fail(error)
    finally:
        events.emit(stage.name, events.STAGE_END, terminal=sink is None)
        if sink is not None:
            sink.close()
        cancel_upstream()


class Outputs(OutputFilter):
    """The OutputWriter of a pipeline's stages. Once it is closed, outputs are dropped."""

    def __init__(self, out: OutputWriter) -> None:
        super().__init__(out)
        self.closed = False
        self._error: Exception | None = None
        self._over = asyncio.Event()

    def write(self, output: EngineOutput) -> None:
        if not self.closed:
            self._out.write(output)

    def close(self) -> None:
        """Drop all further outputs: all stages have ended, or are about to. Idempotent."""
        self.closed = True
        self._over.set()

    def fail(self, error: Exception) -> None:
        """End all stages with ``error``; a stage may call it from a task of its own."""
        if not self.closed:
            self._error = error
            self.close()

    async def until_closed(self) -> None:
        """Wait until ``close`` or ``fail`` is called. Raises the error of ``fail``."""
        await self._over.wait()
        if self._error is not None:
            raise self._error


def _channel(link: StageLink, before: Stage[Any], after: Stage[Any]) -> Channel[Any]:
    if events.recorder is None:
        return Channel(link.capacity, cost=link.cost)
    return _ProfiledChannel(link, before.name, after.name)


class _ProfiledChannel(Channel[Any]):
    """A channel that reports each item put and taken to the profiler. Only used while the profiler records."""

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


class _ProfiledSource(AsyncIterator[Any]):
    """The source of a stage; its first item is reported to the profiler as the start of the stage."""

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


def output_cost(output: EngineOutput) -> float:
    """Return the bytes of an output that count towards OUTPUT_BYTES."""
    size = output.samples.nbytes if isinstance(output, AudioOutput) else 0
    return size + _OUTPUT_OVERHEAD_BYTES
