"""The stages that speak an answer with an omni model: its Talker and its vocoder, each in a process of its own.

A stage opens a session in its process, TalkerHost or VocoderHost, for each answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.engine.base import OutputWriter, PartFailed
from omni_ws.engine.channel import Channel, Outputs, Stage, StageLink
from omni_ws.engine.frame_chunks import ChunkPace, ChunkPlan, ChunkPolicy, FrameChunks
from omni_ws.engine.omni.step_model import (
    AnswerEnd,
    AnswerRows,
    Codes,
    CodesEnd,
    PromptReset,
    PromptRows,
    TalkerItem,
    VocoderInput,
    VocoderOutput,
)
from omni_ws.engine.omni.step_process import StepProcess, StepSession
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
    takes no slot and makes no sound.
    """

    name = "talker"

    def __init__(self, process: TalkerHost, settings: Mapping[str, Any]) -> None:
        #: For the usage of the request: rows of prompt and answer that the Talker got, and frames that it made.
        self.prompt_tokens = 0
        self.tokens = 0
        #: Whether speech was cut off by ``max_tokens`` or by the longest speech of the model.
        self.cut = False
        self._process = process
        self._settings = settings
        self._speaks = False

    async def run(self, source: AsyncIterator[TalkerItem], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Feed rows to the process as they come; put its frames into ``sink``, as fast as the vocoder takes them."""
        assert sink is not None, "the Talker requires a stage after it"
        begun = await self._begun_answer(source)
        if not self._speaks:
            return
        async with self._process.open(self._settings) as session:
            await sink.put(_NO_CODES)
            session.grant(max(1, round(AHEAD_MS / self._process.frame_ms)))
            feeding = asyncio.create_task(self._feed(session, begun, source), name="talker rows")
            speaking = asyncio.create_task(self._speak(session, sink), name="talker codes")
            try:
                await asyncio.wait((feeding, speaking), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    await feeding
                await speaking
            finally:
                for task in (feeding, speaking):
                    task.cancel()
                await asyncio.gather(feeding, speaking, return_exceptions=True)
        # The speech may end before the text; the Thinker is to write the text to its end.
        async for _ in source:
            pass

    async def _begun_answer(self, source: AsyncIterator[TalkerItem]) -> list[TalkerItem]:
        """Read the prompt and the first row of the answer; sets ``_speaks`` if there is such a row."""
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

    async def _feed(self, session: TalkerSession, begun: list[TalkerItem], source: AsyncIterator[TalkerItem]) -> None:
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

    async def _speak(self, session: TalkerSession, sink: Channel[Codes]) -> None:
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
        process: VocoderHost,
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
        #: Codes to decode, (frames, codebooks), and whether they include the last ones of the Talker.
        self._ready: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._complete = False

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(self, source: AsyncIterator[Codes], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Decode up to the end of ``source``."""
        async with self._chunks.reading(source):
            if await self._chunks.has_more():
                async with self._process.open(self._settings) as session:
                    await self._decode_all(session, outputs)

    async def _decode_all(self, session: VocoderSession, outputs: OutputWriter) -> None:
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
                await self._chunks.send(len(codes), _decoded(session, item), outputs)
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


async def _decoded(session: VocoderSession, item: VocoderInput) -> Samples:
    return (await session.decode(item)).samples


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


# The processes, and one session of each.

#: The limit on rows in a message: 64 hidden states of 3584 values are 0.9 MB.
ROWS_PER_MESSAGE: Final = 64
#: The estimated bytes of a message besides its rows.
_OVERHEAD_BYTES: Final = 128
#: The weight of the latest measurement in the moving average.
_SMOOTHING: Final = 0.3


class TalkerHost:
    """The process of a Talker. ``frame_ms`` is the duration of a codec frame in milliseconds."""

    def __init__(self, process: StepProcess, *, frame_ms: float) -> None:
        self.process = process
        self.frame_ms = frame_ms

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[TalkerSession]:
        """Open a session for one answer; leaving the block frees its slot at once. Raises as ``StepProcess.open``."""
        async with self.process.open(settings) as session:
            yield TalkerSession(session)


class TalkerSession:
    """One answer in the Talker's process. Iterating yields its Codes, up to the item whose ``end`` is set.

    ``feed`` and the iteration raise InvalidValue for input that the Talker refuses, and EngineFailed once its process
    has ended.
    """

    def __init__(self, session: StepSession) -> None:
        self._session = session

    async def feed(self, item: TalkerItem) -> None:
        """Send ``item`` to the process; waits while too much input of this session is on its way there."""
        for piece in _pieces(item):
            await self._session.feed(piece, _cost(piece))

    def grant(self, frames: int) -> None:
        """Allow ``frames`` more codec frames; without a grant the Talker makes none.

        OmniTalker grants as many as fit into its link to the vocoder: first AHEAD_MS, then each frame that it has put
        into the link.
        """
        self._session.grant(frames)

    async def __aiter__(self) -> AsyncIterator[Codes]:
        async for codes in self._session.made:
            yield codes
            if codes.end is not None:
                return


class VocoderHost:
    """The process of a vocoder.

    ``sample_rate`` is in Hz, ``frame_ms`` the duration of a codec frame in milliseconds. To decode a chunk costs as
    much as ``context_frames`` frames besides its own.
    """

    def __init__(self, process: StepProcess, *, sample_rate: int, frame_ms: float, context_frames: int) -> None:
        self.process = process
        self.sample_rate = sample_rate
        self.frame_ms = frame_ms
        self.context_frames = context_frames
        #: The average decoding time, queueing included, in milliseconds per frame with context; 0 if unknown.
        self.ms_per_frame = 0.0

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[VocoderSession]:
        """Open a session for one answer; leaving the block frees its slot at once. Raises as ``StepProcess.open``."""
        async with self.process.open(settings) as session:
            yield VocoderSession(self, session)

    def note(self, frames: int, seconds: float) -> None:
        """Add a measurement to the average: decoding ``frames`` frames took ``seconds``."""
        if frames:
            per_frame = seconds * 1000 / (frames + self.context_frames)
            weight = _SMOOTHING if self.ms_per_frame else 1.0
            self.ms_per_frame += weight * (per_frame - self.ms_per_frame)


class VocoderSession:
    """One answer in the vocoder's process."""

    def __init__(self, host: VocoderHost, session: StepSession) -> None:
        self._host = host
        self._session = session

    async def decode(self, item: VocoderInput) -> VocoderOutput:
        """Decode the next codes; the process batches them with codes of other sessions. Calls do not overlap.

        Raises InvalidValue for codes that the vocoder refuses, EngineFailed once its process has ended.
        """
        began = time.monotonic()
        await self._session.feed(item, item.codes.nbytes + _OVERHEAD_BYTES)
        made: VocoderOutput = await anext(self._session.made)
        self._host.note(len(item.codes), time.monotonic() - began)
        return made


def _pieces(item: TalkerItem) -> Iterator[TalkerItem]:
    """Cut an item with many rows into short messages, so that a ``close`` never waits behind a long one."""
    while isinstance(item, PromptRows | AnswerRows) and len(item.tokens) > ROWS_PER_MESSAGE:
        piece, item = item.split(ROWS_PER_MESSAGE)
        yield piece
    yield item


def _cost(item: TalkerItem) -> int:
    if isinstance(item, PromptRows | AnswerRows):
        return item.tokens.nbytes + item.hidden.nbytes + _OVERHEAD_BYTES
    return _OVERHEAD_BYTES
