"""VocoderStage: has the codes of an answer decoded, in chunks that are small at first and grow as time allows."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples
from omni_ws.engine.base import EngineOutput
from omni_ws.engine.channel import Channel
from omni_ws.engine.chunk_policy import ChunkPace, ChunkPlan, ChunkPolicy
from omni_ws.engine.frame_chunks import FrameChunks
from omni_ws.engine.omni.items import Codes, VocoderInput
from omni_ws.engine.omni.sessions import VocoderProcess, VocoderSession


class VocoderStage:
    """A Stage of one answer: Codes in, AudioOutput to the client.

    ``settings`` are those of the vocoder's session, which is open from the first codes to the end. ``policy`` controls
    the size of chunks. A vocoder that decodes in fixed windows has a ``block`` instead, the frames by which a window
    moves on: codes are handed on at once, at most so many at a time, lest the sound of one window wait for the next.
    ``clock`` is a monotonic clock in seconds.
    """

    name = "code2wav"

    def __init__(
        self,
        process: VocoderProcess,
        *,
        settings: Mapping[str, Any] | None = None,
        policy: ChunkPolicy | None = None,
        block: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._settings = settings or {}
        self._block = block
        policy = policy or ChunkPolicy()
        pace = ChunkPace(
            policy,
            frame_ms=process.frame_ms,
            context_frames=process.context_frames,
            decode_ms_per_frame=process.ms_per_frame,
        )
        self._chunks: FrameChunks[Codes] = FrameChunks(
            self.name,
            pace,
            sample_rate=process.sample_rate,
            # Enough for two chunks.
            most_held=2 * (block or policy.largest),
            clock=clock,
        )
        #: Codes that came and were not handed on, (frames, codebooks), and whether the Talker has made its last.
        self._ready: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._complete = False

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(
        self, source: AsyncIterator[Codes], sink: Channel[Any] | None, outputs: Channel[EngineOutput]
    ) -> None:
        """Decode up to the end of ``source``."""
        async with self._chunks.reading(source):
            if await self._chunks.has_more():
                async with self._process.open(self._settings) as session:
                    await self._decode_all(session, outputs)

    async def _decode_all(self, session: VocoderSession, outputs: Channel[EngineOutput]) -> None:
        began = ended = False
        while not ended:
            self._take_over()
            plan = self._plan()
            # The last codes may be known as such only after they were handed on.
            rest_alone = self._complete and not len(self._ready)
            if plan.frames or (rest_alone and began):
                codes, self._ready = self._ready[: plan.frames], self._ready[plan.frames :]
                ended = self._complete and not len(self._ready)
                item = VocoderInput(codes, last=ended)
                await self._chunks.send(len(codes), _decoded(session, item), outputs)
                began = True
            elif rest_alone:
                return
            else:
                await self._chunks.wait(plan.wait_ms)

    def _plan(self) -> ChunkPlan:
        """Return how many frames to hand on now."""
        if self._block is not None:
            return ChunkPlan(min(len(self._ready), self._block))
        return self._chunks.plan(len(self._ready), complete=self._complete)

    def _take_over(self) -> None:
        """Add the codes in the inbox to those that are ready."""
        while self._chunks.inbox:
            item = self._chunks.inbox.popleft()
            if len(item.codes):
                self._ready = np.concatenate((self._ready, item.codes)) if len(self._ready) else item.codes
            self._complete = self._complete or item.end is not None
        # A Talker that ended without saying so has no more codes either.
        self._complete = self._complete or self._chunks.ended


async def _decoded(session: VocoderSession, item: VocoderInput) -> Samples:
    return (await session.decode(item)).samples
