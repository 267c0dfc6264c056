"""What a session tells its user, typed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from omni_ws.core.chunks import FinishReason, OutputModality, ToolCall, ToolCallFragment, Usage, Word
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.wire.server_frames import OutputChunkFrame, UsageFields

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """Work on a request has begun. ``sequence_id`` is the input chunk that fired it, None for a bare end."""

    request_id: str
    trigger: str
    sequence_id: int | None
    input_mode: str


@dataclass(frozen=True, slots=True)
class TextChunk:
    request_id: str
    sequence_id: int
    text: str


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """``audio`` is in ``format`` at ``sample_rate`` Hz; ``start_ms`` is its place on the response's time line."""

    request_id: str
    sequence_id: int
    audio: bytes
    format: str
    sample_rate: int
    start_ms: int | None = None
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptChunk:
    """What was heard. An interim replaces the interim before it; see TranscriptView."""

    request_id: str
    sequence_id: int
    text: str
    interim: bool = False
    start_ms: int | None = None
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A piece of the ``index``-th tool call of an answer: id and name come once, the arguments' JSON in pieces."""

    request_id: str
    sequence_id: int
    call: ToolCallFragment


@dataclass(frozen=True, slots=True)
class Final:
    """The last event of a request.

    ``sequence_id`` and ``usage`` are None where the connection was lost after the request had been cancelled: it is
    over, and nobody can say what it used.
    """

    request_id: str
    sequence_id: int | None
    finish_reason: FinishReason
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """With turn detection: the user speaks. Where speech may interrupt, whoever plays an answer stops now."""

    audio_ms: int


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """With turn detection: the turn of the user is over."""

    audio_ms: int


@dataclass(frozen=True, slots=True)
class InputAck:
    """Everything below ``next_sequence_id`` was accepted in order; ``credit_bytes`` more may be sent now."""

    next_sequence_id: int
    buffered_chunks: int
    received_bytes: int
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error after which the session goes on, or the one that a failing close is about to follow.

    ``blocks_request``: the end of a request's input was refused, so that no Final comes unless the input is ended
    again, or everything of it was refused, so that there is no request.
    """

    error: OmniError
    retryable: bool = False
    blocks_request: bool = False

    @property
    def request_id(self) -> str | None:
        return self.error.request_id


@dataclass(frozen=True, slots=True)
class Closing:
    """The server is about to close the session in good order."""

    reason: str
    retryable: bool
    time_left_ms: int


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection was lost, and a fresh session took over.

    Requests that had no Final were sent again as a whole, ``resent_chunks`` in all: what came of their answers before
    is void, and they are answered from the beginning.
    """

    session_id: str
    resent_chunks: int


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection was lost, and the session goes on over another one, as if nothing had happened.

    ``resent_frames`` were sent again; ``replayed`` outputs come now that would have come earlier.
    """

    session_id: str
    resent_frames: int
    replayed: int


Event: TypeAlias = (
    ResponseStarted
    | TextChunk
    | ToolCallChunk
    | AudioChunk
    | TranscriptChunk
    | Final
    | SpeechStarted
    | SpeechStopped
    | InputAck
    | ErrorEvent
    | Closing
    | Reconnected
    | Resumed
)

#: What an event costs in memory besides its content, about.
EVENT_OVERHEAD_BYTES = 128


def event_bytes(event: Event) -> int:
    match event:
        case AudioChunk(audio=audio):
            return EVENT_OVERHEAD_BYTES + len(audio)
        case TextChunk(text=text) | TranscriptChunk(text=text):
            return EVENT_OVERHEAD_BYTES + 4 * len(text)
        case ToolCallChunk(call=call):
            return EVENT_OVERHEAD_BYTES + 4 * len(call.arguments)
    return EVENT_OVERHEAD_BYTES


def output_event(frame: OutputChunkFrame) -> Event | None:
    """None for a modality that this version does not know. Raises InvalidFrame where a needed field is missing."""
    number = frame.sequence_id
    if frame.final is True:
        reason = _known(frame.finish_reason, "finish_reason")
        usage = None if isinstance(frame.usage, UnsetType) else _usage(frame.usage)
        try:
            return Final(frame.request_id, number, FinishReason(reason), usage)
        except ValueError:
            raise InvalidFrame(f"unknown finish_reason {reason!r}", param="finish_reason") from None
    start_ms = None if isinstance(frame.start_ms, UnsetType) else frame.start_ms
    told = () if isinstance(frame.words, UnsetType) else frame.words
    words = tuple(Word(word.text, word.start_ms, word.end_ms) for word in told)
    match frame.modality:
        case OutputModality.TEXT:
            return TextChunk(frame.request_id, number, _known(frame.text, "text"))
        case OutputModality.TOOL_CALL:
            call = ToolCallFragment(
                _known(frame.index, "index"), _told(frame.id), _told(frame.name), _told(frame.arguments) or ""
            )
            return ToolCallChunk(frame.request_id, number, call)
        case OutputModality.TRANSCRIPT:
            text, interim = _known(frame.text, "text"), frame.interim is True
            return TranscriptChunk(frame.request_id, number, text, interim, start_ms, words)
        case OutputModality.AUDIO:
            return AudioChunk(
                frame.request_id,
                number,
                _known(frame.payload, "payload"),
                _known(frame.format, "format"),
                _known(frame.sample_rate, "sample_rate"),
                start_ms,
                words,
            )
    return None


def _known(value: T | UnsetType, name: str) -> T:
    if value is UNSET or isinstance(value, UnsetType):
        raise InvalidFrame(f"an output_chunk without {name}", param=name)
    return value


def _told(value: str | UnsetType) -> str | None:
    return None if isinstance(value, UnsetType) else value


def _usage(fields: UsageFields) -> Usage:
    return Usage(
        input_tokens=fields.input_tokens,
        output_tokens=fields.output_tokens,
        input_audio_ms=fields.input_audio_ms,
        output_audio_ms=fields.output_audio_ms,
        input_after_start_bytes=fields.input_after_start_bytes,
    )


class TranscriptView:
    """A transcript as it stands: ``settled`` will not change any more, ``interim`` may."""

    def __init__(self) -> None:
        self.settled = ""
        self.interim = ""

    def add(self, chunk: TranscriptChunk) -> None:
        if chunk.interim:
            self.interim = chunk.text
        else:
            self.settled += chunk.text
            self.interim = ""

    @property
    def text(self) -> str:
        return self.settled + self.interim

    def clear(self) -> None:
        self.settled = self.interim = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. ``audio`` is in ``audio_format`` at ``sample_rate`` Hz; both are None where there is none."""

    request_id: str = ""
    text: str = ""
    transcript: str = ""
    audio: bytes = b""
    audio_format: str | None = None
    sample_rate: int | None = None
    words: tuple[Word, ...] = ()
    #: To be answered by ``send_tool_result`` each.
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    #: What the server complained about while it went on.
    errors: tuple[OmniError, ...] = ()


class AnswerBuilder:
    """Puts the events of one request together."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._request_id = ""
        self._texts: list[str] = []
        self._calls: dict[int, ToolCall] = {}
        self._transcript = TranscriptView()
        self._audio: list[bytes] = []
        self._format: tuple[str, int] | None = None
        self._words: list[Word] = []
        self._final: Final | None = None
        self._errors: list[OmniError] = []

    def add(self, event: Event) -> None:
        match event:
            case Reconnected():
                self._restart()
            case TextChunk(text=text):
                self._texts.append(text)
            case ToolCallChunk(call=piece):
                call = self._calls.get(piece.index) or ToolCall("", "", "")
                self._calls[piece.index] = ToolCall(
                    piece.id or call.id, piece.name or call.name, call.arguments + piece.arguments
                )
            case TranscriptChunk():
                self._transcript.add(event)
            case AudioChunk():
                self._audio.append(event.audio)
                self._format = (event.format, event.sample_rate)
                self._words += event.words
            case ErrorEvent(error=error):
                self._errors.append(error)
            case Final():
                self._final = event
                self._request_id = event.request_id

    def build(self) -> Answer:
        audio_format, sample_rate = self._format or (None, None)
        return Answer(
            request_id=self._request_id,
            text="".join(self._texts),
            transcript=self._transcript.text,
            audio=b"".join(self._audio),
            audio_format=audio_format,
            sample_rate=sample_rate,
            words=tuple(self._words),
            tool_calls=tuple(self._calls.values()),
            finish_reason=self._final.finish_reason if self._final else None,
            usage=self._final.usage if self._final else None,
            errors=tuple(self._errors),
        )
