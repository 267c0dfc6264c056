"""Decides how many codec frames a vocoder decodes at a time (ChunkPace), and sends the audio (FrameChunks)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import AudioOutput, OutputWriter
from omni_ws.engine.channel import StageLink
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import InvalidValue
from omni_ws.profiler import events

# How many codec frames are decoded at a time.

#: Parameters in ``stage_params.code2wav``: the size of the first and of the largest chunk, in frames.
CODE2WAV_PARAMETERS: Final = frozenset({"first_frames", "largest_frames"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPolicy:
    """The limits of a ChunkPace.

    ``first`` is the size of the first chunk of an answer, in codec frames; the chunk is larger if decoding is slower
    than playback. ``largest`` limits all chunks.
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
        """Return the policy that ``stage_params`` ask for by ``code2wav.first_frames`` and ``code2wav.largest_frames``.

        Raises InvalidValue.
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
    """Return the ``stage_params`` for ``stage``: whole numbers from 1 to 1000 by name.

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
    """A decision of ChunkPace: decode ``frames`` now; 0 means to wait for more frames, at most ``wait_ms`` if set."""

    frames: int
    wait_ms: float | None = None


#: The weight of the latest measurement in the moving averages.
_SMOOTHING = 0.3


class ChunkPace:
    """The decision how many codec frames of one answer to decode at a time, which trades latency for throughput.

    A codec's receptive field is longer than a frame, so a chunk may be decoded with some frames of context on either
    side (``vllm.snac_decoder``). Decoding then costs ``frames + context``: single frames cost several times the work of
    long chunks, but long chunks arrive late. The first chunk is small, for low latency to first audio; chunks grow
    while the player has enough audio left to bridge the wait. ChunkPace measures the interval between frames and the
    decoding time, and models a player that starts with the first chunk and plays without pause.

    Pure: the time is an argument, ``now_ms``, by any monotonic clock.

    ``frame_ms`` is the duration of a frame in milliseconds, ``context_frames`` the number of context frames of a window
    (left and right), ``decode_ms_per_frame`` the initial estimate of the decoding time per frame of a window; 0 if
    unknown.
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
        """Note that ``frames`` have arrived from the Talker."""
        if frames and self._last_arrival_ms is not None:
            interval = (now_ms - self._last_arrival_ms) / frames
            self._interval_ms += _SMOOTHING * (interval - self._interval_ms)
        if frames:
            self._last_arrival_ms = now_ms

    def emitted(self, frames: int, decode_ms: float, now_ms: float, *, audio_ms: float | None = None) -> None:
        """Note that a chunk of ``frames`` frames was sent, whose decoding took ``decode_ms``.

        ``audio_ms`` is the duration of its audio, if it differs from the duration of the frames.
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
        """Decide what to do with the ``ready`` frames; ``complete`` says that no more follow in this clause.

        Before the first chunk: wait until it has its size.

        After it: wait for a chunk of up to ``growth`` times its predecessor, if it can be received and decoded before
        the player's audio is down to the margin. Otherwise decode as many of the ready frames as can be decoded before
        the margin or, failing that, before the underrun. When even that is too late, a large chunk helps the player
        recover: decode the ready frames, up to the size of the grown chunk.
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
        """Return the size of the first chunk.

        It has to last until a second chunk is decoded whose size takes less time to decode than to play.
        """
        lasting = 1
        while lasting < self._policy.largest and self._decode_ms(lasting) > lasting * self._frame_ms:
            lasting += 1
        slow = self._decode_ms(lasting) + self._policy.margin_ms if self._decode_ms_per_frame else 0.0
        return min(self._policy.largest, max(self._policy.first, ceil(slow / self._frame_ms)))

    def _largest_in_time(self, least: int, most: int, ready: int, now_ms: float, left_ms: float) -> int:
        """Return the largest chunk of ``least`` to ``most`` frames that can be decoded within ``left_ms``; 0 if none.

        The time includes the wait for frames beyond those that are ``ready``.
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
    """An item of a Talker's output: codec frames, along the first axis of ``codes``."""

    @property
    def codes(self) -> Any: ...


Item = TypeVar("Item", bound=HasCodes)


def frames_link(frame_ms: float, capacity_ms: float = 5_000) -> StageLink:
    """Return the link between Talker and vocoder, whose capacity is in milliseconds of audio."""
    return StageLink(capacity_ms, lambda item: len(item.codes) * frame_ms)


class FrameChunks(Generic[Item]):
    """The common part of stages that decode codec frames: an inbox, the pace, and sending of audio.

    ``most_held`` limits the frames in the inbox and in decoding; further frames wait in the link, whose backpressure
    pauses the Talker. ``sample_rate`` is in Hz; ``clock`` is a monotonic clock in seconds.
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
        """Fill the inbox from ``source`` while the block runs; leaving it raises the error of the source, if any."""
        # A separate task reads, so that the pace sees frames when they arrive, even while a chunk is being decoded.
        task = asyncio.create_task(self._read(source), name=f"{self._stage} reading")
        try:
            yield
            await task
        finally:
            await end_tasks(task)

    async def has_more(self) -> bool:
        """Wait for an item; returns False at the end of the source."""
        while not self.inbox and not self.ended:
            await self.wait()
        return bool(self.inbox)

    def plan(self, ready: int, *, complete: bool) -> ChunkPlan:
        """Return how many of the ``ready`` frames to decode now; see ChunkPace."""
        return self._pace.plan(ready, self._now_ms(), complete=complete)

    async def wait(self, milliseconds: float | None = None) -> None:
        """Wait for the inbox to change, for at most ``milliseconds``."""
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
        """Await ``decoding``, the samples of the next ``frames`` frames, and write them to ``outputs``.

        ``text_end`` is the end of their clause, see AudioOutput.
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
        """Move items from the source to the inbox, up to the limit."""
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
