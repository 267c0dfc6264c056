"""The events that a session delivers, the answers that are assembled from them, and the event queue."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final as Constant
from typing import TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from omni_ws.core.chunks import (
    SAMPLE_BYTES,
    AnswerWarning,
    FinishReason,
    OutputModality,
    StartTrigger,
    ToolCall,
    ToolCallFragment,
    UrlCitation,
    Usage,
    Word,
)
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.wire.server_frames import (
    BackchannelFrame,
    OutputChunkFrame,
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
    UsageFields,
)


@dataclass(frozen=True, slots=True)
class ResponseStarted:
    """The event that the engine has started on a request.

    ``sequence_id`` is the input chunk that triggered the start; None if a bare end of input did. ``ref`` is the name
    that the request was sent with, ``turn_id`` the id of the speech turn that opened or joined it.
    """

    request_id: str
    trigger: str
    sequence_id: int | None
    input_mode: str
    ref: str | None = None
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the text of an answer."""

    request_id: str
    sequence_id: int
    text: str


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of the audio of an answer.

    ``audio`` is in ``format`` at ``sample_rate`` Hz. ``start_ms`` is its position in the answer's audio; the times of
    ``words`` are positions there, too.
    """

    request_id: str
    sequence_id: int
    audio: bytes = field(repr=False)
    format: str
    sample_rate: int
    start_ms: int | None = None
    words: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class TranscriptChunk:
    """A piece of the transcript of the user's speech.

    An interim piece replaces the interim piece before it; :class:`TranscriptView` applies that. A ``late`` piece
    arrives after the Final of its request, with words that were recognised after the Final.
    """

    request_id: str
    sequence_id: int
    text: str
    interim: bool = False
    start_ms: int | None = None
    words: tuple[Word, ...] = ()
    turn_id: str | None = None
    late: bool = False
    #: The language that was detected in it (RFC 5646), if it is settled.
    language: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallChunk:
    """A fragment of a tool call.

    The id and the name arrive once; the arguments are JSON text, in pieces. ``call.index`` is the number of the call in
    its answer.
    """

    request_id: str
    sequence_id: int
    call: ToolCallFragment


@dataclass(frozen=True, slots=True)
class Final:
    """The last event of a request, unless a late transcript follows.

    ``sequence_id`` and ``usage`` are None if the connection was lost after the request had been cancelled.
    """

    request_id: str
    sequence_id: int | None
    finish_reason: FinishReason
    usage: Usage | None
    ref: str | None = None
    turn_id: str | None = None
    #: Deviations from what was asked.
    warnings: tuple[AnswerWarning, ...] = ()
    #: The web pages that the answer is taken from.
    citations: tuple[UrlCitation, ...] = ()
    #: Milliseconds from the end of the speech, or else of the input, to the steps of the answer, by their names.
    times: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Turn detection: the user started to speak at ``audio_ms`` of the input audio.

    If barge-in is configured, stop the playback of the current answer. With ``interrupt_resume`` the answer may
    continue: then more of its audio arrives, to be played from its ``start_ms``. ``turn_id`` is the id of this speech
    turn, ``request_id`` the request that it opens or joins; None if it belongs to none.

    ``certain`` is False, with ``turn_detection.duck`` only, if it is not known yet whether the user interrupts: lower
    the sound of the answer by 15 dB, and play on. A SpeechConfirmed or a SpeechDismissed of this turn follows.
    """

    audio_ms: int
    turn_id: str | None = None
    request_id: str | None = None
    certain: bool = True


@dataclass(frozen=True, slots=True)
class Backchannel:
    """A soft "mm-hm" of the server in a pause of the user, with ``turn_detection.backchannel`` only.

    Play ``audio``, raw samples in the encoding ``format``, immediately, mixed with anything else that plays. It belongs
    to no request.
    """

    turn_id: str
    text: str
    audio: bytes
    format: str
    sample_rate: int


@dataclass(frozen=True, slots=True)
class SpeechConfirmed:
    """Turn detection: speech that was uncertain (``certain`` was False) interrupts the answer.

    The speech began at ``audio_ms``. From here on it is like speech after a SpeechStarted: stop the playback.
    """

    audio_ms: int
    turn_id: str
    request_id: str


@dataclass(frozen=True, slots=True)
class SpeechDismissed:
    """Turn detection: a sound that was uncertain, such as "mm-hm", does not interrupt the answer, and is no turn.

    Play at full level again.
    """

    audio_ms: int
    turn_id: str


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """Turn detection: the user's turn ended at ``audio_ms`` of the input audio.

    ``request_id`` is the request that the turn opened or joined; None if no answer to the turn will come.
    """

    audio_ms: int
    turn_id: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class InputAck:
    """The acknowledgement of all input below ``next_sequence_id``.

    ``credit_bytes`` more may be sent; ``buffered_chunks`` wait for a missing chunk. ``resumable`` is False if only
    this server has that input, as its store does not work.
    """

    next_sequence_id: int
    buffered_chunks: int
    received_bytes: int
    credit_bytes: int
    resumable: bool = True


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error of a chunk or a request, or the error with which the server then closes the session.

    ``blocks_request``: a request gets no Final unless the application acts. Either the chunk with its ``end_of_input``
    was refused, and the input has to be ended again, or all of its chunks were refused and there is no request.
    """

    error: OmniError
    retryable: bool = False
    blocks_request: bool = False

    @property
    def request_id(self) -> str | None:
        """The id of the request that the error is about; None if it is about none."""
        return self.error.request_id

    @property
    def ref(self) -> str | None:
        """The name of the request, or of the refused chunk's request; None if there is none."""
        return self.error.ref


@dataclass(frozen=True, slots=True)
class ResumableChanged:
    """The server's store stopped working (``resumable`` is False), or works again.

    While it does not work, the session is lost if its server is. A lost connection can still be replaced.
    """

    resumable: bool


@dataclass(frozen=True, slots=True)
class Closing:
    """The server is about to close the session for ``reason``, without an error.

    ``resumes``: the session can be continued immediately, here or with another replica. With ``reconnect`` the client
    continues it without this event: Resumed follows.
    """

    reason: str
    retryable: bool
    time_left_ms: int
    resumes: bool = False


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection was lost, and a fresh session replaces the old one.

    Requests without a Final were sent again, ``resent_chunks`` chunks in all. Discard the partial answers: these
    requests are answered from the beginning. ``error`` is why the old session was not resumed.
    """

    session_id: str
    resent_chunks: int
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Resumed:
    """The connection was lost, and the same session continues over another one.

    ``resent_frames`` frames were sent again, and ``replayed`` missed outputs follow. Nothing is lost or repeated.
    """

    session_id: str
    resent_frames: int
    replayed: int


@dataclass(frozen=True, slots=True)
class Reconnecting:
    """The connection is lost because of ``error``; the next attempt is in ``seconds``.

    Only reported once the attempts have taken a second or more, ``seconds`` included: most sessions are back sooner.
    """

    seconds: float
    error: Exception


Event: TypeAlias = (
    ResponseStarted
    | TextChunk
    | ToolCallChunk
    | AudioChunk
    | TranscriptChunk
    | Final
    | SpeechStarted
    | SpeechConfirmed
    | SpeechDismissed
    | Backchannel
    | SpeechStopped
    | InputAck
    | ErrorEvent
    | ResumableChanged
    | Closing
    | Reconnected
    | Resumed
    | Reconnecting
)

# Conversion from frames

T = TypeVar("T")


def speech_event(
    frame: SpeechStartedFrame | SpeechConfirmedFrame | SpeechDismissedFrame | SpeechStoppedFrame | BackchannelFrame,
) -> Event:
    """Convert a frame of turn detection."""
    match frame:
        case SpeechStartedFrame(certain=certain):
            return SpeechStarted(
                frame.audio_ms, optional(frame.turn_id), frame.request_id, certain=certain is not False
            )
        case SpeechConfirmedFrame():
            return SpeechConfirmed(frame.audio_ms, frame.turn_id, frame.request_id)
        case BackchannelFrame():
            return Backchannel(frame.turn_id, frame.text, frame.payload, frame.format.value, frame.sample_rate)
        case SpeechDismissedFrame():
            return SpeechDismissed(frame.audio_ms, frame.turn_id)
        case SpeechStoppedFrame():
            return SpeechStopped(frame.audio_ms, optional(frame.turn_id), frame.request_id)


def output_event(frame: OutputChunkFrame) -> Event | None:
    """Convert an ``output_chunk``; return None if its modality is unknown to this version.

    Raises InvalidFrame if a required field is missing, or the finish reason is unknown.
    """
    number = frame.sequence_id
    if frame.final is True:
        return _final(frame)
    start_ms = None if isinstance(frame.start_ms, UnsetType) else frame.start_ms
    timed = () if isinstance(frame.words, UnsetType) else frame.words
    words = tuple(Word(word.text, word.start_ms, word.end_ms) for word in timed)
    match frame.modality:
        case OutputModality.TEXT:
            return TextChunk(frame.request_id, number, _required(frame.text, "text"))
        case OutputModality.TOOL_CALL:
            call = ToolCallFragment(
                _required(frame.index, "index"),
                optional(frame.id),
                optional(frame.name),
                optional(frame.arguments) or "",
            )
            return ToolCallChunk(frame.request_id, number, call)
        case OutputModality.TRANSCRIPT:
            return TranscriptChunk(
                frame.request_id,
                number,
                _required(frame.text, "text"),
                frame.interim is True,
                start_ms,
                words,
                optional(frame.turn_id),
                frame.late is True,
                optional(frame.language),
            )
        case OutputModality.AUDIO:
            return AudioChunk(
                frame.request_id,
                number,
                _required(frame.payload, "payload"),
                _required(frame.format, "format"),
                _required(frame.sample_rate, "sample_rate"),
                start_ms,
                words,
            )
    return None


def _final(frame: OutputChunkFrame) -> Final:
    reason = _required(frame.finish_reason, "finish_reason")
    usage = None if isinstance(frame.usage, UnsetType) else _usage(frame.usage)
    try:
        finish_reason = FinishReason(reason)
    except ValueError:
        raise InvalidFrame(f"unknown finish_reason {reason!r}", param="finish_reason") from None
    told = () if isinstance(frame.warnings, UnsetType) else frame.warnings
    cited = () if isinstance(frame.annotations, UnsetType) else frame.annotations
    return Final(
        frame.request_id,
        frame.sequence_id,
        finish_reason,
        usage,
        ref=optional(frame.ref),
        turn_id=optional(frame.turn_id),
        times={} if isinstance(frame.times, UnsetType) else frame.times,
        warnings=tuple(AnswerWarning(one.code, one.message, one.param) for one in told),
        citations=tuple(
            UrlCitation(one.title, one.url, one.start_index, one.end_index, optional(one.license)) for one in cited
        ),
    )


def _required(value: T | UnsetType, name: str) -> T:
    if value is UNSET or isinstance(value, UnsetType):
        raise InvalidFrame(f"an output_chunk without {name}", param=name)
    return value


def optional(value: T | UnsetType) -> T | None:
    """Return the value of a field of a frame; None if it is absent."""
    return None if isinstance(value, UnsetType) else value


def _usage(fields: UsageFields) -> Usage:
    return Usage(
        input_tokens=fields.input_tokens,
        output_tokens=fields.output_tokens,
        input_audio_ms=fields.input_audio_ms,
        output_audio_ms=fields.output_audio_ms,
        input_after_start_bytes=fields.input_after_start_bytes,
        cached_tokens=optional(fields.cached_tokens),
    )


# Answers

#: The most answers that wait to be taken; one more drops the oldest.
MAX_ANSWERS_KEPT = 64


class TranscriptView:
    """The current transcript: ``settled`` text is definitive, ``interim`` text may still change."""

    def __init__(self) -> None:
        self.settled = ""
        self.interim = ""

    def add(self, chunk: TranscriptChunk) -> None:
        """Apply a piece: an interim one replaces ``interim``, a settled one is appended and clears ``interim``."""
        if chunk.interim:
            self.interim = chunk.text
        else:
            self.settled += chunk.text
            self.interim = ""

    @property
    def text(self) -> str:
        """Settled and interim text together."""
        return self.settled + self.interim

    def clear(self) -> None:
        self.settled = self.interim = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer.

    ``audio`` is in ``audio_format`` at ``sample_rate`` Hz; both are None if there is no audio.
    """

    request_id: str = ""
    #: The name that the request was sent with, and the id of the speech turn that opened or joined it.
    ref: str | None = None
    turn_id: str | None = None
    text: str = ""
    transcript: str = ""
    audio: bytes = field(default=b"", repr=False)
    audio_format: str | None = None
    sample_rate: int | None = None
    words: tuple[Word, ...] = ()
    #: The tool calls of the answer: reply to each with ``send_tool_result``.
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    #: Deviations from what was asked.
    warnings: tuple[AnswerWarning, ...] = ()
    #: The web pages that the answer is taken from.
    citations: tuple[UrlCitation, ...] = ()
    #: Milliseconds from the end of the speech, or else of the input, to the steps of the answer, by their names.
    times: Mapping[str, int] = field(default_factory=dict)
    #: The errors that were reported before the Final.
    errors: tuple[OmniError, ...] = ()


#: The bytes of a sample in each format of raw audio.
RAW_SAMPLE_BYTES: Constant[Mapping[str, int]] = {encoding.value: size for encoding, size in SAMPLE_BYTES.items()}


class AnswerBuilder:
    """Assembles the events of one request into an Answer.

    A Reconnected event discards what was assembled. Late transcripts are ignored: their answer is complete. Raw audio
    that arrives again, since the answer was held and goes on from an earlier place, is in the Answer once.
    """

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self.request_id = ""
        self.ref: str | None = None
        self.turn_id: str | None = None
        self.texts: list[str] = []
        #: The tool calls by their index.
        self.calls: dict[int, ToolCall] = {}
        self.transcript = TranscriptView()
        self.audio: list[bytes] = []
        #: Where each piece of ``audio`` begins and where the last ends, in ms of the answer.
        self._starts: list[float] = []
        self._end = 0.0
        #: The format of the audio, and its rate in Hz.
        self.format: tuple[str, int] | None = None
        self.words: list[Word] = []
        self.final: Final | None = None
        self.errors: list[OmniError] = []

    def add(self, event: Event) -> None:
        """Add an event. Events that are not part of an answer are ignored."""
        match event:
            case Reconnected():
                self._restart()
            case ResponseStarted():
                self.ref, self.turn_id = event.ref, event.turn_id
            case TextChunk(text=text):
                self.texts.append(text)
            case ToolCallChunk(call=piece):
                call = self.calls.get(piece.index) or ToolCall("", "", "")
                self.calls[piece.index] = ToolCall(
                    piece.id or call.id, piece.name or call.name, call.arguments + piece.arguments
                )
            case TranscriptChunk(late=False):
                self.transcript.add(event)
            case AudioChunk():
                self._add_audio(event)
            case ErrorEvent(error=error):
                self.errors.append(error)
            case Final():
                self.final = event
                self.request_id = event.request_id
                self.ref, self.turn_id = event.ref or self.ref, event.turn_id or self.turn_id

    def _add_audio(self, event: AudioChunk) -> None:
        start, sample_bytes = event.start_ms, RAW_SAMPLE_BYTES.get(event.format)
        if start is not None and sample_bytes is not None and self._end - start > 1:  # the server rounds to ms
            self._go_back(start, event.sample_rate / 1000, sample_bytes)
            first = min([start, *(word.start_ms for word in event.words)])  # it may begin within a word
            self.words = [word for word in self.words if word.start_ms < first]
        self._starts.append(self._end if start is None else start)
        self.audio.append(event.audio)
        self._end = self._starts[-1] + len(event.audio) / (sample_bytes or 1) * 1000 / event.sample_rate
        self.format = (event.format, event.sample_rate)
        self.words += event.words

    def _go_back(self, start: float, samples_per_ms: float, sample_bytes: int) -> None:
        """Drop the audio from ``start`` (ms) on."""
        while self._starts and self._starts[-1] >= start:
            self._starts.pop()
            self.audio.pop()
        if self.audio:
            self.audio[-1] = self.audio[-1][: round((start - self._starts[-1]) * samples_per_ms) * sample_bytes]

    def build(self) -> Answer:
        audio_format, sample_rate = self.format or (None, None)
        return Answer(
            request_id=self.request_id,
            ref=self.ref,
            turn_id=self.turn_id,
            text="".join(self.texts),
            transcript=self.transcript.text,
            audio=b"".join(self.audio),
            audio_format=audio_format,
            sample_rate=sample_rate,
            words=tuple(self.words),
            tool_calls=tuple(self.calls.values()),
            finish_reason=self.final.finish_reason if self.final else None,
            usage=self.final.usage if self.final else None,
            times=self.final.times if self.final else {},
            warnings=self.final.warnings if self.final else (),
            citations=self.final.citations if self.final else (),
            errors=tuple(self.errors),
        )


class AnswerCollector:
    """Assembles the answers of a session, each from the events of its own request.

    Things that the server says unasked between the answers, while a tool runs or after a long silence, are left out. A
    late transcript is added to its answer, unless ``take`` has returned that answer. Of more than MAX_ANSWERS_KEPT
    answers, the oldest are dropped.
    """

    def __init__(self) -> None:
        #: The ids of requests in which the server speaks unasked.
        self._unasked: set[str] = set()
        self._building: dict[str, AnswerBuilder] = {}
        #: Errors without a request id, by the name of their request; under None, errors that belong to no request.
        self._errors: dict[str | None, list[OmniError]] = {}
        #: Complete answers that were not taken yet.
        self._whole: deque[Answer] = deque()

    def add(self, event: Event) -> None:
        """Add an event. Events that are not part of an answer are ignored.

        An error that ends a request without a Final makes an answer without ``finish_reason``.
        """
        match event:
            case Reconnected():
                self._building.clear()
                self._unasked.clear()
            case ResponseStarted(trigger=StartTrigger.FILLER | StartTrigger.IDLE, request_id=request_id):
                self._unasked.add(request_id)
            case Final(request_id=request_id) if request_id in self._unasked:
                self._unasked.remove(request_id)
            case TextChunk() | AudioChunk() | ErrorEvent() if event.request_id in self._unasked:
                pass
            case ErrorEvent(request_id=None):
                self._errors.setdefault(event.ref, []).append(event.error)
                if event.blocks_request:
                    self._keep(Answer(ref=event.ref))
            case TranscriptChunk(late=True):
                self._add_late(event)
            case Final(request_id=request_id):
                builder = self._building.pop(request_id, None) or AnswerBuilder()
                builder.add(event)
                self._keep(builder.build())
            case ResponseStarted() | TextChunk() | ToolCallChunk() | AudioChunk() | TranscriptChunk() | ErrorEvent():
                self._building.setdefault(event.request_id or "", AnswerBuilder()).add(event)

    def take(self, ref: str | None) -> Answer | None:
        """Remove and return the answer to the request ``ref``; with None, the oldest answer. None if there is none."""
        found = next((answer for answer in self._whole if ref is None or answer.ref == ref), None)
        if found is not None:
            self._whole.remove(found)
        return found

    def drop(self, request_id: str) -> None:
        """Discard the part of an answer that has been assembled."""
        self._building.pop(request_id, None)

    def _keep(self, answer: Answer) -> None:
        errors = self._errors.pop(None, []) + (self._errors.pop(answer.ref, []) if answer.ref else [])
        self._whole.append(replace(answer, errors=(*errors, *answer.errors)))
        while len(self._whole) > MAX_ANSWERS_KEPT:
            self._whole.popleft()

    def _add_late(self, event: TranscriptChunk) -> None:
        for place, answer in enumerate(self._whole):
            if answer.request_id == event.request_id:
                self._whole[place] = replace(answer, transcript=answer.transcript + event.text)


# The queue

#: The approximate memory of an event besides its content.
EVENT_OVERHEAD_BYTES = 128


class EventQueue:
    """A queue between the reader of a connection and the consumer of its events; its capacity is in bytes.

    ``put`` waits while the queue is full. After ``close``, ``get`` returns the remaining events and then None.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.queued = 0
        self.closed = False
        self._events: deque[Event] = deque()
        self._readable = asyncio.Event()
        self._writable = asyncio.Event()

    async def put(self, event: Event) -> None:
        """Append an event; wait while the queue is full."""
        while self.queued >= self.capacity and not self.closed:
            self._writable.clear()
            await self._writable.wait()
        self.put_nowait(event)

    def put_nowait(self, event: Event) -> None:
        """Append an event even if the queue is full. Drops it if the queue is closed."""
        if not self.closed:
            self._events.append(event)
            self.queued += event_bytes(event)
            self._readable.set()

    async def get(self) -> Event | None:
        """Remove and return the next event; None once the queue is closed and empty."""
        while not self._events:
            if self.closed:
                return None
            self._readable.clear()
            await self._readable.wait()
        event = self._events.popleft()
        self._freed(event)
        return event

    def discard(self, unwanted: Callable[[Event], bool]) -> None:
        """Remove the queued events for which ``unwanted`` returns true."""
        kept: deque[Event] = deque()
        for event in self._events:
            if unwanted(event):
                self._freed(event)
            else:
                kept.append(event)
        self._events = kept

    def close(self) -> None:
        """Close the queue, and wake up the waiting ``get`` and ``put`` calls."""
        self.closed = True
        self._readable.set()
        self._writable.set()

    def _freed(self, event: Event) -> None:
        self.queued -= event_bytes(event)
        if self.queued < self.capacity:
            self._writable.set()


def event_bytes(event: Event) -> int:
    """Estimate the memory that an event takes, in bytes."""
    match event:
        case AudioChunk(audio=audio):
            return EVENT_OVERHEAD_BYTES + len(audio)
        case TextChunk(text=text) | TranscriptChunk(text=text):
            return EVENT_OVERHEAD_BYTES + 4 * len(text)
        case ToolCallChunk(call=call):
            return EVENT_OVERHEAD_BYTES + 4 * len(call.arguments)
    return EVENT_OVERHEAD_BYTES
