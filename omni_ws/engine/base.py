"""The contract between the server and its engines.

An engine turns a GenerationRequest into a stream of EngineOutputs. ``Engine`` describes what the server expects of it
and what it may rely on, ``EngineCapabilities`` what it can declare. The server refuses requests for anything
undeclared, so an engine need not check for it. The core of an engine is an async generator::

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        with request.media_room.share() as share:
            parts = decode_input(
                request.input, audio=request.input_audio, sample_rate=16_000, executor=…, share=share,
                lane=request.lane
            )
            async with aclosing(parts):
                async for part in parts:            # as the client sends it
                    …
            yield TextOutput("an answer")           # waits while the client does not read
            yield Finished(FinishReason.STOP, Usage())

An engine may also have token sessions (``HasTokens``), and models that can be traced (``TraceableEngine``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from omni_ws.audio.pcm import Pcm16, Samples
from omni_ws.core.chunks import (
    AnswerWarning,
    AudioFormat,
    FinishReason,
    Hearing,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
    TokenLogprob,
    ToolCallFragment,
    Usage,
    Word,
)
from omni_ws.core.history import Message
from omni_ws.core.token_session import TokenImage, TokenRanges, VisionTokens
from omni_ws.engine.media_room import MediaRoom
from omni_ws.engine.threads import Lane
from omni_ws.errors import EngineFailed, OmniError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do.

    Requests for anything not declared here are refused by name before they reach the engine.
    """

    input_modalities: frozenset[Modality]
    output_modalities: frozenset[OutputModality]
    tasks: frozenset[Task]
    #: Whether input that arrives after the start is used (``InputMode.EXTEND``).
    extend: bool
    #: The names of the engine's stages, in order; empty for a single stage named like the engine.
    stages: tuple[str, ...] = ()
    #: The names of the voices, the default first; empty if the engine does not speak.
    voices: tuple[str, ...] = ()
    #: Further names of voices.
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    #: Whether the speed of speech can be set.
    speed: bool = False
    #: The sampling parameters that affect the answer.
    sampling: frozenset[str] = frozenset()
    #: ``max_tokens`` of an answer where the client names none; None for no limit.
    max_tokens: int | None = None
    #: The sampling parameters that are accepted without effect, because the engine is deterministic.
    sampling_no_ops: frozenset[str] = frozenset()
    #: The ``stage.parameter`` names that ``stage_params`` and ``stage_sampling`` may set.
    stage_params: frozenset[str] = frozenset()
    stage_sampling: frozenset[str] = frozenset()
    tools: bool = False  #: Function calling.
    logprobs: bool = False  #: Log-probabilities of the tokens of text.
    #: Answers constrained to JSON, see StructuredOutput.
    structured_output: bool = False
    #: Several answers to one request (OpenAI's ``n``).
    choices: bool = False
    #: Whether ``AnswerOptions.priority`` affects scheduling.
    priority: bool = False
    #: Prompts that bypass the chat template.
    raw_prompts: bool = False
    #: Raw prompts given as token IDs.
    token_prompts: bool = False
    #: Answers that begin with the raw prompt.
    echo: bool = False
    #: The roles that the input's message may have, see ``AnswerOptions.input_role``.
    input_roles: frozenset[str] = frozenset({"user"})
    #: Why the engine accepts raw prompts only (its model lacks a chat template); empty if it accepts chats.
    chat_refusal: str = ""
    #: Whether the engine implements ``HasTokens``.
    token_sessions: bool = False
    #: Whether ``AnswerOptions.template_arguments`` reach a chat template.
    template_arguments: bool = False
    #: The names of ``AnswerOptions.media_limits`` that have an effect.
    media_limits: frozenset[str] = frozenset()
    upstream: frozenset[str] = frozenset()  #: The same of ``AnswerOptions.upstream``.
    #: The languages that speech recognition can be set to (primary subtags of RFC 5646).
    languages: frozenset[str] = frozenset()
    #: The languages (RFC 5646) of voices that read one alone and want its numbers, dates and signs in words.
    voice_languages: Mapping[str, str] = field(default_factory=dict)
    #: Whether transcripts can be in English, whatever is spoken; see ``AnswerOptions.translate``.
    translates: bool = False
    #: Whether transcripts contain the times of words.
    word_times: bool = False
    #: Whether messages of the history may contain ``speech``.
    speech_in_history: bool = False
    #: The modalities of ``picture`` that they may contain.
    pictures_in_history: frozenset[Modality] = frozenset()
    #: Whether an answer to speech follows its transcripts: one without any is an answer to speech without words.
    transcribes_first: bool = False
    #: Whether the engine goes on writing speech down where the answer is cut off, see ``GenerationRequest.cut``.
    hears_on: bool = False
    #: The answer of a text model to speech without words, which a composition keeps from it; empty for none.
    nothing_heard: str = ""

    @property
    def transcripts(self) -> bool:
        """Whether speech input is transcribed. The transcript is then complete: without one, nothing was said."""
        return OutputModality.TRANSCRIPT in self.output_modalities


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the answer: JSON that matches ``schema`` (JSON Schema), or any JSON object when that is None."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options that few requests use and few engines support; see the capabilities of the same names."""

    #: How many of the most probable tokens to report besides each sampled one; None reports no log-probabilities.
    logprobs: int | None = None
    structure: StructuredOutput | None = None
    #: The number of answers.
    choices: int = 1
    #: Requests with a lower number are scheduled first.
    priority: int = 0
    #: Whether the input is the whole prompt, to which no chat template applies.
    raw_prompt: bool = False
    #: Whether the text of the raw prompt is a JSON array of token IDs.
    token_prompt: bool = False
    #: Whether the answer begins with the raw prompt, including its log-probabilities if requested.
    echo: bool = False
    #: Whether the answer consists of the raw prompt alone.
    only_echo: bool = False
    #: The role of the input's message: ``user``, ``system``, or ``assistant``, which the answer then continues.
    input_role: str = "user"
    #: Whether the answer may contain more than one tool call.
    parallel_tool_calls: bool = True
    #: Whether text that the voice cannot read is passed over, as in an answer that is written too, and not refused.
    skip_unreadable: bool = False
    #: Whether a text to read aloud is in its spoken form already: its numbers are in words.
    spoken_form: bool = False
    #: Whether the transcript is to be in English, whatever is spoken.
    translate: bool = False
    #: Arguments of the model's chat template, such as ``enable_thinking``.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Whether to report what the model thinks, see ThoughtOutput.
    thought: bool = False
    #: Whether nothing of the answer is read before its end.
    read_whole: bool = False
    #: Whether an ASR tells at a pause what it would settle on, see TranscriptGuess.
    transcript_guesses: bool = False
    #: Limits on images and video, by the field names of ``omni_ws.media.image.MediaLimits``.
    media_limits: Mapping[str, float] = field(default_factory=dict)
    upstream: Mapping[str, str] = field(default_factory=dict)  #: Of ``wire.openai_fields.UPSTREAM_FIELDS``.


class InputSource(Protocol):
    """The chunks of one request, in order, up to the end of its input. It can be iterated once.

    Each chunk taken allows the client to send more, so an engine takes a chunk when it can process it.
    """

    def __aiter__(self) -> AsyncIterator[InputChunk]: ...


class OutputSink(Protocol):
    """Takes outputs of one answer at once: from a callback or any task, and without a switch to the task that iterates.

    For engines that produce many small outputs; see ``GenerationRequest.sink``.
    """

    def offer(self, output: EngineOutput) -> bool:
        """Send ``output``, which follows everything that was offered or yielded before, and return True.

        Returns False where it cannot be sent at once: the client does not read, an output that was yielded is still
        being sent, the audio is encoded in a thread or not due yet, or it is a Finished. The output must be yielded
        then, before the next one is offered.
        """
        ...


class _NoSink:
    """Takes nothing: every output is yielded."""

    def offer(self, output: EngineOutput) -> bool:
        return False


#: For requests whose outputs must all pass through the iterator, such as those of an engine that wraps another.
NO_SINK: Final[OutputSink] = _NoSink()


class UsageMeter:
    """Reports the usage of a request that is cut off before its Finished.

    An engine that counts tokens replaces ``read`` by a function that returns the usage so far, or None while there is
    none. The function is called on the event loop, possibly after the request was aborted.
    """

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read: Callable[[], Usage | None] = lambda: None


class Cut:
    """Tells an engine that nobody wants the answer to a request any more, while what was said in it still counts.

    The speaker has gone on. An engine with ``EngineCapabilities.hears_on`` ends the answer at once, writes down the
    input to its end, and yields transcripts alone from then on, and a Finished. Others need not know of it.
    """

    __slots__ = ("_callbacks", "made")

    def __init__(self) -> None:
        self.made = False
        self._callbacks: list[Callable[[], None]] = []

    def make(self) -> None:
        """Cut the answer off. Idempotent."""
        if not self.made:
            self.made = True
            for callback in tuple(self._callbacks):
                callback()

    @contextmanager
    def watched(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call ``callback`` when the answer is cut off within the block, or at once if it was before."""
        self._callbacks.append(callback)
        try:
            if self.made:
                callback()
            yield
        finally:
            self._callbacks.remove(callback)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request, as the engine gets it.

    ``input`` yields the input buffered at the start and, under ``InputMode.EXTEND``, all later chunks as they arrive;
    it ends with the input. Text in it is valid UTF-8 with whole characters in each chunk. ``input_audio`` is the format
    of audio chunks whose own ``format`` is None. ``engine.decoding.decode_input`` decodes it all.
    """

    request_id: str
    task: Task
    input: InputSource
    input_mode: InputMode
    input_audio: AudioFormat
    #: The modalities of the answer: TEXT, AUDIO or both.
    modalities: frozenset[OutputModality]
    #: Whether the text of the answer is to be told in any case: a history has it, whatever the client gets.
    remembered: bool = False
    #: The language that is spoken (primary subtag of RFC 5646), one of the capabilities; None if the client named none.
    language: str | None = None
    voice: str | None = None
    #: How fast the voice speaks, as a factor of its own speed.
    speed: float = 1.0
    instructions: str = ""
    history: tuple[Message, ...] = ()
    #: The sampling parameters that the client set, by their names in ``session_config``; defaults are the engine's.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: Sampling parameters of single stages, and further parameters, by the names of the stages.
    stage_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stage_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: In OpenAI's form: ``{"type": "function", "function": {…}}``.
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    options: AnswerOptions = AnswerOptions()
    #: The name of the client's API key. Caches must not be shared between owners, lest timing reveal their prompts.
    owner: str | None = None
    #: Whether its whole input is known, and has no audio in it.
    without_audio: bool = False
    near: bool = False  #: Whether the client is on this machine, and may hear what is for the operator.
    conversation: str | None = None  #: The id of the session; None for a request by itself, as over HTTP.
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: Says when the answer is wanted no more.
    cut: Cut = field(default_factory=Cut)
    #: Takes outputs without waiting. Its use is optional.
    sink: OutputSink = NO_SINK
    #: The budget in which decoded input is reserved.
    media_room: MediaRoom = field(default_factory=MediaRoom)
    #: Where audio is decoded: the place of its session in the threads of all.
    lane: Lane = field(default_factory=Lane)
    #: Tells the client of something in its input that the request goes on without. Called on the event loop.
    warn: Callable[[OmniError], None] = lambda error: None

    @property
    def tells_text(self) -> bool:
        """Whether the text of the answer is wanted."""
        return self.remembered or OutputModality.TEXT in self.modalities


class TextOutput(Struct, frozen=True):
    """A piece of the answer's text, which extends the pieces before it.

    ``logprobs`` are those of the tokens in ``text``; ``choice`` is the index of the answer, if there are several.
    A ``refusal`` says that the model does not answer; it is said and remembered like any text.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0
    refusal: bool = False


class ToolCallOutput(Struct, frozen=True):
    """A piece of a tool call, see ToolCallFragment."""

    call: ToolCallFragment
    choice: int = 0


class ThoughtOutput(Struct, frozen=True):
    """A piece of what the model thinks before it answers: neither text of the answer nor spoken."""

    text: str
    choice: int = 0


class TranscriptOutput(Struct, frozen=True):
    """Recognised speech of the input; ``start_ms`` is its position in the input audio, in milliseconds.

    An interim transcript is a preliminary form of the next segment, and replaced by the next transcript. The others are
    settled: each is a segment, and together they form the transcript.
    """

    text: str
    interim: bool = False
    start_ms: int | None = None
    words: tuple[Word, ...] = ()
    #: Of a settled one, where the recogniser says it.
    hearing: Hearing | None = None


class TranscriptGuess(Struct, frozen=True):
    """What the next settled transcript will be if the speaker, who pauses, says nothing more.

    An empty ``text`` takes the guess back: the speaker goes on. Guesses are for engines that wrap an ASR, and sent only
    if ``AnswerOptions.transcript_guesses`` asks for them; an ASR need not make any.
    """

    text: str


class AudioOutput(Struct, frozen=True):
    """Speech that continues the answer's audio: mono at ``sample_rate`` Hz, the same rate throughout an answer.

    The times of ``words`` count from the start of the answer's audio, not of this piece. A voice that tells none may
    tell which clause the piece belongs to: the one that ends at the index ``text_end`` of the text that is read, and
    begins where the clause before ends.
    """

    samples: Samples | Pcm16
    sample_rate: int
    words: tuple[Word, ...] = ()
    text_end: int | None = None


class PartFailed(Struct, frozen=True):
    """A part of a composed engine has failed on this request, which goes on without it.

    ``param`` of the error is the part: ``asr``, ``llm`` or ``tts``.
    """

    error: OmniError


@dataclass(frozen=True, slots=True)
class Finished:
    """The last output of an answer; the server closes the generator after it.

    ``reason`` is STOP, LENGTH or TOOL_CALLS; ``reasons`` has one for each of several answers. CANCELLED and ERROR are
    for the server to report. ``foreign_reasons`` are names of reasons that FinishReason lacks, in the same order; the
    reason is STOP there. ``warnings`` is what was done otherwise than asked.
    """

    reason: FinishReason
    usage: Usage
    reasons: tuple[FinishReason, ...] = ()
    foreign_reasons: tuple[str | None, ...] = ()
    warnings: tuple[AnswerWarning, ...] = ()


EngineOutput: TypeAlias = (
    TextOutput
    | ThoughtOutput
    | ToolCallOutput
    | TranscriptOutput
    | TranscriptGuess
    | AudioOutput
    | PartFailed
    | Finished
)


class EngineState(StrEnum):
    """Whether an engine can take requests.

    The server refuses them as temporarily overloaded in STARTING, and as failed, fatally for the session, in UNHEALTHY.
    An engine that restarts its processes returns from UNHEALTHY to OK by itself.
    """

    STARTING = "starting"
    OK = "ok"
    UNHEALTHY = "unhealthy"


@runtime_checkable
class Engine(Protocol):
    """An engine: ``start``, then any number of concurrent ``generate``, then ``stop``.

    **Threads.** All methods are called on the event loop that also serves the connections, which an engine must not
    block for more than a few milliseconds. Blocking work belongs into threads or processes that the engine owns;
    ``engine.threads`` runs calls in threads in such a way that a cancellation waits for them.

    **Backpressure.** Outputs are pulled: the server does not resume the generator while the client's outbox is full. An
    engine may work ahead meanwhile, within a bound (see ``Channel``). Input is pulled too, see InputSource.

    **Hand-over.** Each output that is yielded costs a pass through the generator and, where it comes from another task,
    a switch of tasks. An engine may offer it to ``request.sink`` first, which usually takes it at once.

    **Cancellation.** The server aborts a request by closing the generator or cancelling the task that iterates it, at
    any time, also while it waits for input. The engine then stops the work and releases what the request holds before
    the generator ends, in a ``finally`` block. The server waits for that, so it has to be quick, and does not cancel a
    second time.

    **Errors.** A request fails by raising an OmniError: InvalidValue for parameters, UnsupportedFormat for input that
    cannot be decoded, EngineOverloaded (with ``retry_after_ms``) when there is no capacity, EngineFailed when the
    engine breaks. Any other exception is treated as a bug: it is logged, and the client gets an EngineFailed without
    details. An EngineFailed also ends the session if ``state`` is no longer OK.
    """

    #: The name of the kind of engine, for logs, metrics and health reports.
    name: str
    #: The name of the model, as clients see it. May be set by ``start``.
    model: str

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do. Final once ``start`` has returned."""
        ...

    @property
    def state(self) -> EngineState:
        """The current state. It may turn UNHEALTHY at any time."""
        ...

    @property
    def active_requests(self) -> int:
        """The number of requests that hold resources of the engine, such as a slot, a worker or a stream."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines for the operator, printed after ``start``: what the engine found, and what is missing."""
        ...

    async def start(self) -> None:
        """Load models and warm up; returns when requests can be served. Raises EngineFailed when that is impossible."""
        ...

    async def stop(self) -> None:
        """Release everything. Idempotent; also called after a failed ``start``."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        """Answer a request: an async generator that yields outputs in order and ends with one Finished.

        It may yield before the input has ended. Outputs of a modality that was not requested are ignored.
        """
        ...


# Token sessions: an engine processes token lists and continues them.

#: The limit on ``TokenGeneration.logprob_top_k``.
MAX_TOP_LOGPROBS: Final = 20
NOWHERE: Final = TokenRanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """Sampling parameters. ``top_k`` 0 disables it; ``stop_token_ids`` are added to the model's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGeneration:
    """One call to continue a token list.

    ``tokens`` is the whole list. It belongs to the session, which appends decoded tokens to it, so an engine copies
    what it keeps. With ``max_tokens`` 0 the list is computed without decoding. The ranges select the positions whose
    log-probabilities and readouts are reported.
    """

    request_id: str
    tokens: Sequence[int]
    images: tuple[TokenImage, ...]
    max_tokens: int
    sampling: TokenSampling = TokenSampling()
    logprob_ranges: TokenRanges = NOWHERE
    logprob_top_k: int = 0
    readout_ranges: TokenRanges = NOWHERE
    priority: int = 0
    #: The name of the client's API key. Caches must not be shared between owners.
    owner: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """A decoded token, or one of the list that a range selects.

    ``readout`` has layers × concepts numbers, layer by layer; it is empty unless selected. ``logprobs`` are the most
    probable tokens at this position, in descending order, ``logprob`` is that of the token itself.
    """

    id: int
    position: int
    is_prefill: bool
    readout: Sequence[float] = ()
    logprobs: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None


class TokenStop(Enum):
    """Why a call ended."""

    EOS = "eos"
    LENGTH = "length"
    #: The session was closed; reported by the server, not by engines.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokensFinished:
    """The last output of a call."""

    reason: TokenStop


TokenEvent: TypeAlias = TokenOutput | TokensFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutManifest:
    """The meaning of the numbers in a readout. Empty where readouts are disabled."""

    concepts: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: str = ""


class TokenEngine(Protocol):
    """The interface of ``HasTokens.tokens``; usable once the engine has started."""

    @property
    def max_model_len(self) -> int:
        """The longest list that the model processes, in tokens."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """The number of token IDs."""
        ...

    @property
    def vision_tokens(self) -> VisionTokens | None:
        """The IDs that form a vision block; None for models without images."""
        ...

    @property
    def readout_manifest(self) -> ReadoutManifest:
        """What readouts contain."""
        ...

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        """Check images.

        Raises InvalidValue for one that cannot be decoded, or has another number of features than the model computes
        for it.
        """
        ...

    def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        """Continue a token list: an async generator that ends with one TokensFinished.

        It yields the selected tokens of the list, in order, then each decoded token; one with a readout after its own
        position has been computed. Closing the generator aborts the call. Raises as ``Engine.generate`` does, and
        ContextLengthExceeded before the first output.
        """
        ...


class HasTokens(Protocol):
    """An engine with ``EngineCapabilities.token_sessions``."""

    @property
    def tokens(self) -> TokenEngine:
        """Its interface for token sessions."""
        ...


@runtime_checkable
class TraceableEngine(Protocol):
    """An engine that can record the operations of its models with torch's profiler, in all its processes."""

    @property
    def can_trace(self) -> bool:
        """Whether the engine was started with tracing enabled."""
        ...

    async def start_trace(self, template: Path) -> None:
        """Start recording. ``template`` is the beginning of the paths of the files to write."""
        ...

    async def stop_trace(self) -> tuple[Path, ...]:
        """Stop recording and return the files."""
        ...


def incident(failure: str, exception: BaseException, *, request_id: str | None = None) -> EngineFailed:
    """Log ``exception`` under a new ID, and return the error that the client gets.

    That has the ID, and ``failure`` as its message; the text of ``exception`` might reveal internals.
    """
    error_id = f"err_{uuid.uuid4().hex}"
    logger.error("%s (%s)", failure, error_id, exc_info=exception)
    return EngineFailed(failure, request_id=request_id, error_id=error_id)
