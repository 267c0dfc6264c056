"""The units of input and output, as the whole server speaks of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from msgspec import Struct


class Modality(StrEnum):
    """What an input chunk carries."""

    AUDIO = "audio"
    TEXT = "text"
    VIDEO = "video"
    IMAGE = "image"


class OutputModality(StrEnum):
    """What an output chunk carries; ``transcript`` is what the engine heard."""

    TEXT = "text"
    AUDIO = "audio"
    TRANSCRIPT = "transcript"
    TOOL_CALL = "tool_call"


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


class Task(StrEnum):
    """``chat`` answers, ``speech`` reads the input text aloud, ``transcribe`` writes the input audio down."""

    CHAT = "chat"
    SPEECH = "speech"
    TRANSCRIBE = "transcribe"


class StartTrigger(StrEnum):
    """What made the work on a request start."""

    FIRST_CHUNK = "first_chunk"
    MIN_LENGTH = "min_length"
    MODALITY = "modality"
    END_OF_INPUT = "end_of_input"
    VAD = "vad"


class InputMode(StrEnum):
    """What chunks do that come after the start: join the request, or only be counted."""

    EXTEND = "extend"
    SNAPSHOT = "snapshot"


class Offset(Struct, frozen=True, gc=False):
    """Where a chunk begins in the input of its request: ``start`` counts bytes of payload, or characters of text."""

    start: int
    in_characters: bool = False


class InputChunk(Struct, frozen=True, gc=False):
    """One unit of input.

    A Struct, because one is made for every frame of every stream: no other class is made and read as fast, and what
    waits in its thousands is not walked by the garbage collector (it holds nothing that could hold it).
    """

    modality: Modality
    payload: bytes
    #: None where the sender numbers nothing and the order of arrival is the order (HTTP bodies).
    sequence_id: int | None = None
    #: An audio encoding that overrides the request's, or the MIME type of an image or video; None = the default.
    format: str | None = None
    timestamp_ms: int | None = None
    end_of_input: bool = False
    #: Of text that is the result of a tool: which call of the model it answers.
    tool_call_id: str | None = None
    #: In place of a number.
    offset: Offset | None = None

    @property
    def has_content(self) -> bool:
        """The result of a tool may be empty, and says that there is none; nothing else says anything without bytes."""
        return bool(self.payload) or self.tool_call_id is not None

    @property
    def is_bare_end(self) -> bool:
        """Whether it ends the input and brings nothing: once the input has ended it may come again."""
        return self.end_of_input and not self.has_content

    @classmethod
    def end(cls) -> Self:
        """An empty chunk that ends the input."""
        return cls(Modality.TEXT, b"", end_of_input=True)


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its place in milliseconds: of the response's audio, or, in a transcript, of the input's."""

    text: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of an answer, or of a prompt that is given back, and its natural log-probability.

    ``data`` is the token's own bytes: a character may be spread over several tokens. ``logprob`` is None for the first
    token of a prompt, which nothing stands before. ``top`` holds the likeliest tokens at this place, the likeliest
    first, where they were asked for.
    """

    token: str
    data: bytes
    logprob: float | None
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallFragment:
    """A piece of the ``index``-th tool call of an answer: id and name come once, the arguments' JSON in pieces."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call; ``arguments`` is JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str

    @property
    def is_whole(self) -> bool:
        """Whether the arguments are an object, and not what was written of one when the answer was cut off."""
        try:
            return isinstance(json.loads(self.arguments), dict)
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request used. Engines without tokens count whitespace-separated words.

    ``cached_tokens`` are those of the input that had been computed before, None where that is not known.
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
