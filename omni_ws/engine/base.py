"""What an engine is: it says what it can do, and turns a request into a stream of outputs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

from omni_ws.audio.samples import Samples
from omni_ws.core.audio_format import AudioFormat
from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    InputMode,
    Modality,
    OutputModality,
    Task,
    TokenLogprob,
    ToolCall,
    ToolCallFragment,
    Usage,
    Word,
)
from omni_ws.engine.media_room import MediaRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do. What is not declared here is refused by name before anything starts."""

    input_modalities: frozenset[Modality]
    output_modalities: frozenset[OutputModality]
    tasks: frozenset[Task]
    #: Whether chunks that come after the start join the request.
    extend: bool
    #: Names of the steps that an answer takes, in their order; empty: it is one, named as the engine is.
    stages: tuple[str, ...] = ()
    #: Voice names, the default first; empty where the engine does not speak.
    voices: tuple[str, ...] = ()
    #: Sampling parameters that change the answer.
    sampling: frozenset[str] = frozenset()
    #: Sampling parameters that are accepted and change nothing, because the engine is deterministic.
    sampling_no_ops: frozenset[str] = frozenset()
    #: ``stage.parameter`` names that ``stage_params`` and ``stage_sampling`` may set.
    stage_params: frozenset[str] = frozenset()
    stage_sampling: frozenset[str] = frozenset()
    tools: bool = False
    logprobs: bool = False
    structured_output: bool = False
    #: Several answers to one request.
    choices: bool = False
    #: Whether ``AnswerOptions.priority`` changes the order of work.
    priority: bool = False
    #: Prompts that are taken as they stand, without a chat template.
    raw_prompts: bool = False
    #: Raw prompts of token ids.
    token_prompts: bool = False
    #: Answers to raw prompts that begin with the prompt.
    echo: bool = False
    #: Whose message the input may be: see ``AnswerOptions.input_role``.
    input_roles: frozenset[str] = frozenset({"user"})
    #: Why chat is refused where it is a task for prompts as they stand alone; empty where it is not refused.
    chat_refusal: str = ""
    token_sessions: bool = False
    #: Names of ``AnswerOptions.media_limits`` that are kept to.
    media_limits: frozenset[str] = frozenset()
    #: Languages of speech that it can be told to listen for (RFC 5646, primary subtags).
    languages: frozenset[str] = frozenset()
    #: Whether its transcripts have the times of their words.
    word_times: bool = False
    #: Whether messages of the history may have ``speech``.
    speech_in_history: bool = False

    @property
    def transcripts(self) -> bool:
        """Whether a request with speech gets a settled transcript of it. Where there is none, there were no words."""
        return OutputModality.TRANSCRIPT in self.output_modalities


#: Stands in the history for speech whose words are not known where the speech itself cannot.
WORDS_UNKNOWN: Final = "[spoken; the words are not known]"


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """What a user said in an earlier turn: audio chunks as they came. Two are the same where they are one object."""

    chunks: tuple[InputChunk, ...]
    #: Of chunks whose own ``format`` is None.
    format: AudioFormat
    #: The length that it is counted with; of compressed audio perhaps a nominal one.
    audio_ms: float


@dataclass(frozen=True, slots=True)
class Message:
    """An earlier turn of the conversation. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    An assistant's message may hold the calls that it made, a tool's says which call it answers. A user's may have
    ``speech`` behind its text, where its words are not known and the capabilities allow it.
    """

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    speech: Speech | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """The form of an answer: JSON of this JSON Schema, or any JSON object where ``schema`` is None."""

    schema: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What few requests ask for, and few engines can do: see the capabilities of the same names."""

    #: How many of the likeliest tokens to name beside each sampled one; None = no log-probabilities at all.
    logprobs: int | None = None
    structure: StructuredOutput | None = None
    #: How many answers are wanted.
    choices: int = 1
    #: Smaller numbers are worked on first.
    priority: int = 0
    #: Whether the input is the prompt as it stands.
    raw_prompt: bool = False
    #: Whether the text of a raw prompt is a JSON list of token ids.
    token_prompt: bool = False
    #: Whether the answer to a raw prompt begins with the prompt, with log-probabilities where they are asked for.
    echo: bool = False
    #: Whether nothing follows that.
    only_echo: bool = False
    #: Whose message the input is: ``user``, ``system``, or ``assistant``, whose message the answer then goes on with.
    input_role: str = "user"
    #: Whether an answer may hold more than one tool call.
    parallel_tool_calls: bool = True
    #: How large, and how dense in time, images and videos are to be: names of ``omni_ws.media.limits.MediaLimits``.
    media_limits: Mapping[str, float] = field(default_factory=dict)


class InputSource(Protocol):
    """The chunks of one request in order; ends when the input ends. Iterate it once."""

    def __aiter__(self) -> AsyncIterator[InputChunk]: ...


class UsageMeter:
    """Tells what a request has used so far, where it is cut short before its Finished.

    An engine that counts tokens sets ``read``, which returns None while there are none to count.
    """

    __slots__ = ("read",)

    def __init__(self) -> None:
        self.read: Callable[[], Usage | None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request as the engine sees it.

    ``input`` yields what was there when the start policy fired and, under ``extend``, every later chunk. Text in it is
    UTF-8, and no character is spread over two chunks.
    ``input_audio`` is the format of audio chunks whose own ``format`` is None.
    """

    request_id: str
    task: Task
    input: InputSource
    input_mode: InputMode
    input_audio: AudioFormat
    #: Subset of {"text", "audio"}: what the client wants back.
    modalities: frozenset[OutputModality]
    voice: str | None = None
    instructions: str = ""
    history: tuple[Message, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stage_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    stage_params: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    #: As in a chat body of OpenAI: ``{"type": "function", "function": {…}}`` each.
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    options: AnswerOptions = AnswerOptions()
    #: The name of the API key that asks; what is cached for one is not shared with another.
    owner: str | None = None
    meter: UsageMeter = field(default_factory=UsageMeter)
    #: Where what is decoded of the input is counted.
    media_room: MediaRoom = field(default_factory=MediaRoom)


@dataclass(frozen=True, slots=True)
class TextOutput:
    """``logprobs`` are those of the tokens in ``text``; ``choice`` says which of several answers it belongs to."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    choice: int = 0


@dataclass(frozen=True, slots=True)
class ToolCallOutput:
    call: ToolCallFragment
    choice: int = 0


@dataclass(frozen=True, slots=True)
class TranscriptOutput:
    """What was heard. An interim replaces the interim before it; texts that are not interim append.

    ``start_ms`` is the place in the input audio.
    """

    text: str
    interim: bool = False
    start_ms: int | None = None
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class AudioOutput:
    """Speech at ``sample_rate`` Hz, continuing the response's audio; words are placed on its time line."""

    samples: Samples
    sample_rate: int
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last output of a request that ended by itself. ``reasons`` are those of each of several answers."""

    reason: FinishReason
    usage: Usage
    reasons: tuple[FinishReason, ...] = ()


EngineOutput: TypeAlias = TextOutput | ToolCallOutput | TranscriptOutput | AudioOutput | Finished


class EngineState(StrEnum):
    STARTING = "starting"
    OK = "ok"
    UNHEALTHY = "unhealthy"


class Engine(Protocol):
    """The life of an engine is ``start`` … ``generate`` (many at a time) … ``stop``."""

    name: str
    #: The model name that the server announces.
    model: str

    @property
    def capabilities(self) -> EngineCapabilities:
        """Fixed once ``start`` has returned."""
        ...

    @property
    def state(self) -> EngineState: ...

    @property
    def active_requests(self) -> int:
        """Requests that hold a slot, a worker or a stream of this engine right now."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Lines for the person who starts the server: what it found, and what it lacks."""
        ...

    async def start(self) -> None:
        """Load, warm up; returns when the engine can work. Raises EngineFailed when it cannot."""
        ...

    async def stop(self) -> None:
        """Release everything. Idempotent."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        """An async generator that yields outputs and ends with one Finished.

        Closing it (``aclose``) or cancelling the task that iterates it aborts the request; there is no other way.
        Raises EngineOverloaded when there is no capacity, EngineFailed when the engine breaks, UnsupportedFormat
        for input that cannot be decoded.
        """
        ...


@runtime_checkable
class TraceableEngine(Protocol):
    """An engine that can write down the operations of its models, with torch's profiler, in all its processes."""

    @property
    def can_trace(self) -> bool:
        """Whether this one was started with what a trace needs."""
        ...

    async def start_trace(self, template: Path) -> None: ...

    async def stop_trace(self) -> tuple[Path, ...]:
        """The files that were written; the name of each begins with the template."""
        ...
