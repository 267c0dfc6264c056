"""Speaker: a voice made of a Talker on vLLM, which generates codec frames, and Code2Wav, which decodes the frames.

A TalkerProfile is the prompt format and token layout of a Talker; a FrameLayout is the encoding of codec frames by its
tokens. The DecodeQueue decodes the chunks of all requests in batches. Each chunk is decoded within a CodecWindow, which
adds frames on both sides, so that the chunk has the same samples as if the whole clause were decoded in one piece.
"""

from __future__ import annotations

import asyncio
import time
import tomllib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import FinishReason, Usage
from omni_ws.engine.base import EngineCapabilities, EngineState, Finished, GenerationRequest, OutputWriter, incident
from omni_ws.engine.channel import (
    CODE2WAV_PARAMETERS,
    Channel,
    ChunkPace,
    ChunkPolicy,
    FrameChunks,
    Stage,
    StageLink,
    frames_link,
    pipeline,
    whole_numbers,
)
from omni_ws.engine.clauses import (
    BEGIN_AFTER,
    ClauseSplitter,
    TextClause,
    clauses_as_they_come,
    is_being_written,
    is_speakable,
)
from omni_ws.engine.omni.step_process import (
    OmniTalker,
    VocoderStage,
)
from omni_ws.engine.spoken.languages import prepare
from omni_ws.engine.tts.speech_engine import SpokenClauses, speech_capabilities
from omni_ws.engine.vllm.language_model import LanguageModel
from omni_ws.engine.vllm.sampling import SEEDS
from omni_ws.errors import EngineFailed, InvalidValue, OmniError
from omni_ws.profiler import events

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from omni_ws.engine.vllm.snac_decoder import SnacDecoder


class Code2Wav:
    """A Stage of one request that decodes speech: CodecFrames in, AudioOutputs to the client.

    ``queue`` decodes the chunks of all requests. ``sample_rate`` (in Hz) and ``frame_ms`` (the duration of a frame in
    milliseconds) are those of the queue's decoder, ``slots`` is the number of tokens in a frame. ``policy`` controls
    the size of chunks.
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
    ) -> None:
        self._queue = queue
        self._slots = slots
        policy = policy or ChunkPolicy()
        around = 2 * CONTEXT_FRAMES
        pace = ChunkPace(policy, frame_ms=frame_ms, context_frames=around, decode_ms_per_frame=queue.ms_per_frame)
        self._chunks: FrameChunks[CodecFrames] = FrameChunks(
            self.name,
            pace,
            sample_rate=sample_rate,
            # Enough for two chunks.
            most_held=2 * policy.largest + CONTEXT_FRAMES,
            clock=time.monotonic,
        )

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(self, source: AsyncIterator[CodecFrames], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Decode each clause, and write its audio to ``outputs``, up to the end of ``source``.

        Raises the errors of ``DecodeQueue.decode``.
        """
        async with self._chunks.reading(source):
            while await self._chunks.has_more():
                await self._decode_clause(outputs)

    async def _decode_clause(self, outputs: OutputWriter) -> None:
        """Decode one clause. Clauses are independent: their first frames have no left context."""
        chunks = self._chunks
        state = StreamState.start(self._slots)
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


#: The weight of the latest measurement in the moving average.
_SMOOTHING = 0.1


class DecodeQueue:
    """A queue of windows that a thread of its own decodes in batches. For use on one event loop.

    The function ``decode`` gets up to ``batch`` windows. The queue needs no limit, because a request submits one window
    at a time.

    ``ms_per_frame`` is the moving average of the time from the submission of a window to its result, divided by the
    window's frames, in milliseconds; 0 before the first measurement.
    """

    def __init__(self, decode: Callable[[Sequence[CodecWindow]], list[Samples]], *, batch: int = 16) -> None:
        self._decode_windows = decode
        self._batch = batch
        self._waiting: deque[tuple[CodecWindow, asyncio.Future[Samples]]] = deque()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="code2wav")
        self._work: asyncio.Task[None] | None = None
        self._closed = False
        self.ms_per_frame = 0.0

    def measure_anew(self) -> None:
        """Forget the decoding times measured so far, such as those of a warm-up."""
        self.ms_per_frame = 0.0

    async def decode(self, window: CodecWindow) -> Samples:
        """Return the samples of the ``keep`` frames of ``window``.

        Raises EngineFailed on a closed queue, and the decoder's exceptions. If the call is cancelled, a window that is
        not being decoded yet is dropped.
        """
        if self._closed:
            raise EngineFailed("the decoder is closed")
        done: asyncio.Future[Samples] = asyncio.get_running_loop().create_future()
        self._waiting.append((window, done))
        if self._work is None:
            self._work = asyncio.create_task(self._drain(), name="code2wav decoding")
        began = time.perf_counter()
        samples = await done
        took = (time.perf_counter() - began) * 1000 / len(window.codes)
        self.ms_per_frame += _SMOOTHING * (took - self.ms_per_frame) if self.ms_per_frame else took
        return samples

    async def close(self) -> None:
        """Close the queue: wait for the current batch, and fail the waiting windows. Idempotent."""
        self._closed = True
        while self._waiting:
            _, done = self._waiting.popleft()
            if not done.done():
                done.set_exception(EngineFailed("the decoder is closed"))
        if self._work is not None:
            await asyncio.wait([self._work])
        self._executor.shutdown()

    async def _drain(self) -> None:
        """Decode batch after batch until no window waits."""
        loop = asyncio.get_running_loop()
        try:
            while batch := self._next_batch():
                windows = [window for window, _ in batch]
                try:
                    decoded = await loop.run_in_executor(self._executor, self._decode_windows, windows)
                except Exception as error:
                    for _, done in batch:
                        if not done.done():
                            done.set_exception(error)
                else:
                    for (_, done), samples in zip(batch, decoded, strict=True):
                        if not done.done():
                            done.set_result(samples)
        finally:
            self._work = None

    def _next_batch(self) -> list[tuple[CodecWindow, asyncio.Future[Samples]]]:
        """Remove and return the next windows whose callers still wait for them."""
        batch: list[tuple[CodecWindow, asyncio.Future[Samples]]] = []
        while self._waiting and len(batch) < self._batch:
            window, done = self._waiting.popleft()
            if not done.done():
                batch.append((window, done))
        return batch


#: The number of context frames on either side of a chunk, which is exact for SNAC at 24 kHz: the receptive field of a
#: convolutional codec is a few frames. With so many frames on both sides, the wanted frames decode to exactly the same
#: samples as in the whole clause; the samples of the context are discarded.
CONTEXT_FRAMES: Final = 3


@dataclass(frozen=True, slots=True)
class CodecWindow:
    """The input of one decoding: codec frames (``codes``), some of which are only context.

    Only the samples of ``keep`` frames after the first ``skip`` frames are wanted. ``first_frame`` is the position of
    ``codes[0]`` in its clause.
    """

    codes: Codes
    first_frame: int
    skip: int
    keep: int


@dataclass(frozen=True, slots=True)
class StreamState:
    """The state of decoding one clause, as an immutable value.

    ``held`` are the frames that are still needed, ``first_frame`` is the position of ``held[0]`` in the clause, and
    ``emitted`` the position of the next frame to decode. ``left`` and ``right`` are the numbers of context frames on
    either side of a chunk.
    """

    held: Codes
    left: int = CONTEXT_FRAMES
    right: int = CONTEXT_FRAMES
    first_frame: int = 0
    emitted: int = 0
    ended: bool = False

    @classmethod
    def start(cls, slots: int, *, left: int = CONTEXT_FRAMES, right: int = CONTEXT_FRAMES) -> StreamState:
        """Return the state at the beginning of a clause; ``slots`` is the number of tokens in a frame."""
        return cls(np.empty((0, slots), np.int32), left, right)

    @property
    def ready(self) -> int:
        """The number of frames that can be decoded now; later frames still lack their right context."""
        coming = self.first_frame + len(self.held) - self.emitted
        return coming if self.ended else max(0, coming - self.right)

    @property
    def done(self) -> bool:
        """Whether the whole clause has been decoded."""
        return self.ended and self.ready == 0

    def received(self, codes: Codes, *, last: bool = False) -> StreamState:
        """Return the state after further frames (``codes``) have arrived; ``last`` ends the clause.

        Raises ValueError if the clause has ended already.
        """
        if self.ended:
            raise ValueError("the clause has already ended")
        return replace(self, held=np.concatenate((self.held, codes)), ended=last)

    def take(self, frames: int) -> tuple[CodecWindow, StreamState]:
        """Return the window that decodes the next ``frames`` frames (1 to ``ready``), and the state after it.

        Raises ValueError for another number of frames.
        """
        if not 1 <= frames <= self.ready:
            raise ValueError(f"frames must be 1 to {self.ready}, got {frames}")
        start = self.emitted - self.first_frame
        left = min(start, self.left)
        end = min(len(self.held), start + frames + self.right)
        window = CodecWindow(self.held[start - left : end], self.emitted - left, left, frames)
        emitted = self.emitted + frames
        unneeded = max(0, emitted - self.left - self.first_frame)
        return window, replace(
            self, held=self.held[unneeded:].copy(), first_frame=self.first_frame + unneeded, emitted=emitted
        )


#: The codes of whole frames: int32 of shape (frames, slots), each an index into its slot's codebook.
Codes: TypeAlias = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLayout:
    """The encoding of codec frames by a Talker's tokens.

    A frame has a fixed number of slots, with one token each. The token in slot ``i`` is ``first_token + i *
    codebook_size + code``, where the code is an index into codebook ``slots[i]``. Codes of the same codebook are in
    order of time: SNAC at 24 kHz has three codebooks, with 1, 2 and 4 codes per frame. Raises ValueError for numbers
    that are no layout.
    """

    first_token: int
    codebook_size: int = 4096
    slots: tuple[int, ...] = (0, 1, 2, 2, 1, 2, 2)

    def __post_init__(self) -> None:
        books = sorted(set(self.slots))
        if not self.slots or books != list(range(len(books))):
            raise ValueError("slots must contain each codebook number 0, 1, … at least once")
        if self.first_token < 0 or self.codebook_size < 1:
            raise ValueError("first_token must not be negative, and codebook_size must be at least 1")

    @property
    def end_token(self) -> int:
        """The token ID after the last codec token."""
        return self.first_token + len(self.slots) * self.codebook_size

    @property
    def codes_per_frame(self) -> tuple[int, ...]:
        """The number of codes in a frame, for each codebook."""
        return tuple(self.slots.count(book) for book in range(max(self.slots) + 1))

    def tokens(self, codes: Codes) -> list[int]:
        """Return the tokens that encode ``codes``."""
        offsets = self.first_token + np.arange(len(self.slots)) * self.codebook_size
        return [int(token) for token in (codes + offsets).reshape(-1)]

    def codes(self, tokens: Sequence[int]) -> Codes:
        """Return the codes that ``tokens`` encode, which must be whole frames.

        Raises ValueError for an incomplete frame, or a token in a wrong slot.
        """
        places = np.asarray(tokens, dtype=np.int64).reshape(-1, len(self.slots)) - self.first_token
        codes = places - np.arange(len(self.slots)) * self.codebook_size
        wrong = np.argwhere((codes < 0) | (codes >= self.codebook_size))
        if len(wrong):
            frame, slot = wrong[0]
            token = int(places[frame, slot]) + self.first_token
            raise ValueError(f"token {token} is not valid in slot {slot} of frame {frame}")
        return codes.astype(np.int32)

    def take_frames(self, tokens: list[int]) -> Codes:
        """Remove the whole frames at the beginning of ``tokens``, often none, and return their codes.

        Raises ValueError for a token in a wrong slot.
        """
        whole = len(tokens) - len(tokens) % len(self.slots)
        codes = self.codes(tokens[:whole])
        del tokens[:whole]
        return codes

    def books(self, codes: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Return an array for each codebook with its codes in order of time.

        ``codes`` has the shape (…, frames, slots), a returned array the shape (…, frames × codes per frame).
        """
        slots = np.array(self.slots)
        return [
            codes[..., slots == book].reshape(*codes.shape[:-2], -1).astype(np.int64) for book in range(max(slots) + 1)
        ]


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """The next frames of a clause. ``last`` marks the end of the clause; such an item may have no frames.

    Clauses are numbered from 0 within an answer, and decoded independently of one another. ``text_end`` is the end of
    the clause, as an index in the text of the answer.
    """

    clause: int
    codes: Codes
    last: bool
    text_end: int


# Talker: generates codec frames for the text of an answer, clause by clause, with a model of its own.


#: The names in ``stage_sampling.talker``. ``max_tokens`` limits the codec tokens of the whole answer.
TALKER_SAMPLING: Final = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "max_tokens"}
)

#: The link from the Thinker, whose items are pieces of text: 2,000 characters, or about two minutes of speech.
TEXT_LINK: Final = StageLink(2_000, len)


#: The limits of the first clause in characters (see ClauseSplitter). Other clauses may be longer; the first one is kept
#: short, because it determines the time to first audio.
FIRST_COMMA_AFTER: Final = 12
FIRST_LONGEST: Final = 90


class TalkerModel(LanguageModel):
    """A speech language model on vLLM, with a logits processor that allows only tokens of the codec's pattern."""

    def _open(self, args: AsyncEngineArgs) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from omni_ws.engine.vllm.workers import processor_name

        config = args.create_engine_config()
        # The configuration decides which model runner is used, and so which processor.
        config.model_config.logits_processors = [
            *(config.model_config.logits_processors or ()),
            processor_name(config),
        ]
        return AsyncLLM.from_vllm_config(config, disable_log_stats=args.disable_log_stats)


class Talker:
    """A Stage of one request that generates speech: pieces of text in, CodecFrames out.

    Each clause is one request to vLLM, and so has the prosody of a complete utterance. While a clause is generated,
    further text waits in the link. ``comma_after`` and ``longest`` are the limits of the first clause in characters,
    see ClauseSplitter; for ``begin_after_sec`` see ``clauses_as_they_come``, for ``lexicon`` see GenerationRequest.

    ``sampling`` is ``stage_sampling.talker``. Raises InvalidValue for an unknown voice, and for sampling parameters
    that are unknown or that vLLM refuses.
    """

    name = "talker"

    def __init__(
        self,
        model: TalkerModel,
        profile: TalkerProfile,
        *,
        request_id: str,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        priority: int = 0,
        comma_after: int = FIRST_COMMA_AFTER,
        longest: int = FIRST_LONGEST,
        begin_after_sec: float | None = None,
        lexicon: Mapping[str, str] | None = None,
    ) -> None:
        #: Prompt tokens, generated tokens and whole frames, for the usage of the request.
        self.prompt_tokens = 0
        self.tokens = 0
        self.frames = 0
        #: Whether speech was cut off by ``max_tokens`` or by the limit of a clause.
        self.cut = False
        self._model = model
        self._profile = profile
        self._request_id = request_id
        self._voice = voice
        self._priority = priority
        self._spoken: SpokenClauses | None = None
        self._splitter = ClauseSplitter(first_comma_after=comma_after, first_longest=longest)
        if lexicon:
            self._spoken = SpokenClauses("", lexicon, first_comma_after=comma_after, first_longest=longest)
            self._splitter = self._spoken
        self._begin_after_sec = begin_after_sec
        asked = dict(sampling or {})
        if unknown := asked.keys() - TALKER_SAMPLING:
            raise InvalidValue(
                "unknown sampling parameter of the Talker", param=f"stage_sampling.talker.{min(unknown)}"
            )
        self._tokens_left: int | None = asked.pop("max_tokens", None)
        self._sampling = {**profile.sampling, **asked}
        self._clauses = 0
        profile.spoken_text("", voice)
        self._parameters(max_tokens=1 if self._tokens_left is None else self._tokens_left)

    async def run(self, source: AsyncIterator[str], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Generate speech clause by clause, each clause as soon as its text is complete.

        A clause without letters and digits is skipped, and so are all clauses once ``max_tokens`` is used up. Raises
        EngineFailed if the model fails or generates anything but codec frames.
        """
        assert sink is not None, "the Talker requires a stage after it"
        come = clauses_as_they_come(source, self._splitter, begin_after_sec=self._begin_after_sec)
        async with aclosing(come) as clauses:
            async for clause in clauses:
                await self._speak(clause, sink)

    async def _speak(self, clause: TextClause, sink: Channel[CodecFrames]) -> None:
        """Generate the frames of one clause.

        The length of the text limits the number of frames, since a model may fail to end its speech.
        """
        if not is_speakable(clause.text):
            return
        slots = len(self._profile.layout.slots)
        most = self._profile.most_frames(clause.text) * slots
        if self._tokens_left is not None:
            most = min(most, self._tokens_left - self._tokens_left % slots)
            if most <= 0:
                self.cut = True
                return
        number, self._clauses = self._clauses, self._clauses + 1
        text_end = clause.end if self._spoken is None else self._spoken.written.written_end(clause.end)
        prompt = self._prompt(clause.text)
        self.prompt_tokens += len(prompt)
        incomplete: list[int] = []  # the tokens of a frame that is not complete; dropped at the end
        parameters = self._parameters(max_tokens=most, clause=number)
        generation = self._model.generate(
            {"prompt_token_ids": prompt},
            parameters,
            f"{self._request_id}-talker-{number}",
            priority=self._priority,
        )
        # Closing the generator aborts the request in vLLM.
        async with aclosing(generation):
            async for output in events.generated(self.name, generation):
                tokens = [token for token in output.outputs[0].token_ids if token not in self._profile.stop]
                self._count(len(tokens))
                incomplete += tokens
                try:
                    codes = self._profile.layout.take_frames(incomplete)
                except ValueError as error:
                    raise EngineFailed("the Talker generated a token outside its codec pattern") from error
                if output.finished:
                    self._note_end(output.outputs[0].finish_reason)
                if len(codes) or output.finished:
                    self.frames += len(codes)
                    await sink.put(CodecFrames(number, codes, output.finished, text_end))

    def _prompt(self, clause: str) -> list[int]:
        text = self._profile.spoken_text(clause, self._voice)
        tokens = self._model.llm.get_tokenizer().encode(text, add_special_tokens=False)
        return self._profile.prompt(tokens)

    def _count(self, tokens: int) -> None:
        self.tokens += tokens
        if self._tokens_left is not None:
            self._tokens_left -= tokens

    def _note_end(self, reason: str | None) -> None:
        """Note whether the clause was cut off, by vLLM's finish ``reason``. Raises EngineFailed for other reasons."""
        if reason == "length":
            self.cut = True
        elif reason != "stop":
            raise EngineFailed(f"unexpected finish reason of the Talker: {reason!r}")

    def _parameters(self, *, max_tokens: int, clause: int = 0) -> SamplingParams:
        """Return the sampling parameters of a clause. Raises InvalidValue."""
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        from omni_ws.engine.vllm.workers import Pattern, extra_arguments

        layout = self._profile.layout
        pattern = Pattern(layout.first_token, layout.codebook_size, len(layout.slots), self._profile.stop[0])
        sampling = dict(self._sampling)
        try:
            if sampling.get("seed") is not None:
                sampling["seed"] = sampling["seed"] % (SEEDS // 2) + clause  # -1 would be no seed
            return SamplingParams(
                **sampling,
                max_tokens=max_tokens,
                stop_token_ids=list(self._profile.stop),
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                skip_clone=True,
                extra_args=extra_arguments(pattern),
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            field = getattr(error, "parameter", None)
            place = f"stage_sampling.talker.{field}" if field in TALKER_SAMPLING else "stage_sampling.talker"
            raise InvalidValue(f"sampling parameters not supported by the Talker: {error}", param=place) from error


TokenIds: TypeAlias = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerProfile:
    """The prompt format, token layout, voices and default sampling of a family of models.

    ``read_profile`` explains the fields. Raises ValueError for contradictory values, and KeyError or IndexError for a
    ``text`` with fields other than ``{voice}`` and ``{text}``.
    """

    name: str
    text: str
    layout: FrameLayout
    codec: str
    prefix: TokenIds = ()
    suffix: TokenIds = ()
    stop: TokenIds = ()
    voices: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: A clause is cut off after ``spare_frames`` plus this many frames for each of its characters, in case the model
    #: does not stop. Slow speech takes about one frame per character.
    frames_per_character: float = 3.0
    spare_frames: int = 36

    def __post_init__(self) -> None:
        if not self.stop:
            raise ValueError("stop must have at least one token id")
        if any(self.layout.first_token <= token < self.layout.end_token for token in self.stop):
            raise ValueError("stop must not contain a codec token")
        self.text.format(voice="", text="")

    def spoken_text(self, clause: str, voice: str | None) -> str:
        """Return the text of a clause's prompt, with ``voice`` (None: the default) inserted.

        Raises InvalidValue for an unknown voice.
        """
        if voice is None:
            return self.text.format(voice=next(iter(self.voices.values()), ""), text=clause)
        if voice not in self.voices:
            raise InvalidValue(f"unknown voice {voice!r}; available: {', '.join(self.voices) or 'none'}", param="voice")
        return self.text.format(voice=self.voices[voice], text=clause)

    def prompt(self, text_tokens: list[int]) -> list[int]:
        """Return the token IDs of the prompt for ``text_tokens``, without control and codec tokens among these."""
        control = {*self.prefix, *self.suffix, *self.stop}
        plain = [
            token
            for token in text_tokens
            if token not in control and not self.layout.first_token <= token < self.layout.end_token
        ]
        return [*self.prefix, *plain, *self.suffix]

    def most_frames(self, clause: str) -> int:
        """Return the limit on the number of frames for a clause."""
        return self.spare_frames + round(self.frames_per_character * len(clause))


# Orpheus and Maya1 are based on Llama 3, where 128000 begins a text and 128009 ends a message; IDs from 128256 are new.
_LLAMA: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "prefix": (128259, 128000),
        "suffix": (128009, 128260, 128261, 128257),
        "stop": (128258,),
        "layout": FrameLayout(first_token=128266),
        "codec": "hubertsiuzdak/snac_24khz",
    }
)

ORPHEUS: Final = TalkerProfile(
    name="orpheus",
    text="{voice}: {text}",
    voices={name: name for name in ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")},
    sampling={"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3},
    **_LLAMA,
)

#: The voices of Maya1 are descriptions; a profile in a file can define others.
MAYA1: Final = TalkerProfile(
    name="maya1",
    text='<description="{voice}"> {text}',
    voices={
        "woman": "Realistic female voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
        "man": "Realistic male voice in the 30s with american accent. Normal pitch, warm timbre, natural pacing.",
    },
    sampling={"temperature": 0.4, "top_p": 0.9, "repetition_penalty": 1.1},
    **_LLAMA,
)

_KNOWN: Final = {profile.name: profile for profile in (ORPHEUS, MAYA1)}


def find_profile(wanted: str | None, model: str) -> TalkerProfile:
    """Return the profile with the name or file ``wanted``; with None, the profile whose name is part of ``model``.

    Raises EngineFailed, with a message for the operator.
    """
    if wanted is None:
        for name, profile in _KNOWN.items():
            if name in Path(model).name.lower():
                return profile
        raise EngineFailed(
            f"no profile known for the Talker {model}; set one with --vllm.talker-profile: "
            f"{', '.join(_KNOWN)}, or a TOML file"
        )
    if wanted in _KNOWN:
        return _KNOWN[wanted]
    return read_profile(Path(wanted))


def read_profile(path: Path) -> TalkerProfile:
    """Read a profile from a TOML file. Raises EngineFailed, with a message for the operator.

    The profile's name is that of the file, without its ending. All keys but ``text``, ``codec``, ``stop`` and
    ``first_token`` may be left out, as here ``frames_per_character`` and ``spare_frames`` (see TalkerProfile)::

        prefix = [128259, 128000]                        # token IDs before the text
        suffix = [128009, 128260, 128261, 128257]        # and after it
        text = "{voice}: {text}"                         # the template of the text
        stop = [128258]                                  # token IDs that end the speech
        first_token = 128266                             # the first codec token
        codebook_size = 4096
        slots = [0, 1, 2, 2, 1, 2, 2]                    # the codebook of each token of a frame
        codec = "hubertsiuzdak/snac_24khz"               # a name, or a folder next to this file
        [voices]                                         # name = replacement of {voice}; the first is the default
        tara = "tara"
        [sampling]                                       # defaults
        temperature = 0.6
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EngineFailed(f"Talker profile {path} not found; built-in: {', '.join(_KNOWN)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise EngineFailed(f"cannot read the Talker profile {path}: {error}") from error
    try:
        return _profile(path, values)
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise EngineFailed(f"invalid Talker profile {path}: {error!r}") from error


def _profile(path: Path, values: dict[str, Any]) -> TalkerProfile:
    known = {entry.name for entry in fields(TalkerProfile)} - {"name", "layout"}
    of_layout = {"first_token", "codebook_size", "slots"}
    if unknown := values.keys() - known - of_layout:
        raise ValueError(f"unknown keys: {', '.join(sorted(unknown))}")
    if not isinstance(values["text"], str) or "{text}" not in values["text"]:
        raise ValueError("text must contain {text}")
    folder = path.parent / str(values["codec"])
    if folder.is_dir():
        values["codec"] = str(folder)
    layout = {key: values.pop(key) for key in of_layout & values.keys()}
    return msgspec.convert({**values, "name": path.stem, "layout": layout}, TalkerProfile)


# Speaker: a voice made of a Talker on vLLM and a neural codec. ``staged_speech`` reads aloud with any Talker.


async def staged_speech(
    request: GenerationRequest,
    text: AsyncIterator[str],
    out: OutputWriter,
    stages: Sequence[Stage[Any]],
    links: Sequence[StageLink],
) -> None:
    """Speak ``text`` through ``stages``, and write a Finished with the usage, also for an empty text.

    The last two stages are a Talker and its vocoder. The finish reason is LENGTH if the speech was cut off, else STOP.
    Sets ``request.meter.read``. Raises OmniErrors: other errors become an EngineFailed.
    """
    talker, vocoder = stages[-2:]
    assert isinstance(talker, Talker | OmniTalker)
    assert isinstance(vocoder, Code2Wav | VocoderStage)

    def usage() -> Usage:
        audio_ms = round(vocoder.audio_ms)
        return Usage(input_tokens=talker.prompt_tokens, output_tokens=talker.tokens, output_audio_ms=audio_ms)

    request.meter.read = lambda: usage() if talker.prompt_tokens else None
    try:
        await pipeline(text, stages, links, out)
    except OmniError:
        raise
    except Exception as error:
        raise incident("the Talker failed", error, request_id=request.request_id) from error
    out.write(Finished(FinishReason.LENGTH if talker.cut else FinishReason.STOP, usage()))


#: The names in ``stage_params.talker``: the limits of the first clause in characters.
_TALKER_PARAMETERS: Final = frozenset({"first_comma_after", "first_longest"})
#: Window lengths, in frames, that the first chunks of an answer typically have.
_WARM_UP_FRAMES: Final = (4, 5, 7, 8, 10, 14, 22, 30)


class Speaker:
    """A Voice that can also speak the answers of a Thinker. It owns the Talker's model and the codec's decoder.

    ``talker`` is the model's name or folder, ``args`` are vLLM's engine arguments for the model; ``profile`` is the
    name or file of its TalkerProfile, None to find it by the model's name. ``device`` is the device for the codec; None
    for a GPU if there is one. Raises ConfigurationError.
    """

    name = Talker.name
    hosts: tuple[str, ...] = ()
    measures_memory = True

    def __init__(
        self,
        talker: str,
        *,
        profile: str | None = None,
        args: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        self.model = Path(talker).name if Path(talker).is_dir() else talker
        try:
            self.profile: TalkerProfile = find_profile(profile, talker)
        except EngineFailed as error:
            raise ConfigurationError([f"vllm.talker_profile: {error.message}"]) from error
        self.talker = TalkerModel("Talker", {"model": talker, **(args or {})}, setting="vllm.talker_args")
        self._device = device
        self._decoder: SnacDecoder | None = None
        self._queue: DecodeQueue | None = None

    @property
    def state(self) -> EngineState:
        return self.talker.state

    @property
    def capabilities(self) -> EngineCapabilities:
        return speech_capabilities(
            self.voices,
            stages=(Talker.name, Code2Wav.name),
            stage_sampling=self.sampling_names,
            stage_params=self.parameter_names,
            priority=self.talker.by_priority,
        )

    def describe(self) -> tuple[str, ...]:
        return ()

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices, the default first."""
        return tuple(self.profile.voices)

    @property
    def sampling_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_sampling``."""
        return frozenset(f"talker.{name}" for name in TALKER_SAMPLING)

    @property
    def parameter_names(self) -> frozenset[str]:
        """The names for ``EngineCapabilities.stage_params``."""
        names = {"talker": _TALKER_PARAMETERS, "code2wav": CODE2WAV_PARAMETERS}
        return frozenset(f"{stage}.{name}" for stage in names for name in names[stage])

    @property
    def links(self) -> tuple[StageLink, StageLink]:
        """The links before the Talker and before Code2Wav. Raises EngineFailed before ``start``."""
        return TEXT_LINK, frames_link(self._started()[0].frame_ms)

    async def start(self) -> None:
        """Load and warm up both models. Raises ConfigurationError or EngineFailed, after releasing both."""
        try:
            self._decoder = await asyncio.to_thread(self._load_decoder)
            self._queue = DecodeQueue(self._decoder.decode)
            await self._warm_up(self._queue)
            await self.talker.start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Release both models. Idempotent."""
        queue, self._queue, self._decoder = self._queue, None, None
        if queue is not None:
            await queue.close()
        await self.talker.stop()

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        if self.state is not EngineState.OK:
            raise EngineFailed("the Talker is not running", fatal=True)
        await prepare(request.lexicon)
        stages = self.stages(
            request.request_id,
            voice=request.voice,
            sampling=request.stage_sampling.get(Talker.name),
            parameters=request.stage_params,
            priority=request.options.priority if self.talker.by_priority else 0,
            being_written=is_being_written(request.input),
            lexicon=request.lexicon,
        )
        await staged_speech(request, text, out, stages, self.links[1:])

    def stages(
        self,
        request_id: str,
        *,
        voice: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Mapping[str, Any]] | None = None,
        priority: int = 0,
        being_written: bool = False,
        lexicon: Mapping[str, str] | None = None,
    ) -> tuple[Talker, Code2Wav]:
        """Return the Talker and Code2Wav of one request; the Talker takes pieces of text.

        ``sampling`` is ``stage_sampling.talker``, ``parameters`` all of ``stage_params``. With ``being_written`` (see
        ``is_being_written``) speech begins early. Raises InvalidValue, and EngineFailed before ``start``.
        """
        decoder, queue = self._started()
        limits = whole_numbers("talker", _TALKER_PARAMETERS, parameters)
        talker = Talker(
            self.talker,
            self.profile,
            request_id=request_id,
            voice=voice,
            sampling=sampling,
            priority=priority,
            comma_after=limits.get("first_comma_after", 0 if being_written else FIRST_COMMA_AFTER),
            longest=limits.get("first_longest", FIRST_LONGEST),
            begin_after_sec=BEGIN_AFTER if being_written else None,
            lexicon=lexicon,
        )
        code2wav = Code2Wav(
            queue,
            sample_rate=decoder.sample_rate,
            frame_ms=decoder.frame_ms,
            slots=len(self.profile.layout.slots),
            policy=ChunkPolicy.asked(parameters),
        )
        return talker, code2wav

    def _started(self) -> tuple[SnacDecoder, DecodeQueue]:
        if self._decoder is None or self._queue is None:
            raise EngineFailed("the Talker is not available", fatal=True)
        return self._decoder, self._queue

    def _load_decoder(self) -> SnacDecoder:
        try:
            from omni_ws.engine.vllm.snac_decoder import SnacDecoder
        except ImportError as error:
            raise EngineFailed(f"speech output requires the package snac: {error}") from error
        return SnacDecoder.load(self.profile.codec, self.profile.layout, device=self._device)

    async def _warm_up(self, queue: DecodeQueue) -> None:
        """Decode windows of typical lengths, and measure the decoding time, which determines the first chunk's size."""
        # Twice, because PyTorch compiles for a shape when it occurs for the second time.
        for frames in _WARM_UP_FRAMES * 2:
            codes = np.zeros((frames, len(self.profile.layout.slots)), np.int32)
            await queue.decode(CodecWindow(codes, 0, 0, frames))
        queue.measure_anew()
        for frames in _WARM_UP_FRAMES:
            codes = np.zeros((frames, len(self.profile.layout.slots)), np.int32)
            await queue.decode(CodecWindow(codes, 0, 0, frames))
