"""Bounded channels, and pipelines: the stages of an engine, which work concurrently, connected by channels.

FrameChunks is the common part of vocoder stages, which send audio in chunks; ChunkPace decides their lengths.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import AudioOutput, Cut, EngineOutput, OutputFilter, OutputWriter
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import InvalidValue
from omni_ws.profiler import events

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class ChannelClosed(Exception):
    """Raised by ``put``, ``room`` and ``put_nowait`` on a channel that was ended by its reader or by a writer."""


class Channel(Generic[T]):
    """A queue with backpressure for one reader and any number of writers, all on the same event loop.

    ``capacity`` is in bytes, characters or milliseconds rather than items; ``cost`` returns the size of an item in the
    same unit.

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
    """One stage of the work on an answer, such as Thinker, Talker or Code2Wav."""

    name: str

    async def run(self, source: AsyncIterator[T_contra], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Process ``source`` to its end.

        The stage puts items for the next stage into ``sink`` (None for the last stage), and writes outputs for the
        client to ``outputs``; both apply backpressure. When a stage returns before the end of its ``source``, the
        stages before it are cancelled, except those that have closed their ``sink`` and still produce outputs. On
        cancellation a stage releases all its resources.
        """
        ...


@dataclass(frozen=True, slots=True)
class StageLink:
    """The size of the channel between two stages: its capacity, and the ``cost`` of an item in the same unit."""

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
    """Run ``stages`` over ``source`` to their end; the stages write their outputs to ``out``.

    ``links`` has the link between each pair of adjacent stages. Raises the first error of a stage, and ValueError for a
    wrong number of links. An error, or the cancellation of the call, cancels all stages, and is raised when they have
    released their resources. Once ``cut`` is signalled (which needs at least two stages), only the first stage works
    on: its channel to the next stage is closed, and the others are cancelled.
    """
    if len(links) != len(stages) - 1:
        raise ValueError("there must be exactly one link between consecutive stages")
    outputs = Outputs(out)
    channels = [_channel(link, before, after) for link, before, after in zip(links, stages, stages[1:], strict=False)]
    tasks: list[asyncio.Task[None]] = []
    cancelled: set[asyncio.Task[None]] = set()

    def cancel(some: Sequence[asyncio.Task[None]]) -> None:
        """Cancel those tasks that were not cancelled yet: a second cancellation would interrupt their cleanup."""
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
    """Cancel all stages except the first, and discard the first stage's channel, because the answer was cut off."""
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
    """Run one stage; then close its ``sink`` and call ``cancel_upstream``. An error of the stage ends the pipeline."""
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
        """Drop all further outputs, because all stages have ended or are about to end. Idempotent."""
        self.closed = True
        self._over.set()

    def fail(self, error: Exception) -> None:
        """End the pipeline with ``error``. A task that a stage has started may call this method, too."""
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
    """A wrapper of a stage's source, which reports the first item to the profiler as the start of the stage."""

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


# Decides how many codec frames a vocoder decodes at a time (ChunkPace), and sends the audio (FrameChunks).


# How many codec frames are decoded at a time.

#: Parameters in ``stage_params.code2wav``: the size of the first and of the largest chunk, in frames.
CODE2WAV_PARAMETERS: Final = frozenset({"first_frames", "largest_frames"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """The limits of a ChunkPace.

    ``first`` is the size of the first chunk of an answer, in codec frames; if decoding is slower than playback, the
    first chunk is larger. ``largest`` is the limit on the size of all chunks, in frames.
    """

    first: int = 1
    largest: int = 24
    #: The factor by which a chunk may exceed the one before.
    growth: float = 2.0
    #: How much audio the player should have left when a chunk arrives, in milliseconds, to absorb jitter.
    margin_ms: float = 40.0

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.largest or self.growth < 1 or self.margin_ms < 0:
            raise ValueError("a chunk policy requires 1 <= first <= largest, growth >= 1 and margin_ms >= 0")

    @classmethod
    def asked(cls, parameters: Mapping[str, Mapping[str, Any]] | None) -> Self:
        """Return the policy with the values of ``code2wav.first_frames`` and ``code2wav.largest_frames``.

        ``parameters`` are a request's ``stage_params``. Raises InvalidValue.
        """
        values = whole_numbers("code2wav", CODE2WAV_PARAMETERS, parameters)
        policy = cls()
        largest = values.get("largest_frames", max(policy.largest, values.get("first_frames", 1)))
        first = values.get("first_frames", min(policy.first, largest))
        if first > largest:
            raise InvalidValue(
                "first_frames must not exceed largest_frames", param="stage_params.code2wav.first_frames"
            )
        return replace(policy, first=first, largest=largest)


def whole_numbers(stage: str, names: Set[str], parameters: Mapping[str, Mapping[str, Any]] | None) -> dict[str, int]:
    """Check and return the parameters of ``stage``, whole numbers from 1 to 1000, by their names.

    ``parameters`` are a request's ``stage_params``.

    Raises InvalidValue for other values, and for a name that is not in ``names``.
    """
    values = dict((parameters or {}).get(stage, {}))
    for name, value in values.items():
        where = f"stage_params.{stage}.{name}"
        if name not in names:
            raise InvalidValue(f"unknown parameter of stage {stage}", param=where)
        if type(value) is not int or not 1 <= value <= 1000:
            raise InvalidValue(f"{name} must be a whole number from 1 to 1000", param=where)
    return values


class ChunkPlan(NamedTuple):
    """A decision of ChunkPace: decode ``frames`` frames now. 0: wait for more frames, at most ``wait_ms`` if set."""

    frames: int
    wait_ms: float | None = None


#: The weight of the latest measurement in the moving averages.
_SMOOTHING = 0.3


class ChunkPace:
    """A policy object that decides how many codec frames of one answer to decode at a time.

    A codec's receptive field is longer than a frame, so a chunk may be decoded with some frames of context on either
    side (``vllm.snac_decoder``); chunk and context are the *window*. The decoding time is proportional to the window: a
    frame costs several times less in a long chunk than alone, but long chunks arrive late. The first chunk is small,
    for low latency to first audio; chunks grow while the player has enough audio left to bridge the wait. ChunkPace
    measures the interval between frames and the decoding time, and models a player that starts with the first chunk and
    plays without pause.

    ChunkPace reads no clock: each call gets the time as ``now_ms``, in milliseconds of any monotonic clock.

    ``frame_ms`` is the duration of a frame in milliseconds, ``context_frames`` the number of context frames of a window
    (left and right together), ``decode_ms_per_frame`` the initial estimate of the decoding time per frame of a window;
    0 if unknown.
    """

    def __init__(
        self, policy: ChunkPolicy, *, frame_ms: float, context_frames: int, decode_ms_per_frame: float = 0.0
    ) -> None:
        self._policy = policy
        self._frame_ms = frame_ms
        self._context = context_frames
        #: The average interval between frames. The initial assumption is that the Talker is just as fast as playback.
        self._interval_ms = frame_ms
        self._last_arrival_ms: float | None = None
        #: The average decoding time per frame of a window, context included.
        self._decode_ms_per_frame = decode_ms_per_frame
        self._began_ms: float | None = None
        self._emitted_ms = 0.0
        self._first = self._last_chunk = self._first_chunk()

    def received(self, frames: int, now_ms: float) -> None:
        """Note that ``frames`` frames have arrived from the Talker."""
        if frames and self._last_arrival_ms is not None:
            interval = (now_ms - self._last_arrival_ms) / frames
            self._interval_ms += _SMOOTHING * (interval - self._interval_ms)
        if frames:
            self._last_arrival_ms = now_ms

    def emitted(self, frames: int, decode_ms: float, now_ms: float, *, audio_ms: float | None = None) -> None:
        """Note that a chunk of ``frames`` frames, whose decoding took ``decode_ms``, was sent.

        ``audio_ms`` is the duration of the chunk's audio if it differs from the duration of the frames.
        """
        per_frame = decode_ms / (frames + self._context)
        if not self._decode_ms_per_frame:
            self._decode_ms_per_frame = per_frame
        self._decode_ms_per_frame += _SMOOTHING * (per_frame - self._decode_ms_per_frame)
        if self._began_ms is None:
            self._began_ms = now_ms
        self._emitted_ms += frames * self._frame_ms if audio_ms is None else audio_ms
        self._last_chunk = frames

    def unplayed_ms(self, now_ms: float) -> float:
        """Return how much audio the player has left, in milliseconds; negative after an underrun."""
        return 0.0 if self._began_ms is None else self._emitted_ms - (now_ms - self._began_ms)

    def plan(self, ready: int, now_ms: float, *, complete: bool = False) -> ChunkPlan:
        """Decide how many of the ``ready`` frames to decode; ``complete``: no more frames follow in this clause.

        The first chunk waits until its frames have arrived.

        A later chunk may grow to ``growth`` times its predecessor. Wait for more frames if a longer chunk can be
        received and decoded before the player's audio is down to the margin. Otherwise decode as many ready frames as
        can be decoded before the margin is reached, or else before the player runs out of audio. If even one frame
        takes too long, decode all ready frames, up to the size of the grown chunk, so that the player recovers.
        """
        if self._began_ms is None:
            return ChunkPlan(min(ready, self._first) if ready >= self._first or complete else 0)
        left = self.unplayed_ms(now_ms)
        grown = min(self._policy.largest, ceil(self._last_chunk * self._policy.growth))
        if not complete and ready < grown:
            wanted = self._largest_in_time(ready + 1, grown, ready, now_ms, left - self._policy.margin_ms)
            if wanted:
                deadline = left - self._policy.margin_ms - self._decode_ms(max(ready, 1))
                return ChunkPlan(0, max(1.0, deadline)) if ready else ChunkPlan(0)
        if not ready:
            return ChunkPlan(0)
        most = min(ready, self._policy.largest)
        frames = (
            self._largest_in_time(1, most, ready, now_ms, left - self._policy.margin_ms)
            or self._largest_in_time(1, most, ready, now_ms, left)
            or min(most, grown)
        )
        return ChunkPlan(frames)

    def _first_chunk(self) -> int:
        """Return the size of the first chunk, in frames.

        The first chunk has to play until the second one is decoded. The second chunk is the smallest that takes no
        longer to decode than to play.
        """
        lasting = 1
        while lasting < self._policy.largest and self._decode_ms(lasting) > lasting * self._frame_ms:
            lasting += 1
        slow = self._decode_ms(lasting) + self._policy.margin_ms if self._decode_ms_per_frame else 0.0
        return min(self._policy.largest, max(self._policy.first, ceil(slow / self._frame_ms)))

    def _largest_in_time(self, least: int, most: int, ready: int, now_ms: float, left_ms: float) -> int:
        """Return how many frames, from ``least`` to ``most``, can be decoded within ``left_ms`` at most; 0 if none.

        ``left_ms`` includes the wait for frames beyond the ``ready`` ones.
        """
        since = 0.0 if self._last_arrival_ms is None else now_ms - self._last_arrival_ms
        for frames in range(most, least - 1, -1):
            waiting = max(0.0, (frames - ready) * self._interval_ms - since) if frames > ready else 0.0
            if waiting + self._decode_ms(frames) <= left_ms:
                return frames
        return 0

    def _decode_ms(self, frames: int) -> float:
        return self._decode_ms_per_frame * (frames + self._context)


# Frames taken from a Talker as they come, and sent as audio in chunks.


class HasCodes(Protocol):
    """An item of a Talker's output. The first axis of the array ``codes`` is that of the codec frames."""

    @property
    def codes(self) -> Any: ...


Item = TypeVar("Item", bound=HasCodes)


def frames_link(frame_ms: float, capacity_ms: float = 5_000) -> StageLink:
    """Return a link between Talker and vocoder; its capacity is in milliseconds of audio."""
    return StageLink(capacity_ms, lambda item: len(item.codes) * frame_ms)


class FrameChunks(Generic[Item]):
    """The common part of stages that decode codec frames: it receives frames, plans chunks, and sends audio.

    ``most_held`` is the maximum number of frames in the inbox and in decoding together; further frames wait in the
    link, whose backpressure pauses the Talker. ``sample_rate`` is in Hz; ``clock`` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        stage: str,
        pace: ChunkPace,
        *,
        sample_rate: int,
        most_held: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: The duration of the audio sent, in milliseconds.
        self.audio_ms = 0.0
        #: Items that have arrived; the stage removes them.
        self.inbox: deque[Item] = deque()
        #: Whether the source has ended.
        self.ended = False
        self._stage = stage
        self._pace = pace
        self._sample_rate = sample_rate
        self._most_held = most_held
        self._clock = clock
        self._held = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    @asynccontextmanager
    async def reading(self, source: AsyncIterator[Item]) -> AsyncIterator[None]:
        """Fill the inbox from ``source`` while the block runs.

        The end of the block waits for the end of ``source``, and raises its error. If the block itself fails, the
        reading is cancelled.
        """
        # A separate task reads, so that the pace sees frames when they arrive, even while a chunk is being decoded.
        task = asyncio.create_task(self._read(source), name=f"{self._stage} reading")
        try:
            yield
            await task
        finally:
            await end_tasks(task)

    async def has_more(self) -> bool:
        """Wait until the inbox has an item, and return True; return False at the end of the source."""
        while not self.inbox and not self.ended:
            await self.wait()
        return bool(self.inbox)

    def plan(self, ready: int, *, complete: bool) -> ChunkPlan:
        """Return how many of the ``ready`` frames to decode now; see ChunkPace."""
        return self._pace.plan(ready, self._now_ms(), complete=complete)

    async def wait(self, milliseconds: float | None = None) -> None:
        """Wait until an item is added to the inbox or the source ends, but at most ``milliseconds``; None for no limit.

        Returns immediately if this has happened since the last call.
        """
        try:
            async with asyncio.timeout(None if milliseconds is None else milliseconds / 1000):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    async def send(
        self,
        frames: int,
        decoding: Awaitable[Samples],
        outputs: OutputWriter,
        *,
        text_end: int | None = None,
    ) -> None:
        """Await ``decoding``, which returns the samples of the next ``frames`` frames, and write them to ``outputs``.

        ``text_end`` is the end of their clause, see AudioOutput. Waits while the client does not read.
        """
        began_ms = self._now_ms()
        with events.span(self._stage, "code2wav_decode_start", "code2wav_decode_end", frames=frames):
            samples = await decoding
        now_ms = self._now_ms()
        audio_ms = len(samples) * 1000 / self._sample_rate
        if frames:
            self._pace.emitted(frames, now_ms - began_ms, now_ms, audio_ms=audio_ms)
        self._held -= frames
        self._room.set()
        if not len(samples):
            return
        if not self.audio_ms:
            events.emit(self._stage, "code2wav_first_audio")
        self.audio_ms += audio_ms
        outputs.write(AudioOutput(samples, self._sample_rate, text_end=text_end))
        await outputs.drain()

    async def _read(self, source: AsyncIterator[Item]) -> None:
        """Move items from the source to the inbox, and wait while ``most_held`` frames are held."""
        try:
            async for item in source:
                self._pace.received(len(item.codes), self._now_ms())
                self.inbox.append(item)
                self._held += len(item.codes)
                self._changed.set()
                while self._held >= self._most_held:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self.ended = True
            self._changed.set()

    def _now_ms(self) -> float:
        return self._clock() * 1000
