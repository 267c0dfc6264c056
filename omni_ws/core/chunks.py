"""The vocabulary of input and output: chunks, modalities, tasks, tool calls, usage."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self

from msgspec import Struct

from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame

#: The longest ``format`` of a chunk, in characters: a media type is at most 255 (RFC 6838, section 4.2).
MAX_FORMAT_CHARACTERS: Final = 256
#: The longest id that a client may choose, of an item or of the tool call that it answers. OpenAI's limit.
MAX_ID_CHARACTERS: Final = 512
#: The longest name of a client for one of its requests.
MAX_REF_CHARACTERS: Final = 64


class Modality(StrEnum):
    """The kind of content of an input chunk."""

    AUDIO = "audio"
    TEXT = "text"
    VIDEO = "video"
    IMAGE = "image"


class OutputModality(StrEnum):
    """The kind of content of an output chunk.

    ``transcript`` is the recognised text of the input audio, ``thought`` what the model wrote for itself.
    """

    TEXT = "text"
    AUDIO = "audio"
    TRANSCRIPT = "transcript"
    TOOL_CALL = "tool_call"
    THOUGHT = "thought"


class FinishReason(StrEnum):
    """Why an answer ended.

    ``length`` is the token limit of the request or the model, ``cancelled`` an interruption by the client or by
    barge-in.
    """

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Task(StrEnum):
    """``chat`` answers the input, ``speech`` reads its text aloud, ``transcribe`` writes its audio down."""

    CHAT = "chat"
    SPEECH = "speech"
    TRANSCRIBE = "transcribe"


class StartTrigger(StrEnum):
    """The event that started the work on a request."""

    FIRST_CHUNK = "first_chunk"
    MIN_LENGTH = "min_length"
    MODALITY = "modality"
    END_OF_INPUT = "end_of_input"
    VAD = "vad"
    GREETING = "greeting"


class InputMode(StrEnum):
    """Whether input that arrives after the start extends the request or is only counted."""

    EXTEND = "extend"
    SNAPSHOT = "snapshot"


class Offset(Struct, frozen=True, gc=False):
    """The position of a chunk in the input of its request, in bytes of payload or characters of text."""

    start: int
    in_characters: bool = False


#: What a chunk takes in memory besides its payload.
CHUNK_OVERHEAD_BYTES: Final = 192


class InputChunk(Struct, frozen=True, gc=False):
    """One unit of input, as every transport decodes it.

    One is created for each frame of each stream, hence a msgspec Struct, the cheapest class to create and read. Its
    fields cannot form a reference cycle, so ``gc=False`` exempts the thousands that may be buffered from garbage
    collection.
    """

    modality: Modality
    payload: bytes
    #: None where chunks are unnumbered and ordered by arrival (HTTP bodies) or by ``offset``.
    sequence_id: int | None = None
    #: An audio encoding that overrides the request's, or the MIME type of an image or video; None for the default.
    format: str | None = None
    timestamp_ms: int | None = None
    end_of_input: bool = False
    #: For text that is the result of a tool: the ID of the tool call that it answers.
    tool_call_id: str | None = None
    #: Given instead of ``sequence_id`` by clients that address input by position.
    offset: Offset | None = None
    #: Whether it is a piece of something longer that was cut here, so that its beginning means nothing.
    continues: bool = False
    #: The client's name for the request that it belongs to.
    ref: str | None = None

    @property
    def only_names(self) -> bool:
        """Whether it does nothing but name a request."""
        return self.ref is not None and not self.has_content and not self.end_of_input

    @property
    def has_content(self) -> bool:
        """Whether the chunk carries input. An empty tool result counts: it says that the tool returned nothing."""
        return bool(self.payload) or self.tool_call_id is not None

    @property
    def is_bare_end(self) -> bool:
        """Whether the chunk does nothing but end the input; repeating such a chunk is harmless."""
        return self.end_of_input and not self.has_content

    @classmethod
    def end(cls) -> Self:
        """Return an empty chunk that ends the input."""
        return cls(Modality.TEXT, b"", end_of_input=True)


@dataclass(frozen=True, slots=True)
class HeardSegment:
    """A segment of recognised speech, as OpenAI's ``verbose_json`` describes it; times are in milliseconds."""

    text: str
    start_ms: int
    end_ms: int
    #: The ids of the recogniser's tokens, and the mean of their log-probabilities.
    tokens: tuple[int, ...]
    avg_logprob: float
    #: How many times longer the text is than zlib makes it: high where it repeats itself.
    compression_ratio: float
    no_speech_prob: float
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Hearing:
    """How a transcript came about. ``language`` is the one that was found, by its English name in lower case."""

    language: str | None = None
    segments: tuple[HeardSegment, ...] = ()

    def shifted(self, by_ms: int) -> Hearing:
        """The same of audio that begins so much later."""
        moved = (replace(one, start_ms=one.start_ms + by_ms, end_ms=one.end_ms + by_ms) for one in self.segments)
        return self if not by_ms else Hearing(self.language, tuple(moved))


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word and its time in milliseconds, in the answer's audio or, for a transcript, in the input's.

    ``text_end`` is where it ends in the answer's text, in characters, if the engine knows it.
    """

    text: str
    start_ms: int
    end_ms: int
    text_end: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer, or of an echoed prompt, with its natural log-probability.

    ``data`` is the token's bytes, which need not be whole characters of UTF-8. ``logprob`` is None for the first token
    of a prompt, which has no context. ``top`` holds the most probable tokens at this position, in descending order,
    when the request asks for them.
    """

    token: str
    data: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallFragment:
    """A piece of the ``index``-th tool call of an answer.

    ``id`` and ``name`` are set in its first fragment; ``arguments`` are to be concatenated.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete tool call; ``arguments`` is the JSON text that the model produced, which may be malformed."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments parse as a JSON object. They do not when the answer was cut off within them."""
        try:
            check_values(self.arguments)
            return isinstance(json.loads(self.arguments), dict)
        except (InvalidFrame, ValueError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources that a request used. Engines without tokens count whitespace-separated words.

    ``input_after_start_bytes`` is the size of the input that arrived after the start. ``cached_tokens`` are the input
    tokens whose computation was reused, or None when unknown.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    input_audio_ms: int = 0
    output_audio_ms: int = 0
    input_after_start_bytes: int = 0
    cached_tokens: int | None = None

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens
