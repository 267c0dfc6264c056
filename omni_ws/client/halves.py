"""The two halves of a session, without I/O.

The sending half has sequence numbers, acknowledgements, credit, and the chunks that may have to be sent again. The
receiving half turns frames into events, and completes the calls that wait for a reply.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import msgspec
from msgspec import UnsetType, structs

from omni_ws.client.connection import error_from_fields, read_frame
from omni_ws.client.events import (
    RAW_SAMPLE_BYTES,
    AudioChunk,
    Closing,
    ErrorEvent,
    Event,
    Final,
    InputAck,
    ResponseStarted,
    ResumableChanged,
    ToolCallChunk,
    optional,
    output_event,
    speech_event,
)
from omni_ws.core.chunks import InputChunk, Modality, StartTrigger
from omni_ws.core.file_heads import sniff_image
from omni_ws.errors import EmptyInput, EngineOverloaded, InvalidRequest, OmniError
from omni_ws.wire import server_frames
from omni_ws.wire.frames import decode_output_audio
from omni_ws.wire.server_frames import (
    ErrorFields,
    ServerFrame,
    SessionCreatedFrame,
    SessionUpdatedFrame,
)
from omni_ws.wire.session_config import OutputAudioConfig


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request of this session that has no Final yet."""

    first_sequence_id: int
    #: The name of the request. Its first and its last chunk carry it, in case the first one is refused.
    ref: str | None
    #: The output format when the request began: binary frames of its answer name neither format nor rate.
    output_audio: OutputAudioConfig
    request_id: str | None = None
    input_open: bool = True
    cancelled: bool = False
    #: Whether the request is to be cancelled as soon as the server has told its id.
    cancel_when_named: bool = False
    #: Whether its events are dropped, since the call that waited for its answer was cancelled.
    muted: bool = False
    #: Whether its Final has arrived: the server discards further input of the request.
    finished: bool = False
    #: Whether it is the greeting, which has no input; a fresh session makes it again, by its configuration.
    is_greeting: bool = False
    #: Whether the request ended on an earlier connection, so that further input of it is not sent.
    orphaned: bool = False
    #: Whether its input has a tool result, which only the session that made the call accepts.
    has_results: bool = False
    #: The number of chunks that were sent and not refused.
    live_chunks: int = 0
    last_sequence_id: int = -1
    #: The number of the chunk with ``end_of_input``; None if there was none.
    end_sequence_id: int | None = None
    #: The input so far, by chunk number; None if it is too large to keep.
    kept: dict[int, InputChunk] | None = field(default_factory=dict)
    kept_bytes: int = 0

    def add(self, number: int, chunk: InputChunk) -> None:
        """Record a chunk that is sent with this number."""
        self.live_chunks += 1
        self.has_results = self.has_results or chunk.tool_call_id is not None
        self.last_sequence_id = number
        self.end_sequence_id = number if chunk.end_of_input else None
        if not self.finished and self.kept is not None:
            self.kept[number] = chunk
            self.kept_bytes += len(chunk.payload)

    def take_back(self, number: int) -> None:
        """Remove a chunk that was refused."""
        self.live_chunks -= 1
        if self.kept is not None and (gone := self.kept.pop(number, None)) is not None:
            self.kept_bytes -= len(gone.payload)

    def keep_nothing(self) -> None:
        self.kept, self.kept_bytes = None, 0

    def end_input(self) -> None:
        self.input_open = False

    def reopen_input(self) -> None:
        """Record that the input continues: the chunk that carried the end was refused."""
        self.input_open = True

    def cancel(self) -> None:
        self.cancelled = True
        self.input_open = False

    def cancel_later(self) -> None:
        """Mark the request to be cancelled once the server has reported its id."""
        self.cancel_when_named = True

    def assign(self, request_id: str) -> bool:
        """Set the id that the server has reported. Return whether the request must be cancelled now."""
        self.request_id = request_id
        cancels, self.cancel_when_named = self.cancel_when_named, False
        return cancels

    def mute(self) -> None:
        """Mark the request so that its events are dropped from now on."""
        self.muted = True

    def finish(self, request_id: str) -> None:
        """Record that the Final of the request has arrived."""
        self.request_id = request_id
        self.finished = True
        self.keep_nothing()

    def orphan(self) -> None:
        """Record that the request had ended when its connection was lost."""
        self.orphaned = True

    def begin_again(self, first_sequence_id: int) -> list[InputChunk]:
        """Reset the request for a fresh session. Return its input so far."""
        chunks = list((self.kept or {}).values())
        self.kept, self.kept_bytes, self.live_chunks = {}, 0, 0
        self.first_sequence_id, self.request_id = first_sequence_id, None
        return chunks


class OutgoingInput:
    """Numbers chunks, groups them into requests, and counts unacknowledged bytes against window and credit.

    With ``keep_bytes`` above 0 the input of unfinished requests is kept even after it is acknowledged: a fresh session
    lacks the input that the old session accepted, and would otherwise answer half a request.
    """

    def __init__(self, *, window_bytes: int, keep_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.keep_bytes = keep_bytes
        self.next_sequence_id = 0
        self.acknowledged_sequence_id = 0
        self.unacknowledged_bytes = 0
        #: The bytes beyond the acknowledged ones that the server accepts; None before its first ``input_ack``.
        self.credit_bytes: int | None = None
        #: The calls of async tools, whose results are told by requests of their own.
        self.late_calls: set[str] = set()
        #: The unfinished requests, in the order in which they were opened, which is the order of their answers.
        self.requests: deque[OutgoingRequest] = deque()
        self.receiving: OutgoingRequest | None = None
        #: The name of the request of the last chunk.
        self.last_ref: str | None = None
        #: Whether the greeting of this session has ended, or is no longer wanted.
        self.greeted = False
        #: Whether turn detection assigns audio to requests: then audio opens no request here.
        self.open_microphone = False
        #: The number of acknowledged chunks that the server had never received before; chunks that are resent do not
        #: count.
        self.advances = 0
        #: The ids of requests whose id the server told after they had been cancelled.
        self.to_cancel: list[str] = []
        self._opened = 0
        #: Whether the server names requests, by ``ref`` or ``turn_id``.
        self._names = False
        #: The ids of requests that the server opened.
        self._opened_by_server: set[str] = set()
        self._unacknowledged: deque[tuple[int, int]] = deque()
        #: The numbers of chunks that an earlier session had acknowledged.
        self._known: set[int] = set()

    def configured(self, turn_detection: object | None) -> None:
        """Record the turn detection that is in effect from now on."""
        self.open_microphone = turn_detection is not None

    # flow control

    def has_room(self, size: int) -> bool:
        """Return whether window and credit allow another ``size`` bytes."""
        if self.credit_bytes is not None and self.unacknowledged_bytes + size > self.credit_bytes:
            return False
        return not self._unacknowledged or self.unacknowledged_bytes + size <= self.window_bytes

    @property
    def starved(self) -> bool:
        """Whether no acknowledgement is due, so that new credit cannot arrive."""
        return not self._unacknowledged

    @property
    def largest_unacknowledged(self) -> int:
        """The bytes of the largest unacknowledged chunk: the server acknowledges nothing before they have arrived."""
        return max((size for _, size in self._unacknowledged), default=0)

    # sending

    def add(self, chunk: InputChunk, *, output_audio: OutputAudioConfig) -> InputChunk | None:
        """Number a chunk of the open request, or of a new request if none is open; return the numbered chunk.

        Returns None if the request has ended, so that the chunk must not be sent. If the server detects turns, audio
        outside an open request belongs to none.
        """
        request = self.receiving
        self.last_ref = None
        if request is None and self.open_microphone and chunk.modality is Modality.AUDIO:
            numbered = structs.replace(chunk, sequence_id=self.next_sequence_id)
            self._count(len(chunk.payload))
            return numbered
        if chunk.tool_call_id is not None and chunk.tool_call_id in self.late_calls:
            return self._add_late(chunk, output_audio)
        if request is None:
            request = self.receiving = self._open(chunk, output_audio)
        self.last_ref = request.ref
        if chunk.end_of_input:
            request.end_input()
            self.receiving = None
        if request.orphaned:
            return None
        says = request.last_sequence_id < 0 or chunk.end_of_input
        numbered = structs.replace(chunk, sequence_id=self.next_sequence_id, ref=request.ref if says else None)
        self._place(request, numbered)
        return numbered

    def _add_late(self, chunk: InputChunk, output_audio: OutputAudioConfig) -> InputChunk:
        """Number the result of an async tool: it is a request of its own, even while other input is open."""
        request = self._open(chunk, output_audio, input_open=False)
        self.last_ref = request.ref
        numbered = structs.replace(chunk, sequence_id=self.next_sequence_id, ref=request.ref)
        self._place(request, numbered)
        return numbered

    def _open(self, first: InputChunk, output_audio: OutputAudioConfig, *, input_open: bool = True) -> OutgoingRequest:
        """Add the request that a chunk opens, with the name that the chunk gives, or a generated name."""
        self._opened += 1
        name = first.ref or f"request-{self._opened}"
        request = OutgoingRequest(self.next_sequence_id, name, output_audio, input_open=input_open)
        self.requests.append(request)
        return request

    def _place(self, request: OutgoingRequest, chunk: InputChunk) -> None:
        request.add(self._count(len(chunk.payload)), chunk)
        self._limit_kept()

    def _count(self, size: int) -> int:
        """Allocate the number of a chunk, and count its bytes as unacknowledged."""
        number = self.next_sequence_id
        self.next_sequence_id += 1
        self._unacknowledged.append((number, size))
        self.unacknowledged_bytes += size
        return number

    def _limit_kept(self) -> None:
        """Drop the kept input of the largest requests until the rest fits into ``keep_bytes``."""
        while sum(request.kept_bytes for request in self.requests) > self.keep_bytes:
            max(self.requests, key=lambda request: request.kept_bytes).keep_nothing()

    def finish(self) -> bool:
        """End the open input without another chunk; return whether the server must be told.

        Raises EmptyInput if the server refused every chunk of the input, so that no answer follows.
        """
        request, self.receiving = self.receiving, None
        if request is None:
            return self.open_microphone
        request.end_input()
        if request in self.requests and request.live_chunks == 0:
            self.requests.remove(request)
            raise EmptyInput("every chunk of this input was refused")
        if request.kept:
            # A fresh session learns of the end from the last chunk.
            last = max(request.kept)
            request.kept[last] = structs.replace(request.kept[last], end_of_input=True)
        return not request.orphaned

    def cancel(self, request_id: str | None) -> None:
        """Mark the requests that a cancel will end: the one with this id; with None, the first and the open request."""
        if request_id is not None:
            named = self.find(request_id)
            targets = [] if named is None else [named]
        else:
            # The server answers the first request; later ones wait.
            targets = list(self.requests)[:1]
            if self.receiving is not None and self.receiving not in targets:
                targets.append(self.receiving)
        for target in targets:
            self.stop(target)

    def stop(self, target: OutgoingRequest) -> None:
        """Mark a request as cancelled."""
        target.cancel()
        self.greeted = self.greeted or target.is_greeting
        if target.live_chunks == 0 and target in self.requests:
            self.requests.remove(target)  # the server knows no such request, and sends no Final
        if target is self.receiving:
            self.receiving = None

    # Replies of the server

    def acknowledge(self, next_sequence_id: int, credit_bytes: int) -> None:
        """Apply an ``input_ack``. ``credit_bytes`` counts from ``next_sequence_id``."""
        while self._unacknowledged and self._unacknowledged[0][0] < next_sequence_id:
            number, size = self._unacknowledged.popleft()
            self.unacknowledged_bytes -= size
            self.advances += number not in self._known
        self.acknowledged_sequence_id = max(self.acknowledged_sequence_id, next_sequence_id)
        self.credit_bytes = credit_bytes

    def started(
        self, request_id: str, sequence_id: int | None, *, ref: str | None = None, turn_id: str | None = None
    ) -> OutgoingRequest | None:
        """Assign the id of a request that the server has started; return the request.

        Returns None for a request that the server opened itself. A request is found by its name or else by
        ``sequence_id``. If the server gives neither, it is the oldest request without an id.
        """
        request = self._named(request_id, ref=ref, turn_id=turn_id)
        if request is None and ref is None and turn_id is None:
            unnamed = [one for one in self.requests if one.request_id is None]
            if sequence_id is not None:
                unnamed = [one for one in unnamed if one.first_sequence_id <= sequence_id <= one.last_sequence_id]
            if sequence_id is not None or not self._names:
                request = next(iter(unnamed), None)
        if request is None:
            self._opened_by_server.add(request_id)
            return None
        self._assign(request, request_id)
        return request

    def _named(self, request_id: str, *, ref: str | None, turn_id: str | None) -> OutgoingRequest | None:
        """Return the unfinished request with this id, or else the first one without an id that was sent as ``ref``."""
        self._names = self._names or ref is not None or turn_id is not None
        unnamed = (request for request in self.requests if request.request_id is None and request.ref == ref)
        return self.find(request_id) or (None if ref is None else next(unnamed, None))

    def _assign(self, request: OutgoingRequest, request_id: str) -> None:
        self._opened_by_server.discard(request_id)
        if request.assign(request_id):
            self.to_cancel.append(request_id)

    def speech_ended(self, request_id: str | None) -> None:
        """End the input of the open request, if the ended speech belongs to it."""
        if self.receiving is not None and request_id is not None and self.receiving.request_id == request_id:
            self._input_ended(self.receiving)

    def _input_ended(self, request: OutgoingRequest) -> None:
        request.end_input()
        self.receiving = None

    def greeting_started(self, request_id: str, output_audio: OutputAudioConfig) -> None:
        """Add the greeting: a request that the server makes itself, and answers before all others."""
        greeting = OutgoingRequest(
            -1, None, output_audio, request_id, input_open=False, live_chunks=1, is_greeting=True
        )
        self.requests.appendleft(greeting)

    def remark_started(self, request_id: str) -> None:
        """Note a request in which the server says something unasked, between the answers."""
        self._opened_by_server.add(request_id)

    def find(self, request_id: str) -> OutgoingRequest | None:
        """Return the unfinished request with this id; None if there is none."""
        return next((request for request in self.requests if request.request_id == request_id), None)

    def waiting(self, ref: str | None) -> OutgoingRequest | None:
        """Return the unfinished request named ``ref``, or with None the one that is answered first."""
        return next((request for request in self.requests if ref is None or request.ref == ref), None)

    def ref_of(self, sequence_id: int | None) -> str | None:
        """Return the name of the unfinished request to which a chunk belongs; None if there is none."""
        if sequence_id is None:
            return None
        spans = (one for one in self.requests if one.first_sequence_id <= sequence_id <= one.last_sequence_id)
        return next((one.ref for one in spans), None)

    def final(self, request_id: str, *, ref: str | None = None, turn_id: str | None = None) -> OutgoingRequest | None:
        """Remove and return the request that has ended.

        If a request never started, its id is not known here. If the server also gives no names, it must be the first
        request without an id: answers arrive in order. Returns None for a request that the server opened itself.
        """
        request = self._named(request_id, ref=ref, turn_id=turn_id)
        if request_id in self._opened_by_server:
            self._opened_by_server.discard(request_id)
        elif request is None and not self._names:
            request = next((request for request in self.requests if request.request_id is None), None)
        if request is not None:
            if request is self.receiving and (turn_id is not None or request.has_results):
                self._input_ended(request)  # ended by the end of speech, or by the last result of a tool
            request.finish(request_id)
            self.greeted = self.greeted or request.is_greeting
            self.requests.remove(request)
        return request

    def refused(self, sequence_id: int) -> bool:
        """Remove a refused chunk, whose number stays used.

        Returns whether its request gets no Final unless the application acts (``ErrorEvent.blocks_request``).
        """
        request = next((r for r in reversed(self.requests) if r.first_sequence_id <= sequence_id), None)
        if request is None or sequence_id > request.last_sequence_id:
            return False
        request.take_back(sequence_id)
        if request.input_open:
            return False
        if request.live_chunks == 0:
            self.requests.remove(request)  # the server knows no such request, and sends no Final
            return not request.cancelled
        if sequence_id != request.end_sequence_id or request.cancelled:
            return False
        if self.receiving is None:
            # The refused chunk carried the end: at the server this input is still open.
            request.reopen_input()
            self.receiving = request
        return True

    # reconnecting

    @property
    def not_kept(self) -> list[OutgoingRequest]:
        """The requests that cannot be sent to a fresh session, as their input was too large to keep."""
        return [request for request in self.requests if request.kept is None and not request.cancelled]

    def restart(self, *, max_chunk_bytes: int) -> tuple[list[InputChunk], list[OutgoingRequest]]:
        """Renumber the input of unfinished requests from 0, for a fresh session with this limit on a chunk.

        Returns the chunks to send, and the requests that end here because they were cancelled, or have results of tool
        calls that the earlier session made.
        """
        acknowledged, known_before = self.acknowledged_sequence_id, self._known
        self._known = set()
        self.next_sequence_id = self.acknowledged_sequence_id = self.unacknowledged_bytes = 0
        self.credit_bytes = None
        self._unacknowledged.clear()
        self._opened_by_server.clear()
        if self.receiving is not None and self.receiving.finished:
            self.receiving.orphan()
        over = [request for request in self.requests if request.cancelled or request.has_results]
        again = [request for request in self.requests if request not in over and not request.is_greeting]
        if self.receiving in over:
            self.receiving = None
        self.requests = deque(again)
        chunks: list[InputChunk] = []
        for request in again:
            for chunk in request.begin_again(self.next_sequence_id):
                number = chunk.sequence_id
                was_known = number is not None and (number < acknowledged or number in known_before)
                for piece in pieces_of(chunk, max_chunk_bytes):
                    if was_known:
                        self._known.add(self.next_sequence_id)
                    says = request.live_chunks == 0 or piece.end_of_input
                    number, ref = self.next_sequence_id, request.ref if says else None
                    numbered = structs.replace(piece, sequence_id=number, ref=ref)
                    self._place(request, numbered)
                    chunks.append(numbered)
        return chunks, over


# Pieces of chunks

#: Each piece is acknowledged: however slow a connection is, it is alive if it carries one piece in time.
PIECE_BYTES = 64 << 10


def pieces_of(chunk: InputChunk, most: int) -> Iterator[InputChunk]:
    """Yield the chunk in pieces of at most ``most`` bytes; the last piece has the chunk's ``end_of_input``.

    Audio, text and video files can be cut. An image and the result of a tool are always one chunk, however large.
    """
    payload = chunk.payload
    if len(payload) <= most or not _is_stream(chunk):
        yield chunk
        return
    size = most - most % 2 or most  # 16-bit samples stay whole
    for start in range(0, len(payload), size):
        is_last = start + size >= len(payload)
        piece = payload[start : start + size]
        yield structs.replace(chunk, payload=piece, end_of_input=chunk.end_of_input and is_last)


def _is_stream(chunk: InputChunk) -> bool:
    if chunk.modality is Modality.IMAGE or chunk.tool_call_id is not None:
        return False
    return chunk.modality is not Modality.VIDEO or sniff_image(chunk.payload[:12]) is None


# Sent frames


class SentKind(Enum):
    """The kinds of sent frames, by which ``Link`` decides whether a frame may be sent twice."""

    CHUNK = "input_chunk"
    CONFIG = "session_config"
    FINISH = "finish"
    CANCEL_BY_ID = "cancel with a request_id"
    CANCEL = "cancel of the running request"
    TRUNCATE = "history_truncate"
    HISTORY = "history_get"


class SentFrame(NamedTuple):
    """A frame that was sent, with its position among the chunks."""

    #: The number of the chunk; for any other frame, the number of the next chunk.
    place: int
    kind: SentKind
    frame: bytes
    is_text: bool


class SentFrames:
    """The frames that were sent since the last acknowledged chunk, in order.

    They may have to be sent again after a resume.
    """

    def __init__(self) -> None:
        self._frames: deque[SentFrame] = deque()

    def add(self, frame: SentFrame) -> None:
        self._frames.append(frame)

    def accepted(self, next_sequence_id: int) -> None:
        """Drop the frames that were sent before the chunk ``next_sequence_id``."""
        while self._frames and self._frames[0].place < next_sequence_id:
            self._frames.popleft()

    def to_resend(self, next_sequence_id: int, wanted: Callable[[SentFrame], bool]) -> list[SentFrame]:
        """Return the frames from the chunk ``next_sequence_id`` on, which the server has not received.

        A frame without a number may have been received: ``wanted`` decides whether it is returned.
        """
        self.accepted(next_sequence_id)
        self._frames = deque(frame for frame in self._frames if frame.kind is SentKind.CHUNK or wanted(frame))
        return list(self._frames)

    def clear(self) -> None:
        self._frames.clear()


# The receiving half of a session: it converts frames to events, and completes the calls that wait for a reply.


#: Frames without a number that the server sends in order with the outputs, and repeats after a resume.
_REPEATED_FRAMES = (
    server_frames.ResponseStartedFrame,
    server_frames.ErrorFrame,
    server_frames.SessionUpdatedFrame,
    server_frames.HistoryTruncatedFrame,
    server_frames.HistoryItemsFrame,
    server_frames.SpeechStartedFrame,
    server_frames.SpeechConfirmedFrame,
    server_frames.SpeechDismissedFrame,
    server_frames.SpeechStoppedFrame,
)


def _is_of_the_store(frame: ServerFrame) -> bool:
    """Return whether a frame reports that the store failed or works again.

    Such frames have no position among the outputs.
    """
    return isinstance(frame, SessionUpdatedFrame) and not isinstance(frame.resumable, UnsetType)


@dataclass(slots=True, eq=False)
class PendingTruncation:
    """A ``history_truncate`` that has no reply yet."""

    request_id: str
    frame: bytes
    #: The number of requests that were dropped.
    reply: asyncio.Future[int]
    #: Whether the frame was sent again after a resume: a refusal may then be about the second copy.
    resent: bool = False
    refusal: OmniError | None = None

    def note_resent(self) -> None:
        self.resent = True

    def note_refusal(self, error: OmniError) -> bool:
        """Record a refusal. Return whether it is final, as the frame was sent only once."""
        self.refusal = error
        return not self.resent

    def fail(self, error: Exception) -> None:
        if not self.reply.done():
            self.reply.set_exception(error)


def _fail_all(waiting: Iterable[asyncio.Future[Any]], error: Exception) -> None:
    for reply in waiting:
        if not reply.done():
            reply.set_exception(error)


class IncomingFrames:
    """The receiving half of a session: converts its messages to events.

    The server's reports about the session's input are passed on to ``outgoing``.
    """

    def __init__(
        self, created: SessionCreatedFrame, updated: SessionUpdatedFrame | None, outgoing: OutgoingInput
    ) -> None:
        self.config = updated
        self.last_output_sequence_id = -1
        self.closing: Closing | None = None
        #: Whether another server could continue the session, as far as this one has a store at all.
        self.resumable = True
        #: The last message, if it was an error: it explains a closure that follows.
        self.last_error: ErrorEvent | None = None
        #: The repeatable frames received since the last output, and how many of them the server is about to repeat.
        self._since_output = 0 if updated is None else 1
        self._repeated = 0
        self._created = created
        self._outgoing = outgoing
        #: Each with the frame that asked.
        self._configurations: deque[tuple[bytes, asyncio.Future[SessionUpdatedFrame]]] = deque()
        self._truncations: list[PendingTruncation] = []
        self._histories: deque[tuple[bytes, asyncio.Future[list[dict[str, Any]]]]] = deque()
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._next_ping = 0
        #: The ids of the tool calls in this session's answers.
        self.calls: set[str] = set()
        #: The request of the last ``response_started``, to which binary frames belong.
        self._answering = ""
        #: The request of the last audio, and where that ended in its answer, in bytes.
        self._audio_end = ("", 0)
        #: Whether audio that is here already may come again; see ``_unheard``.
        self._may_overlap = False

    @property
    def output_audio(self) -> OutputAudioConfig:
        """The format of output audio in effect."""
        return self.config.output_audio if self.config else self._created.output_audio

    def expect_configuration(self, frame: bytes) -> asyncio.Future[SessionUpdatedFrame]:
        """Return a future for the reply to the ``session_config`` ``frame``, which is about to be sent.

        Replies arrive in the order of these frames, so a future stays queued even if its caller is cancelled.
        """
        reply = asyncio.get_running_loop().create_future()
        self._configurations.append((frame, reply))
        return reply

    def expect_truncation(self, request_id: str, frame: bytes) -> asyncio.Future[int]:
        """Return a future for the reply to a ``history_truncate``: the number of dropped requests."""
        reply = asyncio.get_running_loop().create_future()
        self._truncations.append(PendingTruncation(request_id, frame, reply))
        return reply

    def awaits_truncation(self, frame: bytes) -> bool:
        """Return whether this ``history_truncate`` frame has no reply yet."""
        return any(pending.frame is frame for pending in self._truncations)

    def truncations_resent(self) -> bool:
        """Mark the pending truncations as sent twice; return whether there are any.

        A refusal of such a truncation only counts after both copies were answered: see ``settle_truncations``.
        """
        for pending in self._truncations:
            pending.note_resent()
        return bool(self._truncations)

    def expect_history(self, frame: bytes) -> asyncio.Future[list[dict[str, Any]]]:
        """Return a future for the reply to the ``history_get`` ``frame``, which is about to be sent."""
        reply = asyncio.get_running_loop().create_future()
        self._histories.append((frame, reply))
        return reply

    def awaits_history(self, frame: bytes) -> bool:
        """Return whether this ``history_get`` frame has no reply yet."""
        return any(sent is frame for sent, _ in self._histories)

    def expect_pong(self) -> tuple[int, asyncio.Future[None]]:
        """Return a number for a new ping, and a future that its pong completes."""
        number = self._next_ping
        self._next_ping += 1
        pong = self._pings[number] = asyncio.get_running_loop().create_future()
        return number, pong

    @property
    def waiting_pings(self) -> list[int]:
        """The numbers of the pings that have no pong yet."""
        return list(self._pings)

    def awaits_configuration(self, frame: bytes) -> bool:
        """Return whether this ``session_config`` frame has no reply yet."""
        return any(sent is frame for sent, _ in self._configurations)

    def fail(self, error: Exception) -> None:
        """Fail every waiting call with this error: the session is over."""
        self.fail_pings(error)
        _fail_all((pending.reply for pending in self._truncations), error)
        _fail_all((reply for _, reply in self._configurations), error)
        _fail_all((reply for _, reply in self._histories), error)
        self._truncations.clear()
        self._configurations.clear()
        self._histories.clear()

    def fail_pings(self, error: Exception) -> None:
        """Fail the waiting pings with this error: their connection is gone."""
        _fail_all(self._pings.values(), error)
        self._pings.clear()

    def resumed(self) -> None:
        """Prepare for a resumed connection, on which the server repeats the frames that followed the last output."""
        self._repeated = self._since_output
        self._may_overlap = True
        self.closing = self.last_error = None

    def receive(self, message: str | bytes) -> Event | None:
        """Process one message; return its event, or None if it has none.

        Raises InvalidFrame if it is not a frame of this protocol.
        """
        self.last_error = None
        if isinstance(message, bytes):
            self._since_output = self._repeated = 0
            return self._audio(message)
        frame = read_frame(message)
        if isinstance(frame, server_frames.OutputChunkFrame):
            self._since_output = self._repeated = 0
        elif isinstance(frame, _REPEATED_FRAMES) and not _is_of_the_store(frame):
            if self._repeated:
                self._repeated -= 1
                return None
            self._since_output += 1
        return self._event(frame)

    def _event(self, frame: ServerFrame | None) -> Event | None:
        match frame:
            case server_frames.OutputChunkFrame(sequence_id=number):
                self.last_output_sequence_id = max(self.last_output_sequence_id, number)
                return self._output(output_event(frame))
            case server_frames.InputAckFrame():
                self._outgoing.acknowledge(frame.next_sequence_id, frame.credit_bytes)
                return InputAck(
                    frame.next_sequence_id,
                    frame.buffered_chunks,
                    frame.received_bytes,
                    frame.credit_bytes,
                    resumable=frame.resumable is not False,
                )
            case server_frames.SpeechStoppedFrame(request_id=request_id):
                self._outgoing.speech_ended(request_id)
                return speech_event(frame)
            case (
                server_frames.SpeechStartedFrame()
                | server_frames.SpeechConfirmedFrame()
                | server_frames.SpeechDismissedFrame()
                | server_frames.BackchannelFrame()
            ):
                self._may_overlap = False  # an answer that speech stopped may go on from before
                return speech_event(frame)
            case server_frames.ResponseStartedFrame():
                return self._started(frame)
            case server_frames.ErrorFrame(error=fields):
                return self._error(fields)
            case server_frames.SessionClosingFrame():
                resumes = frame.resume == "now"
                self.closing = Closing(frame.reason, frame.retryable, frame.time_left_ms, resumes=resumes)
                return self.closing
            case SessionUpdatedFrame() as updated:
                self._configured(updated)
                return self._kept(updated)
            case _:
                self._replied(frame)
        return None

    def _replied(self, frame: ServerFrame | None) -> None:
        """Complete the call that waits for this reply."""
        match frame:
            case server_frames.HistoryTruncatedFrame():
                self._truncated(frame)
            case server_frames.HistoryItemsFrame(items=items):
                reply = self._histories.popleft()[1] if self._histories else None
                if reply is not None and not reply.done():
                    reply.set_result(msgspec.to_builtins(items))
            case server_frames.PongFrame(t=number):
                pong = self._pings.pop(number, None) if isinstance(number, int) else None
                if pong is not None and not pong.done():
                    pong.set_result(None)

    def _started(self, frame: server_frames.ResponseStartedFrame) -> Event | None:
        self._answering = frame.request_id
        ref, turn_id = optional(frame.ref), optional(frame.turn_id)
        if frame.trigger == StartTrigger.GREETING:
            self._outgoing.greeting_started(frame.request_id, self.output_audio)
        elif frame.trigger in (StartTrigger.FILLER, StartTrigger.IDLE) or (
            frame.trigger == StartTrigger.TELLING and ref is None
        ):
            self._outgoing.remark_started(frame.request_id)
        else:
            request = self._outgoing.started(frame.request_id, frame.sequence_id, ref=ref, turn_id=turn_id)
            ref = request.ref if request is not None else ref
        started = ResponseStarted(
            frame.request_id, frame.trigger, frame.sequence_id, frame.input_mode, ref=ref, turn_id=turn_id
        )
        return self._output(started)

    def _audio(self, message: bytes) -> Event | None:
        """Decode binary audio. Its header has no request id: it belongs to the last ``response_started``."""
        frame = decode_output_audio(message)
        self.last_output_sequence_id = max(self.last_output_sequence_id, frame.sequence_id)
        request = self._outgoing.find(self._answering)
        audio = request.output_audio if request else self.output_audio
        event = AudioChunk(
            self._answering, frame.sequence_id, frame.payload, audio.format.value, audio.sample_rate, frame.start_ms
        )
        return None if request is not None and request.muted else self._unheard(event)

    def _unheard(self, event: AudioChunk) -> AudioChunk | None:
        """Return audio without the part that was received before; None if all of it was.

        A server that took over the session may not know that the previous server sent the latest audio, and sends it
        again.
        """
        size = RAW_SAMPLE_BYTES.get(event.format)
        if size is None or event.start_ms is None:
            return event
        request_id, end = self._audio_end
        start = round(event.start_ms * event.sample_rate / 1000) * size
        if self._may_overlap and request_id == event.request_id:
            known = end - start
            if known >= len(event.audio):
                return None
            if known > event.sample_rate // 1000 * size:  # positions are told in whole milliseconds
                start_ms = event.start_ms + round(known / size * 1000 / event.sample_rate)
                event = replace(event, audio=event.audio[known:], start_ms=start_ms)
                start = end
        self._may_overlap = False
        self._audio_end = (event.request_id, start + len(event.audio))
        return event

    def _output(self, event: Event | None) -> Event | None:
        """Return the event; None if the application has abandoned its request."""
        match event:
            case None:
                return None
            case AudioChunk():
                request = self._outgoing.find(event.request_id)
                event = self._unheard(event)
            case Final():
                request = self._outgoing.final(event.request_id, ref=event.ref, turn_id=event.turn_id)
                if request is not None:
                    event = replace(event, ref=request.ref)
            case ToolCallChunk(call=call) if call.id is not None:
                self.calls.add(call.id)
                if any(tool.get("async") and tool["function"]["name"] == call.name for tool in self._tools):
                    self._outgoing.late_calls.add(call.id)
                request = self._outgoing.find(event.request_id)
            case _:
                request_id: str | None = getattr(event, "request_id", None)
                request = self._outgoing.find(request_id) if request_id is not None else None
        return None if request is not None and request.muted else event

    @property
    def _tools(self) -> Sequence[Mapping[str, Any]]:
        return self.config.tools if self.config else ()

    def _kept(self, updated: SessionUpdatedFrame) -> Event | None:
        """Return the event for a change of ``resumable``; None if there is no change."""
        resumable = updated.resumable
        if isinstance(resumable, UnsetType) or resumable == self.resumable:
            return None
        self.resumable = resumable
        return ResumableChanged(resumable)

    def _configured(self, updated: SessionUpdatedFrame) -> None:
        self.config = updated
        self._outgoing.configured(updated.turn_detection)
        if updated.is_unasked:
            return
        reply = self._configurations.popleft()[1] if self._configurations else None
        if reply is not None and not reply.done():
            reply.set_result(updated)

    def _truncated(self, frame: server_frames.HistoryTruncatedFrame) -> None:
        pending = next((one for one in self._truncations if one.request_id == frame.request_id), None)
        if pending is None:
            return  # the reply to the other copy of a frame that was sent twice
        self._truncations.remove(pending)
        if not pending.reply.done():
            pending.reply.set_result(frame.dropped_requests)

    def _truncation_refused(self, error: OmniError) -> None:
        """Assign a refusal to the oldest truncation without one.

        If it was sent twice, the second copy may still succeed.
        """
        pending = next((one for one in self._truncations if one.refusal is None), None)
        if pending is None:
            return
        if pending.note_refusal(error):
            self._truncations.remove(pending)
            pending.fail(error)

    def settle_truncations(self, answered: asyncio.Future[None]) -> None:
        """Fail the refused truncations, as a pong shows that all frames sent before its ping have been answered."""
        if answered.cancelled() or answered.exception() is not None:
            return
        for pending in [*self._truncations]:
            if pending.refusal is not None:
                self._truncations.remove(pending)
                pending.fail(pending.refusal)

    def _error(self, fields: ErrorFields) -> Event | None:
        """Assign an error to the ``session_config`` or ``history_truncate`` that it refuses, or return it as an event.

        Errors do not say which ``session_config`` they refuse: an error that belongs to nothing else is taken as the
        refusal of the oldest one. The refusal of a truncation has ``param`` ``request_id``, and no request id.
        """
        error = error_from_fields(fields)
        if not error.ref:
            error.about(ref=self._outgoing.ref_of(error.sequence_id))
        belongs_to_nothing = error.sequence_id is None and error.request_id is None
        if self._truncations and belongs_to_nothing and error.param == "request_id":
            self._truncation_refused(error)
            return None
        may_refuse = isinstance(error, InvalidRequest | EngineOverloaded) and not isinstance(error, EmptyInput)
        if self._configurations and belongs_to_nothing and not error.ref and may_refuse:
            _, reply = self._configurations.popleft()
            if not reply.done():
                reply.set_exception(error)
            self.last_error = ErrorEvent(error, fields.retryable)  # in case it ends the session, too
            return None
        blocks = False
        if error.sequence_id is not None and error.request_id is None:
            blocks = self._outgoing.refused(error.sequence_id)
        event = ErrorEvent(error, fields.retryable, blocks)
        self.last_error = event
        return self._output(event)
