"""The state of a session's input: numbers, acknowledgements, credit, and chunks to send again. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from msgspec import structs

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.file_heads import sniff_image
from omni_ws.errors import EmptyInput
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
        """Mark the request to be cancelled once the server has told its id."""
        self.cancel_when_named = True

    def assign(self, request_id: str) -> bool:
        """Set the id that the server has told. Return whether the request is to be cancelled now."""
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
        """Record that the request ended on a connection that is lost."""
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
    has nothing that the old one accepted, and would answer half a request as if it were whole.
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
        """Whether no acknowledgement is due that could grant new credit."""
        return not self._unacknowledged

    @property
    def largest_unacknowledged(self) -> int:
        """The bytes of the largest chunk under way: the server acknowledges nothing before so many have arrived."""
        return max((size for _, size in self._unacknowledged), default=0)

    # sending

    def add(self, chunk: InputChunk, *, output_audio: OutputAudioConfig) -> InputChunk | None:
        """Return the chunk with its number; None if its request has ended, so that the chunk must not be sent."""
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
        """Number the result of an async tool: it is a request of its own, whatever input is open."""
        request = self._open(chunk, output_audio, input_open=False)
        self.last_ref = request.ref
        numbered = structs.replace(chunk, sequence_id=self.next_sequence_id, ref=request.ref)
        self._place(request, numbered)
        return numbered

    def _open(self, first: InputChunk, output_audio: OutputAudioConfig, *, input_open: bool = True) -> OutgoingRequest:
        """Add the request that a chunk opens, under the name that the chunk gives or a new one."""
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
        """End the open input without another chunk; return whether the server has to be told.

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
        """Mark requests as the server will: the one with this id, or with None the first and the open request."""
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

        Return None for a request that the server opened itself. Without a name the number of a chunk identifies the
        request. If the server tells neither, it is the oldest request.
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
        """Return the unfinished request with this id, or else the one that was sent with this name."""
        self._names = self._names or ref is not None or turn_id is not None
        unnamed = (request for request in self.requests if request.request_id is None and request.ref == ref)
        return self.find(request_id) or (None if ref is None else next(unnamed, None))

    def _assign(self, request: OutgoingRequest, request_id: str) -> None:
        self._opened_by_server.discard(request_id)
        if request.assign(request_id):
            self.to_cancel.append(request_id)

    def speech_ended(self, request_id: str | None) -> None:
        """End the input of the open request if the speech that has ended joined it."""
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
        """Return the unfinished request with this id."""
        return next((request for request in self.requests if request.request_id == request_id), None)

    def waiting(self, ref: str | None) -> OutgoingRequest | None:
        """Return the unfinished request named ``ref``, or with None the one that is answered first."""
        return next((request for request in self.requests if ref is None or request.ref == ref), None)

    def ref_of(self, sequence_id: int | None) -> str | None:
        """Return the name of the unfinished request to which a chunk belongs."""
        if sequence_id is None:
            return None
        spans = (one for one in self.requests if one.first_sequence_id <= sequence_id <= one.last_sequence_id)
        return next((one.ref for one in spans), None)

    def final(self, request_id: str, *, ref: str | None = None, turn_id: str | None = None) -> OutgoingRequest | None:
        """Remove and return the request that has ended.

        The id of a request that never started is unknown here. If the server names no requests, it is then the first
        request without an id: answers arrive in order.
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
        """Remove a refused chunk, whose number is used up; return whether its request gets no Final as things are."""
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
        """The requests that cannot be sent to a fresh session, since their input was too large to keep."""
        return [request for request in self.requests if request.kept is None and not request.cancelled]

    def restart(self, *, max_chunk_bytes: int) -> tuple[list[InputChunk], list[OutgoingRequest]]:
        """Renumber the input of unfinished requests from 0, for a fresh session with this limit on a chunk.

        Return the chunks to send, and the requests that end here because they were cancelled, or have results of tool
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
    """Yield the chunk in pieces of at most ``most`` bytes; the last piece has the chunk's end of input.

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
    """A frame that was sent, with its place among the chunks."""

    #: The number of the chunk; for any other frame, the number of the next chunk.
    place: int
    kind: SentKind
    frame: bytes
    is_text: bool


class SentFrames:
    """The frames that were sent since the last acknowledged chunk, in order, to be sent again after a resume."""

    def __init__(self) -> None:
        self._frames: deque[SentFrame] = deque()

    def add(self, frame: SentFrame) -> None:
        self._frames.append(frame)

    def accepted(self, next_sequence_id: int) -> None:
        """Drop the frames that were sent before the chunk ``next_sequence_id``."""
        while self._frames and self._frames[0].place < next_sequence_id:
            self._frames.popleft()

    def to_resend(self, next_sequence_id: int, wanted: Callable[[SentFrame], bool]) -> list[SentFrame]:
        """Return the frames from the chunk ``next_sequence_id`` on, which did not arrive.

        A frame without a number may have arrived: ``wanted`` decides whether it is returned.
        """
        self.accepted(next_sequence_id)
        self._frames = deque(frame for frame in self._frames if frame.kind is SentKind.CHUNK or wanted(frame))
        return list(self._frames)

    def clear(self) -> None:
        self._frames.clear()
