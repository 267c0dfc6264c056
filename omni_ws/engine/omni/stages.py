"""The stages that speak an answer with an omni model: its Talker and its vocoder, each in a process of its own.

A stage opens a session in its StepProcess for each answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.base import OutputWriter, PartFailed
from omni_ws.engine.channel import Channel, Outputs, Stage, StageLink
from omni_ws.engine.frame_chunks import ChunkPace, ChunkPlan, ChunkPolicy, FrameChunks
from omni_ws.engine.omni.step_process import (
    AnswerEnd,
    AnswerRows,
    Codes,
    CodesEnd,
    PromptReset,
    PromptRows,
    StepProcess,
    StepSession,
    TalkerItem,
    VocoderInput,
)
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError
from omni_ws.profiler import events

#: The names in ``stage_sampling.talker``; ``max_tokens`` is the limit on the codec frames of the answer.
OMNI_TALKER_SAMPLING: Final = frozenset({"temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"})

#: How far the Talker may be ahead of the vocoder, in milliseconds of audio.
AHEAD_MS: Final = 5_000.0

#: The link from the Thinker to the Talker; its capacity is in rows. The Thinker waits while it is full.
ROWS_LINK: Final = StageLink(1_024, lambda item: len(item.tokens) if isinstance(item, PromptRows | AnswerRows) else 1)

#: The first item to the vocoder, so that an answer takes its slot there as soon as it has its slot in the Talker. An
#: answer whose Talker has ended still holds a slot of the vocoder, so a later request might be refused half-way.
_NO_CODES: Final = Codes(np.zeros((0, 0), np.int64))


class OmniTalker:
    """A Stage of one request: TalkerItems in, Codes out.

    ``settings`` of the session in the Talker's process are ``voice`` and the names in OMNI_TALKER_SAMPLING. The stage
    opens the session with the first row of the answer and holds the rows of the prompt until then: the user may speak
    for minutes, which must not occupy a slot. A source that ends without an answer, for instance with tool calls alone,
    takes no slot and makes no sound. ``frame_ms`` is the duration of a codec frame in milliseconds.
    """

    name = "talker"

    def __init__(self, process: StepProcess, settings: Mapping[str, Any], *, frame_ms: float) -> None:
        #: For the usage of the request: rows of prompt and answer that the Talker got, and frames that it made.
        self.prompt_tokens = 0
        self.tokens = 0
        #: Whether speech was cut off by ``max_tokens`` or by the longest speech of the model.
        self.cut = False
        self._process = process
        self._settings = settings
        self._granted = max(1, round(AHEAD_MS / frame_ms))
        self._speaks = False

    async def run(self, source: AsyncIterator[TalkerItem], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Feed rows to the process as they come; put its frames into ``sink``, as fast as the vocoder takes them."""
        assert sink is not None, "the Talker requires a stage after it"
        begun = await self._begun_answer(source)
        if not self._speaks:
            return
        async with self._process.open(self._settings) as session:
            await sink.put(_NO_CODES)
            # As many as fit into the link to the vocoder; then each frame that was put into the link.
            session.grant(self._granted)
            feeding = asyncio.create_task(self._feed(session, begun, source), name="talker rows")
            speaking = asyncio.create_task(self._speak(session, sink), name="talker codes")
            try:
                await asyncio.wait((feeding, speaking), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    await feeding
                await speaking
            finally:
                await end_tasks(feeding, speaking)
        # The speech may end before the text; the Thinker is to write the text to its end.
        async for _ in source:
            pass

    async def _begun_answer(self, source: AsyncIterator[TalkerItem]) -> list[TalkerItem]:
        """Return the items up to the first row of the answer; sets ``_speaks`` if there is such a row."""
        begun: list[TalkerItem] = []
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            if isinstance(item, PromptReset):
                begun.clear()
            begun.append(item)
            self._count(item)
            if self._speaks:
                break
        return begun

    async def _feed(self, session: StepSession, begun: list[TalkerItem], source: AsyncIterator[TalkerItem]) -> None:
        """Feed ``begun`` and the rest of ``source``; the end of the source ends the answer too."""
        for item in begun:
            await session.feed(item)
        begun.clear()  # not kept for as long as the answer lasts
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            self._count(item)
            await session.feed(item)
        await session.feed(AnswerEnd())

    async def _speak(self, session: StepSession, sink: Channel[Codes]) -> None:
        async for codes in events.generated(self.name, aiter(session)):
            frames = len(codes.codes)
            self.tokens += frames
            self.cut = codes.end is CodesEnd.LENGTH
            await sink.put(codes)
            if frames:
                session.grant(frames)

    def _count(self, item: TalkerItem) -> None:
        match item:
            case PromptRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
            case AnswerRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
                self._speaks = self._speaks or len(tokens) > 0
            case PromptReset():
                self.prompt_tokens = 0


class VocoderStage:
    """A Stage of one request: Codes in, AudioOutput to the client, in chunks that grow as time allows.

    The session in the vocoder's process, which gets ``settings``, is open from the first codes to the end. ``policy``
    controls the size of chunks. A vocoder that decodes in fixed windows has a ``block`` instead, the number of frames
    by which the window moves: codes are decoded at once, at most ``block`` frames at a time, so that the audio of one
    window does not wait for the next. ``clock`` is a monotonic clock in seconds.
    """

    name = "code2wav"

    def __init__(
        self,
        process: StepProcess,
        *,
        settings: Mapping[str, Any] | None = None,
        policy: ChunkPolicy | None = None,
        block: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._settings = settings or {}
        self._block = block
        policy, facts = policy or ChunkPolicy(), process.facts
        pace = ChunkPace(
            policy,
            frame_ms=facts["frame_ms"],
            context_frames=facts["context_frames"],
            decode_ms_per_frame=process.ms_per_frame,
        )
        self._chunks: FrameChunks[Codes] = FrameChunks(
            self.name,
            pace,
            sample_rate=facts["sample_rate"],
            # Enough for two chunks.
            most_held=2 * (block or policy.largest),
            clock=clock,
        )
        #: Codes to decode, (frames, codebooks), and whether they include the last ones of the Talker.
        self._ready: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._complete = False

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(self, source: AsyncIterator[Codes], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Decode the codes that ``source`` yields, up to its end, and write the audio to ``outputs``."""
        async with self._chunks.reading(source):
            if await self._chunks.has_more():
                async with self._process.open(self._settings) as session:
                    await self._decode_all(session, outputs)

    async def _decode_all(self, session: StepSession, outputs: OutputWriter) -> None:
        began = ended = False
        while not ended:
            self._take_over()
            plan = self._plan()
            # The Talker may say only after its last codes, which are decoded by then, that they were the last.
            rest_alone = self._complete and not len(self._ready)
            if plan.frames or (rest_alone and began):
                codes, self._ready = self._ready[: plan.frames], self._ready[plan.frames :]
                ended = self._complete and not len(self._ready)
                item = VocoderInput(codes, last=ended)
                await self._chunks.send(len(codes), session.decode(item), outputs)
                began = True
            elif rest_alone:
                return
            else:
                await self._chunks.wait(plan.wait_ms)

    def _plan(self) -> ChunkPlan:
        """Return how many frames to decode now."""
        if self._block is not None:
            return ChunkPlan(min(len(self._ready), self._block))
        return self._chunks.plan(len(self._ready), complete=self._complete)

    def _take_over(self) -> None:
        """Move the codes in the inbox to ``_ready``."""
        while self._chunks.inbox:
            item = self._chunks.inbox.popleft()
            if len(item.codes):
                self._ready = np.concatenate((self._ready, item.codes)) if len(self._ready) else item.codes
            self._complete = self._complete or item.end is not None
        # The source may also end without an item whose ``end`` is set.
        self._complete = self._complete or self._chunks.ended


class SpeechPart:
    """A Stage around a Talker or vocoder: when its process fails or has no free slot, the answer goes on as text.

    A PartFailed tells the client.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.name = stage.name
        self._stage = stage

    async def run(self, source: AsyncIterator[Any], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Run the stage. When it fails, read and drop the rest of ``source``."""
        try:
            await self._stage.run(source, sink, outputs)
        except (EngineFailed, EngineOverloaded) as error:
            told: OmniError
            if isinstance(error, EngineOverloaded):
                told = EngineOverloaded(error.message, param=error.param, retry_after_ms=error.retry_after_ms)
            else:
                told = EngineFailed(error.message, param=error.param)
            outputs.write(PartFailed(told))
            await outputs.drain()
            # Returning now would cancel the stages before this one, which write the text.
            async for _ in source:
                pass
