"""The data types of input and output: chunks, modalities, tasks, audio formats, usage, moments of an answer.

Every transport decodes its input to InputChunks. An answer is a series of OutputChunks and one FinalChunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Final, Self, TypeAlias

import orjson
from msgspec import Struct

from omni_ws.core.json_values import WHISPER_LANGUAGES, check_values, language_code
from omni_ws.errors import ContextLengthExceeded, InvalidFrame, InvalidValue, OmniError

#: The longest ``format`` of a chunk, in characters: a media type is at most 255 (RFC 6838, section 4.2).
MAX_FORMAT_CHARACTERS: Final = 256
#: The longest id that a client may choose, of an item or of the tool call that it answers. OpenAI's limit.
MAX_ID_CHARACTERS: Final = 512
#: The longest ``ref``: the name that a client gives one of its requests.
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
    #: What the server says unasked: a greeting, that a tool still works, whether the user is still there, and what the
    #: application gave it to tell, such as the result of a tool that worked meanwhile.
    GREETING = "greeting"
    FILLER = "filler"
    IDLE = "idle"
    TELLING = "telling"


class InputMode(StrEnum):
    """Whether input that arrives after the start extends the request or is only counted."""

    EXTEND = "extend"
    SNAPSHOT = "snapshot"


class Offset(Struct, frozen=True, gc=False):
    """The position of a chunk in the input of its request, in bytes of payload or characters of text."""

    start: int
    in_characters: bool = False


#: The memory that a chunk takes besides its payload.
CHUNK_OVERHEAD_BYTES: Final = 192


class InputChunk(Struct, frozen=True, gc=False):
    """One unit of input, in the form that all transports decode it to.

    One is created for each frame of each stream, hence a msgspec Struct, the cheapest class to create and read. Its
    fields cannot form a reference cycle, so ``gc=False`` exempts the thousands that may be buffered from garbage
    collection.
    """

    modality: Modality
    payload: bytes
    #: None if chunks are unnumbered and ordered by arrival (HTTP bodies) or by ``offset``.
    sequence_id: int | None = None
    #: An audio encoding that overrides the request's, or the MIME type of an image or video; None for the default.
    format: str | None = None
    timestamp_ms: int | None = None
    end_of_input: bool = False
    #: For text that is the result of a tool: the ID of the tool call that it answers.
    tool_call_id: str | None = None
    #: Given instead of ``sequence_id`` by clients that address input by position.
    offset: Offset | None = None
    #: Whether the chunk is a piece of a longer body, cut anywhere, so that its first bytes say nothing about its
    #: format.
    continues: bool = False
    #: The client's name for the request to which the chunk belongs.
    ref: str | None = None

    @property
    def only_names(self) -> bool:
        """Whether the chunk only names a request: it has no content, and does not end the input."""
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
    #: The length of the text divided by its length as compressed by zlib: high if the text repeats itself.
    compression_ratio: float
    no_speech_prob: float
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class Hearing:
    """A recogniser's report on speech, apart from the words.

    ``language`` is an English name in lower case. ``others`` are texts that are almost as likely as the transcript.
    """

    language: str | None = None
    segments: tuple[HeardSegment, ...] = ()
    others: tuple[str, ...] = ()

    def shifted(self, by_ms: int) -> Hearing:
        """Return the report with all times ``by_ms`` later, for audio that is part of a longer stream."""
        moved = (replace(one, start_ms=one.start_ms + by_ms, end_ms=one.end_ms + by_ms) for one in self.segments)
        return self if not by_ms else replace(self, segments=tuple(moved))


def heard_language(hearing: Hearing | None) -> str | None:
    """Return the language as a primary subtag of RFC 5646; None if the recogniser reports none, or an unknown name."""
    code = None if hearing is None or hearing.language is None else language_code(hearing.language)
    return code if code in WHISPER_LANGUAGES else None


def other_readings(hearing: Hearing | None) -> tuple[str, ...]:
    """Return the texts that are almost as likely as the transcript; empty if the recogniser reports none."""
    return () if hearing is None else hearing.others


@dataclass(frozen=True, slots=True)
class Word:
    """A spoken word and its time in milliseconds, in the answer's audio or, for a transcript, in the input's audio.

    ``text_end`` is the index in the answer's text, in characters, at which the word ends; None if the engine does not
    say.
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
        """Whether the arguments are a JSON object of at most MAX_MESSAGE_VALUES values.

        False, for example, if the answer was cut off within the arguments.
        """
        try:
            check_values(self.arguments)
            return isinstance(orjson.loads(self.arguments), dict)
        except (InvalidFrame, ValueError):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The tokens, bytes and audio that a request used. Engines without tokens count whitespace-separated words.

    ``input_after_start_bytes`` is the size of the input that arrived after the start. ``cached_tokens`` are the input
    tokens whose computation was reused, or None if unknown.
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


# Formats of audio.


class AudioEncoding(StrEnum):
    """The audio formats by their names on the wire (protocol/README.md, "Audio")."""

    PCM16 = "pcm16"
    F32 = "f32"
    PCMU = "pcmu"
    PCMA = "pcma"
    WAV = "wav"
    OPUS = "opus"
    WEBM = "webm"
    MP3 = "mp3"
    FLAC = "flac"
    OGG = "ogg"
    AAC = "aac"
    M4A = "m4a"
    MP4 = "mp4"
    MOV = "mov"


#: Bytes per sample and channel of the raw encodings.
SAMPLE_BYTES = {AudioEncoding.PCM16: 2, AudioEncoding.F32: 4, AudioEncoding.PCMU: 1, AudioEncoding.PCMA: 1}

#: The duration of compressed audio is unknown until it is decoded. Start policies assume this rate, the upper end of
#: what speech is encoded at (64 kbit/s): they may fire late, but not before there is enough audio.
NOMINAL_COMPRESSED_BYTES_PER_SECOND = 8_000

MIN_SAMPLE_RATE = 8_000
MAX_SAMPLE_RATE = 192_000
MAX_CHANNELS = 32


def checked_sample_rate(value: int, *, param: str = "sample_rate") -> int:
    """Return ``value``, a sample rate in Hz. Raises InvalidValue, naming ``param``, if it is out of range."""
    if not MIN_SAMPLE_RATE <= value <= MAX_SAMPLE_RATE:
        raise InvalidValue(
            f"the sample rate must be {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz, got {value}", param=param
        )
    return value


def checked_channels(value: int, *, param: str = "channels") -> int:
    """Return ``value``, a number of channels. Raises InvalidValue, naming ``param``, if it is out of range."""
    if not 1 <= value <= MAX_CHANNELS:
        raise InvalidValue(f"the number of channels must be 1 to {MAX_CHANNELS}, got {value}", param=param)
    return value


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of an audio stream: its encoding, sample rate and channels.

    ``sample_rate`` is in Hz. Containers and self-describing formats (WAV, Ogg, WebM, MP3, FLAC, AAC, MP4) carry their
    own rate and channels, which win over these.
    """

    encoding: AudioEncoding = AudioEncoding.PCM16
    sample_rate: int = 16_000
    channels: int = 1

    @property
    def is_raw(self) -> bool:
        """Whether the stream is bare samples, without headers, so that it can be cut at any frame."""
        return self.encoding in SAMPLE_BYTES

    @property
    def bytes_per_second(self) -> int:
        """The byte rate: exact for raw samples, that of 16-bit samples for ``wav``, nominal for compressed audio."""
        if self.encoding is AudioEncoding.WAV:
            return 2 * self.sample_rate * self.channels
        sample_bytes = SAMPLE_BYTES.get(self.encoding)
        if sample_bytes is None:
            return NOMINAL_COMPRESSED_BYTES_PER_SECOND
        return sample_bytes * self.sample_rate * self.channels

    def duration_ms(self, byte_count: int) -> float:
        """Return how many milliseconds ``byte_count`` bytes last at ``bytes_per_second``."""
        return byte_count * 1000 / self.bytes_per_second


DEFAULT_INPUT_AUDIO = AudioFormat()


# The chunks of an answer.

#: OpenAI's finish reason of an answer that was cut because of its content.
CONTENT_FILTER: Final = "content_filter"
#: The code of the warning about a finish reason of another server that FinishReason lacks.
FINISH_REASON_WARNING: Final = "finish_reason"


class OutputChunk(Struct, frozen=True, omit_defaults=True):
    """One unit of the output of a request.

    The modality selects the field with the content: ``text`` for text, thoughts and transcripts, ``tool_call``, or
    ``payload`` (in ``format``) for audio. ``start_ms`` is the position on the time line of the answer's audio or, for
    transcripts, of the input's. An ``interim`` transcript is replaced by the next one; the others are settled.
    """

    request_id: str
    sequence_id: int
    modality: OutputModality
    text: str = ""
    payload: bytes = b""
    format: AudioFormat | None = None
    start_ms: int | None = None
    interim: bool = False
    words: tuple[Word, ...] = ()
    tool_call: ToolCallFragment | None = None
    #: Log-probabilities of the tokens of ``text``, when the request asks for them.
    logprobs: tuple[TokenLogprob, ...] = ()
    #: The index of the answer, for requests that ask for several (OpenAI's ``n``).
    choice: int = 0
    #: Of a transcript: whether it follows the final chunk of its request.
    late: bool = False
    #: Of a late transcript: whether recognition has failed, so that the words will never be known.
    failed: bool = False
    #: Of a transcript: the id of the speech turn in which it was spoken.
    turn_id: str | None = None
    #: Of text: whether it is a refusal, the model's statement that it does not answer.
    refusal: bool = False
    #: Of a transcript: its segments and its language, if the recogniser reports them.
    hearing: Hearing | None = None


class AnswerWarning(Struct, frozen=True):
    """A warning that an answer, which has not failed, deviates from what was asked: for example, it was cut off."""

    code: str
    message: str
    param: str | None = None


class UrlCitation(Struct, frozen=True):
    """A web page as the source of part of an answer: of the answer's text from ``start`` to ``end``, in characters."""

    title: str
    url: str
    start: int
    end: int
    #: The licence of the page's text, as SPDX names it; None if unknown.
    license: str | None = None
    #: The index of the answer, if there are several.
    choice: int = 0


def context_full(context: int) -> AnswerWarning:
    """Return the warning for an answer that was cut off because the context of ``context`` tokens is full."""
    return AnswerWarning(
        ContextLengthExceeded.wire.code,
        f"the answer was cut off: with it the context of {context} tokens is full; send less, or shorten the history",
    )


class WordsKnown(Enum):
    """Whether the words that the user spoke in a request are known."""

    #: Recognition is still running.
    NOT_YET = "not yet"
    #: All words are known; there may be none.
    ALL = "all"
    #: Recognition has failed, was refused, or took too long.
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalChunk:
    """The last output of a request, unless a late transcript follows."""

    request_id: str
    sequence_id: int
    finish_reason: FinishReason
    usage: Usage
    #: The finish reason of each choice, for requests that ask for several answers.
    finish_reasons: tuple[FinishReason, ...] = ()
    #: For each choice, the finish reason of another server that FinishReason lacks, or None. Empty if there is none.
    foreign_reasons: tuple[str | None, ...] = ()
    #: The failures of parts of the engine, and other deviations from what was asked.
    warnings: tuple[OmniError | AnswerWarning, ...] = ()
    citations: tuple[UrlCitation, ...] = ()
    #: NOT_YET if a late transcript will follow.
    words: WordsKnown = WordsKnown.ALL
    #: The client's name for the request, and the id of the speech turn that opened or joined the request.
    ref: str | None = None
    turn_id: str | None = None
    #: When the steps of the answer were, see ``TurnTimes.in_ms``. Empty if that is not known.
    times: Mapping[str, int] = field(default_factory=dict)


AnyOutput: TypeAlias = OutputChunk | FinalChunk


# The names of the moments of an answer, and of the parts between them (protocol/README.md, "Times of an answer").


#: The moments by their names on the wire, in the order in which they follow one another in most answers.
MOMENTS: Final = (
    "speech_ended",
    "input_ended",
    "turn_decided",
    "engine_started",
    "transcript_guessed",
    "transcript_settled",
    "llm_asked",
    "first_token",
    "first_clause",
    "first_audio_made",
    "first_audio_sent",
    "first_audio_played",
    "last_audio_sent",
    "interrupted",
)

#: The parts of the time from the end of the speech to the first sound, each with the moment at which it ends.
PARTS: Final = (
    ("turn_decision", "turn_decided"),
    ("queue", "engine_started"),
    ("recognition", "transcript_settled"),
    ("llm_first_token", "first_token"),
    ("first_clause", "first_clause"),
    ("voice", "first_audio_made"),
    ("sending", "first_audio_sent"),
    ("playing", "first_audio_played"),
)

#: Fields of ``times`` that are durations or counts, not moments.
BESIDE_MOMENTS: Final = ("turn_decided_audio_ms", "discarded_ms", "discarded_tokens")
