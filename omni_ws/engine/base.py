"""The contract between the server and its engines.

An engine answers a GenerationRequest with EngineOutputs, which it writes to an OutputWriter. ``Engine`` describes its
methods and what both sides may rely on. In its ``EngineCapabilities`` an engine declares its features. The server
refuses requests for anything that is not declared, so an engine need not check for it. The core of an engine is a
coroutine::

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        with request.media_room.share() as share:
            parts = decode_input(
                request.input, audio=request.input_audio, sample_rate=16_000, executor=…, share=share,
                lane=request.lane
            )
            async with aclosing(parts):
                async for part in parts:            # as the client sends them
                    …
            out.write(TextOutput("an answer"))      # sent immediately, if possible
            await out.drain()                       # waits while the client does not read
            out.write(Finished(FinishReason.STOP, Usage()))

An engine may also implement ``HasTokens``, for token sessions, and ``TraceableEngine``, for traces of its models.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from msgspec import Struct

from omni_ws.audio.pcm import Pcm16, Samples
from omni_ws.core.chunks import (
    MOMENTS,
    PARTS,
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
    UrlCitation,
    Usage,
    Word,
    heard_language,
)
from omni_ws.core.history import Message
from omni_ws.core.token_session import TokenImage, TokenRanges, VisionTokens
from omni_ws.engine.threads import Lane, MediaRoom
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.profiler import events

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """The features of an engine. The server refuses requests for anything else before they reach the engine."""

    input_modalities: frozenset[Modality]
    output_modalities: frozenset[OutputModality]
    tasks: frozenset[Task]
    #: Whether the engine uses input that arrives after the start of a request (``InputMode.EXTEND``).
    extend: bool
    #: The names of the engine's stages, in order; empty for a single stage named like the engine.
    stages: tuple[str, ...] = ()
    #: The names of the voices, the default first; empty if the engine does not speak.
    voices: tuple[str, ...] = ()
    #: Aliases of voices: from the alias to the name in ``voices``.
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    #: Whether the speed of speech can be set.
    speed: bool = False
    #: The sampling parameters that affect the answer.
    sampling: frozenset[str] = frozenset()
    #: The default of ``max_tokens``, the limit on an answer; None for no limit.
    max_tokens: int | None = None
    #: The sampling parameters that the engine accepts but ignores, because it is deterministic.
    sampling_no_ops: frozenset[str] = frozenset()
    #: The ``stage.parameter`` names that ``stage_params`` and ``stage_sampling`` may set.
    stage_params: frozenset[str] = frozenset()
    stage_sampling: frozenset[str] = frozenset()
    tools: bool = False  #: Whether the engine can call functions.
    logprobs: bool = False  #: Whether it reports log-probabilities of text tokens.
    #: Whether answers can be constrained to JSON, see StructuredOutput.
    structured_output: bool = False
    #: Whether a request can have several answers (OpenAI's ``n``).
    choices: bool = False
    #: Whether ``AnswerOptions.priority`` affects scheduling.
    priority: bool = False
    #: Whether prompts can bypass the chat template.
    raw_prompts: bool = False
    #: Whether raw prompts can be token IDs.
    token_prompts: bool = False
    #: Whether answers can begin with the raw prompt.
    echo: bool = False
    #: The roles that the message of the input may have, see ``AnswerOptions.input_role``.
    input_roles: frozenset[str] = frozenset({"user"})
    #: Why the engine accepts raw prompts only (its model lacks a chat template); empty if it accepts chats.
    chat_refusal: str = ""
    #: Whether the engine implements ``HasTokens``.
    token_sessions: bool = False
    #: Whether ``AnswerOptions.template_arguments`` reach a chat template.
    template_arguments: bool = False
    #: The names of ``AnswerOptions.media_limits`` that have an effect.
    media_limits: frozenset[str] = frozenset()
    #: The names of ``AnswerOptions.upstream`` that have an effect.
    upstream: frozenset[str] = frozenset()
    #: The languages that speech recognition can be set to (primary subtags of RFC 5646).
    languages: frozenset[str] = frozenset()
    #: The language (RFC 5646) of each voice that reads only one language. The server writes numbers, dates and signs of
    #: the text out in words for such a voice.
    voice_languages: Mapping[str, str] = field(default_factory=dict)
    #: The languages that the engine speaks (primary subtags of RFC 5646), if its voices follow
    #: ``GenerationRequest.speech_language``; empty: it speaks only as ``voice`` says.
    speech_languages: frozenset[str] = frozenset()
    #: Whether speech in any language can be transcribed in English, see ``AnswerOptions.translate``.
    translates: bool = False
    #: Whether transcripts contain the times of words.
    word_times: bool = False
    #: Whether recognition can be told what to expect, see ``GenerationRequest.expected``.
    keywords: bool = False
    #: Whether speech can be told how words are said, see ``GenerationRequest.lexicon``.
    lexicon: bool = False
    #: Whether messages of the history may contain ``speech``.
    speech_in_history: bool = False
    #: The modalities that messages of the history may contain as ``picture``.
    pictures_in_history: frozenset[Modality] = frozenset()
    #: Whether all transcripts of the input are written before the answer: an answer without one means that the input
    #: contained no words.
    transcribes_first: bool = False
    #: Whether the engine writes a TranscriptGuess in each pause of live speech, see
    #: ``AnswerOptions.transcript_guesses``.
    transcript_guesses: bool = False
    #: Whether the engine still transcribes the input to its end after the answer was cut off, see ``Cut``.
    hears_on: bool = False
    #: What a composed engine answers in place of this text model if the user's speech contained no words; empty: the
    #: answer is empty.
    nothing_heard: str = ""
    #: The same in languages other than English, by their primary subtags, if the user spoke such a language before.
    nothing_heard_in: Mapping[str, str] = field(default_factory=dict)
    #: The modalities of answers that the engine can continue from the end of ``GenerationRequest.begun``. An answer in
    #: any other modality is made again from its beginning, and compared; see ``engine.answer_limit``.
    continues: frozenset[OutputModality] = frozenset()
    #: Whether the engine has a language model that can summarise a conversation.
    sums_up: bool = False
    #: The size of the model's context window in tokens, those of the answer included; None if it is not known.
    context: int | None = None
    #: Whether concurrent answers slow one another down: work in the background gives way to each of them.
    shares_cores: bool = False
    #: Whether the engine reads ``GenerationRequest.heard_language``. For other text models, a composed engine adds a
    #: note about the language to the message (``engine.clauses``).
    reads_language: bool = False

    @property
    def transcripts(self) -> bool:
        """Whether the engine transcribes all speech in its input: audio without a transcript contained no words."""
        return OutputModality.TRANSCRIPT in self.output_modalities


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """A constraint on the answer: JSON that matches ``schema`` (JSON Schema); any JSON object if ``schema`` is None."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """Options that few requests use and few engines support; most depend on an engine capability of the same name."""

    #: How many of the most probable tokens to report for each sampled token; None for no log-probabilities.
    logprobs: int | None = None
    structure: StructuredOutput | None = None
    #: The number of answers.
    choices: int = 1
    #: Requests with a lower number are scheduled first.
    priority: int = 0
    #: Whether the input is the whole prompt, without a chat template.
    raw_prompt: bool = False
    #: Whether the text of the raw prompt is a JSON array of token IDs.
    token_prompt: bool = False
    #: Whether the answer begins with the raw prompt, including its log-probabilities if requested.
    echo: bool = False
    #: Whether the answer consists of the raw prompt only.
    only_echo: bool = False
    #: The role of the input's message: ``user``, ``system`` or ``assistant``; an ``assistant`` message is continued.
    input_role: str = "user"
    #: Whether the answer may contain more than one tool call.
    parallel_tool_calls: bool = True
    #: The sentence of the instructions that is about the tools, if all tools are the server's own: a model that takes
    #: no tools then answers without the tools and without this sentence. "" if there must be no answer without tools.
    tool_rule: str = ""
    #: Whether the voice skips text that it cannot read; otherwise the request is refused.
    skip_unreadable: bool = False
    #: Whether a text to read aloud is in its spoken form already, with numbers in words.
    spoken_form: bool = False
    #: Whether the transcript is in English, whatever language is spoken.
    translate: bool = False
    #: The language (primary subtag of RFC 5646) of an answer that interprets what was said: it is spoken in that
    #: language, and speech without words has no answer. "" for an answer in the language of the user.
    interprets_into: str = ""
    #: Arguments of the model's chat template, such as ``enable_thinking``.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    #: Whether to report the model's reasoning, see ThoughtOutput.
    thought: bool = False
    #: Whether the client reads the answer only after it is complete.
    read_whole: bool = False
    #: Whether to write a TranscriptGuess at each pause, and interim transcripts also if they have not changed.
    transcript_guesses: bool = False
    #: Limits on images and video, by the field names of ``omni_ws.media.MediaLimits``.
    media_limits: Mapping[str, float] = field(default_factory=dict)
    #: Fields for the upstream server of a remote engine, by the names in ``wire.openai_fields.UPSTREAM_FIELDS``.
    upstream: Mapping[str, str] = field(default_factory=dict)


class InputSource(Protocol):
    """The input chunks of one request, in order, as an iterator for a single use. It ends where the input ends.

    Taking a chunk allows the client to send more, so an engine takes a chunk only when it can process it.
    """

    def __aiter__(self) -> AsyncIterator[InputChunk]: ...


class OutputWriter(Protocol):
    """The destination of one answer: it takes the outputs in order. All methods are called on the event loop."""

    @property
    def full(self) -> bool:
        """Whether ``drain`` would wait. For callbacks, which cannot await it."""
        ...

    def write(self, output: EngineOutput) -> None:
        """Send an output: immediately if possible, otherwise after the outputs that were written before it.

        The call never waits and never refuses an output. Any task and any callback of the event loop may make it.
        Outputs after a Finished, or after another end of the answer, are dropped.
        """
        ...

    async def drain(self) -> None:
        """Wait while the client does not read, or while too many outputs are still unsent."""
        ...


class OutputFilter:
    """An OutputWriter over another one, for engines that wrap an engine. The base class passes everything on."""

    def __init__(self, out: OutputWriter) -> None:
        self._out = out

    @property
    def full(self) -> bool:
        return self._out.full

    def write(self, output: EngineOutput) -> None:
        self._out.write(output)

    def drain(self) -> Coroutine[Any, Any, None]:
        return self._out.drain()


#: The placeholder for the user's next words in a request with ``GenerationRequest.computes_only``.
NOTHING_SAID: Final = "…"


class Unread:
    """An OutputWriter that drops all outputs, for requests with ``GenerationRequest.computes_only``."""

    full = False

    def write(self, output: EngineOutput) -> None:
        pass

    async def drain(self) -> None:
        pass


class UsageMeter:
    """Access to the usage of a running request, which the server reports if the request is aborted.

    An engine that counts tokens sets ``read`` to a function that returns the usage so far, or None while there is none.
    The server calls it on the event loop, possibly after the abort.
    """

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read: Callable[[], Usage | None] = lambda: None


class HeardLanguage:
    """The language that the user speaks in one request, as a primary subtag of RFC 5646.

    ``before`` is the language of the conversation before this request, or the language that the client named; None if
    neither is known. ``code`` is the language of the latest settled transcript of this request; None before the first.
    """

    __slots__ = ("before", "code")

    def __init__(self, before: str | None = None, *, code: str | None = None) -> None:
        self.before = before
        self.code = code

    @property
    def now(self) -> str | None:
        """The language of the speech so far; None if it is not known."""
        return self.code or self.before

    def note(self, hearing: Hearing | None, *, named: str | None) -> None:
        """Set ``code`` from a settled transcript's ``hearing`` or, without it, to ``named``, the client's language."""
        self.code = heard_language(hearing) or named or self.code


class Cut:
    """A signal that the answer to a request is no longer wanted, but the transcript is: the user has gone on speaking.

    An engine with ``EngineCapabilities.hears_on`` then ends the answer immediately, transcribes the input to its end,
    and writes only transcripts and a Finished. Other engines ignore the signal.
    """

    __slots__ = ("_callbacks", "made")

    def __init__(self) -> None:
        self.made = False
        self._callbacks: list[Callable[[], None]] = []

    def make(self) -> None:
        """Give the signal. Idempotent."""
        if not self.made:
            self.made = True
            for callback in tuple(self._callbacks):
                callback()

    @contextmanager
    def watched(self, callback: Callable[[], None]) -> Iterator[None]:
        """Call ``callback`` when the signal is given within the block, or immediately if it was given before."""
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

    ``input`` yields the chunks that have arrived before the start and, under ``InputMode.EXTEND``, all later chunks as
    they arrive. Text is valid UTF-8, with whole characters in each chunk. ``input_audio`` is the format of audio chunks
    whose own ``format`` is None. ``engine.decoding.decode_input`` decodes input of all modalities.
    """

    request_id: str
    task: Task
    input: InputSource
    input_mode: InputMode
    input_audio: AudioFormat
    #: The modalities of the answer: TEXT, AUDIO or both.
    modalities: frozenset[OutputModality]
    #: Whether the engine must write the text of the answer even if TEXT is not in ``modalities``, for the history.
    remembered: bool = False
    #: The spoken language (primary subtag of RFC 5646), one of the capabilities' ``languages``; None if not given.
    language: str | None = None
    #: The languages among which the spoken one is detected if ``language`` is None; empty: all of the engine's.
    languages: frozenset[str] = frozenset()
    #: A text that could precede the speech, with the names and terms to expect in it; empty if there is none.
    expected: str = ""
    voice: str | None = None
    #: Whether the client chose ``voice``; otherwise it is the default.
    voice_named: bool = False
    #: The speed of speech, relative to the voice's own.
    speed: float = 1.0
    #: How words and names are said: from the word to the text that is read in its place, see ``Lexicon``.
    lexicon: Mapping[str, str] = field(default_factory=dict)
    #: The language to speak in (primary subtag of RFC 5646), one of the capabilities' ``speech_languages``; None: that
    #: of the voice.
    speech_language: str | None = None
    instructions: str = ""
    history: tuple[Message, ...] = ()
    #: The sampling parameters that the client set, by their names in ``session_config``; the engine has the defaults.
    sampling: Mapping[str, Any] = field(default_factory=dict)
    #: Sampling parameters and further parameters of single stages, by the names of the stages.
    stage_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stage_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: In OpenAI's form: ``{"type": "function", "function": {…}}``.
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    options: AnswerOptions = AnswerOptions()
    #: The name of the client's API key. Caches must not be shared between owners, lest timing reveal their prompts.
    owner: str | None = None
    #: Whether the input is complete and contains no audio.
    without_audio: bool = False
    #: Whether the client is on this machine. It may then see error details that are for the operator.
    near: bool = False
    conversation: str | None = None  #: The id of the session; None for a single request, such as over HTTP.
    #: Whether the request only has the model compute its prompt, for later requests of the conversation: nobody reads
    #: the answer, of one token. An engine with ``shares_cores`` ends it with EngineOverloaded when another one comes.
    computes_only: bool = False
    #: The text of this answer that the client has already, from another server; empty if it has none. An engine that
    #: ``continues`` answers writes the text that follows it.
    begun: str = ""
    #: How the text of the answer ended, if ``begun`` is all of it: it has to be spoken only.
    begun_end: Finished | None = None
    #: For an engine that ``continues`` spoken answers: the index in ``begun`` at which its audio begins, and the
    #: position of this place in the whole audio of the answer, in milliseconds. The times of words count from this
    #: place; indices into the text count from the start of the whole text.
    voice_from: int = 0
    voice_from_ms: float = 0
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: The signal that the answer is no longer wanted, although the transcript is.
    cut: Cut = field(default_factory=Cut)
    #: The language of the user's speech, which a recogniser finds while the request runs.
    heard_language: HeardLanguage = field(default_factory=HeardLanguage)
    #: The moments of the answer, which the engine marks.
    times: TurnTimes = field(default_factory=lambda: TurnTimes())
    #: The memory budget for decoded input.
    media_room: MediaRoom = field(default_factory=MediaRoom)
    #: The session's share of the ListeningThreads, which decode audio.
    lane: Lane = field(default_factory=Lane)
    #: Tells the client that a part of the input was dropped; the request goes on. Called on the event loop.
    warn: Callable[[OmniError], None] = lambda error: None

    @property
    def tells_text(self) -> bool:
        """Whether the engine must write the text of the answer."""
        return self.remembered or OutputModality.TEXT in self.modalities


class TextOutput(Struct, frozen=True):
    """A piece of the answer's text, which extends the pieces before it.

    ``logprobs`` has an item for each token in ``text``; ``choice`` is the index of the answer, if there are several.
    ``refusal`` marks text in which the model declines to answer; it is spoken and kept in the history like other text.
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
    """A piece of the model's reasoning, which is neither text of the answer nor spoken."""

    text: str
    choice: int = 0


class TranscriptOutput(Struct, frozen=True):
    """Recognised speech of the input; ``start_ms`` is its position in the input audio, in milliseconds.

    An interim transcript is a preliminary form of the next segment; the next TranscriptOutput replaces it. A final one
    is a segment of the transcript; all segments together are the transcript.
    """

    text: str
    interim: bool = False
    start_ms: int | None = None
    words: tuple[Word, ...] = ()
    #: How the speech was recognised, such as its language; set on final transcripts if the recogniser reports it.
    hearing: Hearing | None = None


#: The outputs of an LLM that are its answer, rather than about the input.
TOKENS: Final = (TextOutput, ThoughtOutput, ToolCallOutput)


class TranscriptGuess(Struct, frozen=True):
    """A prediction of the next final transcript at a pause, which holds if the speaker says nothing more.

    An empty ``text`` withdraws the guess, because the speaker goes on. Guesses are for turn detection, and for engines
    that wrap an ASR. They are written only with ``AnswerOptions.transcript_guesses``; an ASR need not support them.
    ``hearing`` has the same details as that of a TranscriptOutput.
    """

    text: str
    hearing: Hearing | None = None


class TextComplete(Struct, frozen=True):
    """A report that the text of a spoken answer is complete, although its audio is not. Optional.

    ``finished`` says how the text ended. The answer itself ends with its own Finished.
    """

    finished: Finished


class WordsComplete(Struct, frozen=True):
    """A report that all speech of the input is transcribed, and that the answer begins now. Optional."""


class AudioOutput(Struct, frozen=True):
    """Speech that continues the answer's audio: mono at ``sample_rate`` Hz, the same rate throughout an answer.

    The times of ``words`` count from the start of the answer's audio, not of this piece. A voice without word times may
    instead set ``text_end``: the index, in the text that the voice reads, of the end of the clause of this piece.
    """

    samples: Samples | Pcm16
    sample_rate: int
    words: tuple[Word, ...] = ()
    text_end: int | None = None


class PartFailed(Struct, frozen=True):
    """A report that a part of an engine has failed, and that the request goes on without that part.

    The ``param`` of the error names the part: ``asr``, ``llm`` or ``tts``.
    """

    error: OmniError


@dataclass(frozen=True, slots=True)
class Finished:
    """The last output of an answer, after which ``generate`` returns.

    ``reason`` is STOP, LENGTH or TOOL_CALLS; ``reasons`` has one item for each of several answers. Only the server
    reports CANCELLED and ERROR. If another server gave a reason that FinishReason lacks, such as "content_filter", the
    reason is STOP, and ``foreign_reasons``, in the order of ``reasons``, has the other server's name. ``warnings`` are
    deviations from the request, ``citations`` the web pages that the answer is taken from.
    """

    reason: FinishReason
    usage: Usage
    reasons: tuple[FinishReason, ...] = ()
    foreign_reasons: tuple[str | None, ...] = ()
    warnings: tuple[AnswerWarning, ...] = ()
    citations: tuple[UrlCitation, ...] = ()


EngineOutput: TypeAlias = (
    TextOutput
    | ThoughtOutput
    | ToolCallOutput
    | TranscriptOutput
    | TranscriptGuess
    | WordsComplete
    | TextComplete
    | AudioOutput
    | PartFailed
    | Finished
)


class EngineState(StrEnum):
    """Whether an engine can take requests.

    While an engine is STARTING, the server refuses requests with EngineOverloaded; while it is UNHEALTHY, with an
    EngineFailed that ends the session. An engine that restarts its processes returns from UNHEALTHY to OK by itself.
    """

    STARTING = "starting"
    OK = "ok"
    UNHEALTHY = "unhealthy"


class Component(Protocol):
    """An object that is started, stopped and described like an engine: an engine, or a voice."""

    #: The name of the kind of engine, for logs, metrics and health reports.
    name: str
    #: The name of the model, as clients see it. May be set by ``start``.
    model: str

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do.

        Final once ``start`` has returned, except with an LLM that may be replaced (GrowingLlm).
        """
        ...

    @property
    def state(self) -> EngineState:
        """The current state. It may turn UNHEALTHY at any time."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines to print for the operator after ``start``: what the engine found, and what is missing."""
        ...

    async def start(self) -> None:
        """Load models and warm up; returns once requests can be served. Raises EngineFailed."""
        ...

    async def stop(self) -> None:
        """Release everything. Idempotent; also called after a failed ``start``."""
        ...


@runtime_checkable
class Engine(Component, Protocol):
    """An engine: ``start``, then any number of concurrent ``generate``, then ``stop``.

    **Threads.** All methods are called on the event loop that also serves the connections. An engine must not block it
    for more than a few milliseconds. Blocking work belongs into threads or processes that the engine owns;
    ``engine.threads`` has functions that run a call in a thread, and on cancellation wait for the end of the call.

    **Backpressure.** ``OutputWriter.write`` does not wait. An engine that makes much output awaits ``drain`` between
    writes, which waits while the client does not read; a callback looks at ``full``. Input is pulled, see InputSource.

    **Cancellation.** The server aborts a request by cancelling the task that runs ``generate``, at any time, also while
    the task waits for input. The engine then stops the work and releases the resources of the request in a ``finally``
    block, before ``generate`` ends. The server waits for this cleanup, which must be quick, and does not cancel again.

    **Errors.** A request fails by raising an OmniError: InvalidValue for parameters, UnsupportedFormat for input that
    cannot be decoded, EngineOverloaded (with ``retry_after_ms``) when there is no capacity, EngineFailed when the
    engine breaks. Any other exception is treated as a bug: it is logged, and the client gets an EngineFailed without
    details. An EngineFailed also ends the session if ``state`` is no longer OK.
    """

    @property
    def active_requests(self) -> int:
        """The number of requests that hold resources of the engine, such as a slot, a worker or a stream."""
        ...

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        """Answer a request: write outputs in order to ``out``, the last one a Finished, and return.

        The engine may write before the input has ended. The server ignores outputs of a modality that was not
        requested. An engine that wraps another one passes ``out`` or an OutputFilter over ``out`` to that engine.
        """
        ...


# Token sessions: an engine processes token lists and continues them.

#: The limit on ``TokenGeneration.logprob_top_k``.
MAX_TOP_LOGPROBS: Final = 20
NOWHERE: Final = TokenRanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """Sampling parameters. ``top_k`` 0 sets no such limit; ``stop_token_ids`` are added to the model's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGeneration:
    """One call to continue a token list.

    ``tokens`` is the whole list. The session owns the list and appends decoded tokens to it; an engine that keeps
    tokens must copy them. With ``max_tokens`` 0 the list is processed but not continued. The ranges select the
    positions whose log-probabilities and readouts are reported.
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
    """A decoded token, or a token of the list that a range selects.

    ``readout`` has layers × concepts numbers, layer by layer; it is empty unless a range selects it. ``logprobs`` are
    (token, log-probability) of the most probable tokens at this position, in descending order; ``logprob`` is the
    log-probability of the token itself.
    """

    id: int
    position: int
    is_prefill: bool
    readout: Sequence[float] = ()
    logprobs: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None


class TokenStop(Enum):
    """The reason why a TokenGeneration ended."""

    EOS = "eos"
    LENGTH = "length"
    #: The session was closed. Only the server reports this, no engine.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokensFinished:
    """The last output of a TokenGeneration."""

    reason: TokenStop


TokenEvent: TypeAlias = TokenOutput | TokensFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutManifest:
    """The meaning of the numbers in a readout. Empty if readouts are disabled."""

    concepts: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: str = ""


class TokenEngine(ABC):
    """An engine's interface for token sessions (``HasTokens.tokens``), usable once the engine has started."""

    #: The limit on the length of a token list, decoded tokens included.
    max_model_len: int
    #: The number of token IDs.
    vocabulary_size: int
    #: The IDs that form a vision block; None for models without images.
    vision_tokens: VisionTokens | None
    #: The contents of a readout.
    readout_manifest: ReadoutManifest

    @abstractmethod
    async def check_images(self, images: Sequence[TokenImage]) -> None:
        """Check that images can be used.

        Raises InvalidValue for an image that cannot be decoded, or whose number of features differs from what the model
        computes.
        """

    @abstractmethod
    def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        """Continue a token list: an async generator that ends with one TokensFinished.

        The generator yields the selected tokens of the list, in order, then each decoded token. A decoded token with a
        readout is yielded only after the model has processed this token. Closing the generator aborts the call. Raises
        the errors of ``Engine.generate`` and, before the first output, ContextLengthExceeded.
        """


class HasTokens(Protocol):
    """An engine that supports token sessions, see ``EngineCapabilities.token_sessions``."""

    @property
    def tokens(self) -> TokenEngine:
        """The interface for token sessions."""
        ...


@runtime_checkable
class TraceableEngine(Protocol):
    """An engine that can trace the operations of its models with torch's profiler, in all its processes."""

    @property
    def can_trace(self) -> bool:
        """Whether the engine was started with tracing enabled."""
        ...

    async def start_trace(self, template: Path) -> None:
        """Start a trace; the paths of its files will begin with ``template``."""
        ...

    async def stop_trace(self) -> tuple[Path, ...]:
        """Stop the trace and return the paths of its files."""
        ...


def incident(failure: str, exception: BaseException, *, request_id: str | None = None) -> EngineFailed:
    """Log ``exception`` under a new error ID, and return an EngineFailed with this ID for the client.

    Its message is ``failure``, since the text of ``exception`` might reveal internals.
    """
    error_id = f"err_{uuid.uuid4().hex}"
    logger.error("%s (%s)", failure, error_id, exc_info=exception)
    return EngineFailed(failure, request_id=request_id, error_id=error_id)


# TurnTimes: when each step of one answer happened, from the end of the user's speech to the first sound at their ear.
#
# The service and the parts of an engine mark the moments, each where it happens and once, in the one TurnTimes of the
# request (``GenerationRequest.times``). All that tells them, such as finals, log lines, metrics, traces and recordings,
# reads them there. Times are seconds on the event loop's clock.


#: A moment that a part of an engine marks.
EngineMoment: TypeAlias = Literal["llm_asked", "first_token", "first_clause", "first_audio_made"]


class TimedPart(NamedTuple):
    """A stage of a request, or a part of the wait for its answer (``PARTS``): its name, when it began and ended."""

    name: str
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class TurnTimes:
    """The times of the steps of one answer, and the work on discarded answers. A time is None if it is not known.

    ``speech_ended``: the sound arrived, or was due (SpokenTimes), that turn detection took for the end of the user's
    speech; ``turn_decided``: turn detection decided that the turn had ended, after ``turn_decided_audio_ms`` more of
    audio. ``input_ended``: the last input arrived. ``engine_started``: the engine got the request, which may be while
    the user speaks.
    ``transcript_settled``: the last words of the input became final; ``transcript_guessed``: the same words were
    guessed at a pause. ``llm_asked``: the LLM had all of its input. ``first_token``: the first text, thought or tool
    call of the answer; ``first_clause``: the voice got its first text; ``first_audio_made``: the voice made its first
    audio. If the answer was begun at a pause, the last four are those of that work. ``first_audio_sent``,
    ``last_audio_sent``: the audio went to the connection. ``first_audio_played``: playback began, by the client's
    report or the server's clock. ``interrupted``: a cancel, speech or another request ended the answer.
    """

    __slots__ = (
        *MOMENTS,
        "_guess",
        "awaits_transcript",
        "discarded_sec",
        "discarded_tokens",
        "moved",
        "turn_decided_audio_ms",
    )

    def __init__(self) -> None:
        self.speech_ended: float | None = None
        self.input_ended: float | None = None
        self.turn_decided: float | None = None
        self.engine_started: float | None = None
        self.transcript_guessed: float | None = None
        self.transcript_settled: float | None = None
        self.llm_asked: float | None = None
        self.first_token: float | None = None
        self.first_clause: float | None = None
        self.first_audio_made: float | None = None
        self.first_audio_sent: float | None = None
        self.first_audio_played: float | None = None
        self.last_audio_sent: float | None = None
        self.interrupted: float | None = None
        #: How much audio after the end of the speech had been judged as the turn was decided, in milliseconds.
        self.turn_decided_audio_ms: int | None = None
        #: Whether the answer waits for the transcript. An LLM that hears by itself does not.
        self.awaits_transcript = False
        #: Whether another server has begun the request: the times are then incomplete, and are not reported.
        self.moved = False
        #: Answers that were begun at a pause and not used: how long they were worked on, and their tokens so far.
        self.discarded_sec = 0.0
        self.discarded_tokens = 0
        #: The latest guess of the words, and when it was made.
        self._guess: tuple[str, float] | None = None

    # marking

    def mark(self, moment: EngineMoment, stage: str) -> None:
        """Set ``moment`` to now, unless it is set already, and report it to the profiler as an event of ``stage``."""
        if getattr(self, moment) is None:
            setattr(self, moment, asyncio.get_running_loop().time())
            events.emit(stage, moment)

    def decide_turn(self, speech_ended: float, now: float, audio_ms: int) -> None:
        """Note that turn detection decides ``now`` that the turn has ended, ``audio_ms`` of audio after its speech."""
        self.speech_ended = min(speech_ended, now)
        self.turn_decided, self.turn_decided_audio_ms = now, audio_ms

    def guess(self, words: str, now: float) -> None:
        """Note the time of a guess of the input's ``words`` at a pause; "" withdraws the guess."""
        self._guess = (words, now) if words.strip() else None

    def settle(self, words: str, now: float) -> None:
        """Note the time at which ``words`` of the input became final. Ignored once audio of the answer was sent.

        If the latest guess had the same words, its time becomes ``transcript_guessed``.
        """
        if self.first_audio_sent is None:
            self.transcript_settled = now
            guess, self._guess = self._guess, None
            self.transcript_guessed = guess[1] if guess is not None and guess[0] == words else None

    def all_sent(self, now: float) -> None:
        """Note that the whole answer went to the connection. This has no effect on an answer without audio."""
        if self.first_audio_sent is not None:
            self.last_audio_sent = now

    def play(self, when: float) -> None:
        """Note that playback began at ``when``, or when the first audio was sent if that was later."""
        self.first_audio_played = when if self.first_audio_sent is None else max(when, self.first_audio_sent)

    def take_over(self, used: TurnTimes) -> None:
        """Copy the engine's moments from ``used``, those of an answer begun at a pause that becomes the answer."""
        self.llm_asked, self.first_token = used.llm_asked, used.first_token
        self.first_clause, self.first_audio_made = used.first_clause, used.first_audio_made

    def discard(self, seconds: float, tokens: int) -> None:
        """Note that an answer begun at a pause was discarded after ``seconds`` of work and ``tokens`` tokens."""
        self.discarded_sec += seconds
        self.discarded_tokens += tokens

    # reading

    @property
    def origin(self) -> float | None:
        """The moment from which the others are counted: the end of the speech or, without speech, that of the input.

        None if neither is known, or if another server began the request.
        """
        if self.moved:
            return None
        return self.input_ended if self.speech_ended is None else self.speech_ended

    @property
    def mouth_to_ear(self) -> float | None:
        """The seconds from the end of the speech to the start of playback.

        None if one of the two is not known, or if another server began the request.
        """
        if self.speech_ended is None or self.first_audio_played is None or self.moved:
            return None
        return self.first_audio_played - self.speech_ended

    def known(self) -> dict[str, float]:
        """Return the known moments by their names, in seconds on the event loop's clock."""
        return {name: when for name in MOMENTS if (when := getattr(self, name)) is not None}

    def in_ms(self) -> dict[str, int]:
        """Return the known moments in milliseconds since ``origin``, as clients get them; empty without an origin.

        A moment before the origin is negative. The result also has ``turn_decided_audio_ms`` and, if an answer was
        discarded, ``discarded_ms`` and ``discarded_tokens``.
        """
        if (origin := self.origin) is None:
            return {}
        told = {name: round((when - origin) * 1000) for name, when in self.known().items()}
        if self.turn_decided_audio_ms is not None:
            told["turn_decided_audio_ms"] = self.turn_decided_audio_ms
        if self.discarded_sec:
            told["discarded_ms"] = round(self.discarded_sec * 1000)
        if self.discarded_tokens:
            told["discarded_tokens"] = self.discarded_tokens
        return told

    def parts(self) -> list[TimedPart]:
        """Return the parts of the wait for the answer, in order, from ``origin`` to the first audio.

        Each part begins where the previous one ends, so the parts sum up to the whole wait. A part that had ended
        before the previous one lasts 0 seconds. A part whose end is not known is left out; the next part includes it.
        """
        if (last := self.origin) is None:
            return []
        parts = []
        for name, moment in PARTS:
            ended = getattr(self, moment)
            if ended is None or (moment == "transcript_settled" and not self.awaits_transcript):
                continue
            parts.append(TimedPart(name, last, last := max(last, ended)))
        return parts
