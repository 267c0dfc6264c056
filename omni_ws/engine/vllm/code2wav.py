"""Code2Wav: decodes codec frames to audio, in chunks that are small at first and grow as time allows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from omni_ws.engine.base import AudioOutput, EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.pipeline import StageLink
from omni_ws.engine.vllm.chunk_policy import ChunkPace, ChunkPolicy
from omni_ws.engine.vllm.codec_frames import CodecFrames
from omni_ws.engine.vllm.decode_queue import DecodeQueue
from omni_ws.engine.vllm.snac_stream import StreamState, WindowContext
from omni_ws.profiler import events


def frames_link(frame_ms: float, capacity_ms: float = 5_000) -> StageLink:
    """Return the link between Talker and Code2Wav, whose items are CodecFrames.

    Its capacity is in milliseconds of audio.
    """
    return StageLink(capacity_ms, lambda item: len(item.codes) * frame_ms)


class Code2Wav:
    """A Stage of one request: CodecFrames in, AudioOutput to the client.

    Decoding takes place in ``queue``, which all requests share. ``sample_rate`` (Hz) and ``frame_ms`` are those of its
    decoder, ``slots`` is the number of tokens of a frame. ``policy`` and ``context`` control the size of chunks and
    their context; ``clock`` is a monotonic clock in seconds.
    """

    name = "code2wav"

    def __init__(
        self,
        queue: DecodeQueue,
        *,
        sample_rate: int,
        frame_ms: float,
        slots: int,
        policy: ChunkPolicy | None = None,
        context: WindowContext | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: The duration of the audio sent, in milliseconds, for the usage of the request.
        self.audio_ms = 0.0
        self._queue = queue
        self._sample_rate = sample_rate
        self._frame_ms = frame_ms
        self._slots = slots
        self._policy = policy or ChunkPolicy()
        self._context = context or WindowContext()
        self._clock = clock
        around = self._context.left + self._context.right
        self._pace = ChunkPace(
            self._policy, frame_ms=frame_ms, context_frames=around, decode_ms_per_frame=queue.ms_per_frame
        )
        #: The limit on frames held here: enough for two chunks. Further frames wait in the link, whose backpressure
        #: pauses the Talker.
        self._most_held = 2 * self._policy.largest + self._context.right
        self._inbox: deque[CodecFrames] = deque()
        self._held = 0
        self._ended = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    async def run(
        self, source: AsyncIterator[CodecFrames], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        """Decode clause after clause, up to the end of ``source``."""
        # A separate task reads, so that the pace sees frames when they arrive, even while a chunk is being decoded.
        reading = asyncio.create_task(self._read(source), name="code2wav reading")
        try:
            while await self._has_more():
                await self._decode_clause(outputs)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read(self, source: AsyncIterator[CodecFrames]) -> None:
        """Move frames from the source to the inbox, up to the limit."""
        try:
            async for item in source:
                self._pace.received(len(item.codes), self._now_ms())
                self._inbox.append(item)
                self._held += len(item.codes)
                self._changed.set()
                while self._held >= self._most_held:
                    self._room.clear()
                    await self._room.wait()
        finally:
            self._ended = True
            self._changed.set()

    async def _has_more(self) -> bool:
        """Wait for a clause; returns False at the end of the source."""
        while not self._inbox and not self._ended:
            await self._wait_for_change(None)
        return bool(self._inbox)

    async def _decode_clause(self, outputs: Channel[EngineOutput]) -> None:
        """Decode one clause. Clauses are independent: their first frames have no left context."""
        state = StreamState.start(self._context, self._slots)
        clause = self._inbox[0].clause
        while not state.done:
            state = self._take_over(state, clause)
            plan = self._pace.plan(state.ready, self._now_ms(), complete=state.ended)
            if plan.frames:
                state = await self._decode(plan.frames, state, outputs)
            elif self._ended and not self._inbox and not state.ended:
                # The source ended within the clause.
                state = state.received(state.held[:0], last=True)
            elif not state.done:
                await self._wait_for_change(None if plan.wait_ms is None else plan.wait_ms / 1000)

    async def _decode(self, frames: int, state: StreamState, outputs: Channel[EngineOutput]) -> StreamState:
        """Decode and send the next ``frames`` frames; returns the state after them."""
        window, after = state.take(frames)
        began_ms = self._now_ms()
        with events.span(self.name, "code2wav_decode_start", "code2wav_decode_end", frames=frames):
            samples = await self._queue.decode(window)
        now_ms = self._now_ms()
        self._pace.emitted(frames, now_ms - began_ms, now_ms)
        self._held -= frames
        self._room.set()
        if not self.audio_ms:
            events.emit(self.name, "code2wav_first_audio")
        self.audio_ms += frames * self._frame_ms
        await outputs.put(AudioOutput(samples, self._sample_rate))
        return after

    def _take_over(self, state: StreamState, clause: int) -> StreamState:
        """Add the frames in the inbox that belong to ``clause`` to its state."""
        while self._inbox and self._inbox[0].clause == clause and not state.ended:
            item = self._inbox.popleft()
            state = state.received(item.codes, last=item.last)
        return state

    async def _wait_for_change(self, seconds: float | None) -> None:
        """Wait for the inbox to change, for at most ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()

    def _now_ms(self) -> float:
        return self._clock() * 1000
