"""FrameChunks: takes codec frames from a Talker as they come, and sends audio in chunks whose size adapts."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

from omni_ws.audio.samples import Samples
from omni_ws.engine.base import AudioOutput, EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.chunk_policy import ChunkPace, ChunkPlan
from omni_ws.engine.pipeline import StageLink
from omni_ws.profiler import events


class HasCodes(Protocol):
    """An item with the codes of some codec frames, whose first axis is frames."""

    @property
    def codes(self) -> Any: ...


Item = TypeVar("Item", bound=HasCodes)


def frames_link(frame_ms: float, capacity_ms: float = 5_000) -> StageLink:
    """Return the link between Talker and vocoder. Its capacity is in milliseconds of audio."""
    return StageLink(capacity_ms, lambda item: len(item.codes) * frame_ms)


class FrameChunks(Generic[Item]):
    """What stages that decode codec frames share: the inbox, the pace, and sending.

    ``most_held`` limits the frames held here; further ones wait in the link, whose backpressure pauses the Talker.
    ``sample_rate`` is in Hz; ``clock`` is a monotonic clock in seconds.
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
        #: Items that have come and were not taken.
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
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

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
        outputs: Channel[EngineOutput],
        *,
        text_end: int | None = None,
    ) -> None:
        """Wait for the samples that the next ``frames`` frames settle, and put them into ``outputs``.

        ``text_end`` is where their clause ends, see AudioOutput.
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
        await outputs.put(AudioOutput(samples, self._sample_rate, text_end=text_end))

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
