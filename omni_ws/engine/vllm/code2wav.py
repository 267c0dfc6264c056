"""Code2Wav: decodes codec frames to audio, in chunks that are small at first and grow as time allows."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.chunk_policy import ChunkPace, ChunkPolicy
from omni_ws.engine.frame_chunks import FrameChunks
from omni_ws.engine.vllm.codec_frames import CodecFrames
from omni_ws.engine.vllm.decode_queue import DecodeQueue
from omni_ws.engine.vllm.snac_stream import StreamState, WindowContext


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
        self._queue = queue
        self._slots = slots
        self._context = context or WindowContext()
        policy = policy or ChunkPolicy()
        around = self._context.left + self._context.right
        pace = ChunkPace(policy, frame_ms=frame_ms, context_frames=around, decode_ms_per_frame=queue.ms_per_frame)
        self._chunks: FrameChunks[CodecFrames] = FrameChunks(
            self.name,
            pace,
            sample_rate=sample_rate,
            # Enough for two chunks.
            most_held=2 * policy.largest + self._context.right,
            clock=clock,
        )

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(
        self, source: AsyncIterator[CodecFrames], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        """Decode clause after clause, up to the end of ``source``."""
        async with self._chunks.reading(source):
            while await self._chunks.has_more():
                await self._decode_clause(outputs)

    async def _decode_clause(self, outputs: Channel[EngineOutput]) -> None:
        """Decode one clause. Clauses are independent: their first frames have no left context."""
        chunks = self._chunks
        state = StreamState.start(self._context, self._slots)
        clause, text_end = chunks.inbox[0].clause, chunks.inbox[0].text_end
        while not state.done:
            state = self._take_over(state, clause)
            plan = chunks.plan(state.ready, complete=state.ended)
            if plan.frames:
                window, state = state.take(plan.frames)
                await chunks.send(plan.frames, self._queue.decode(window), outputs, text_end=text_end)
            elif chunks.ended and not chunks.inbox and not state.ended:
                # The source ended within the clause.
                state = state.received(state.held[:0], last=True)
            elif not state.done:
                await chunks.wait(plan.wait_ms)

    def _take_over(self, state: StreamState, clause: int) -> StreamState:
        """Add the frames in the inbox that belong to ``clause`` to its state."""
        inbox = self._chunks.inbox
        while inbox and inbox[0].clause == clause and not state.ended:
            item = inbox.popleft()
            state = state.received(item.codes, last=item.last)
        return state
