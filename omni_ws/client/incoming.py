"""The receiving half of a session: it converts frames to events, and completes the calls that wait for a reply."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import UnsetType

from omni_ws.client.connection import error_from_fields, read_frame
from omni_ws.client.events import (
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
from omni_ws.client.outgoing import OutgoingInput
from omni_ws.core.chunks import SAMPLE_BYTES, StartTrigger
from omni_ws.errors import EmptyInput, InvalidRequest, OmniError
from omni_ws.wire import server_frames
from omni_ws.wire.frames import decode_output_audio
from omni_ws.wire.server_frames import (
    ErrorFields,
    ServerFrame,
    SessionCreatedFrame,
    SessionUpdatedFrame,
)
from omni_ws.wire.session_config import OutputAudioConfig

_SAMPLE_BYTES = {encoding.value: size for encoding, size in SAMPLE_BYTES.items()}
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
    """Return whether a frame tells that the store failed or works again, which has no place among the outputs."""
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
        """Record a refusal. Return whether the refusal is final, as the frame was sent only once."""
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

    Reports of the server about the session's input are passed on to ``outgoing``.
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
        self._configurations: deque[asyncio.Future[SessionUpdatedFrame]] = deque()
        self._truncations: list[PendingTruncation] = []
        self._histories: deque[asyncio.Future[list[dict[str, Any]]]] = deque()
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

    def expect_configuration(self) -> asyncio.Future[SessionUpdatedFrame]:
        """Return a future for the reply to a ``session_config`` that is about to be sent.

        Replies arrive in the order of these frames, so a future stays queued even if its caller is cancelled.
        """
        reply = asyncio.get_running_loop().create_future()
        self._configurations.append(reply)
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

    def expect_history(self) -> asyncio.Future[list[dict[str, Any]]]:
        """Return a future for the reply to a ``history_get`` that is about to be sent."""
        reply = asyncio.get_running_loop().create_future()
        self._histories.append(reply)
        return reply

    @property
    def awaits_history(self) -> bool:
        """Whether a ``history_get`` has no reply yet."""
        return bool(self._histories)

    def expect_pong(self) -> tuple[int, asyncio.Future[None]]:
        """Return a number for a new ping, and a future that its pong completes."""
        number = self._next_ping
        self._next_ping += 1
        pong = self._pings[number] = asyncio.get_running_loop().create_future()
        return number, pong

    @property
    def awaits_configuration(self) -> bool:
        """Whether a ``session_config`` has no reply yet."""
        return bool(self._configurations)

    def fail(self, error: Exception) -> None:
        """Fail every waiting call with this error: the session is over."""
        self.fail_pings(error)
        truncations = (pending.reply for pending in self._truncations)
        _fail_all([*truncations, *self._configurations, *self._histories], error)
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
                reply = self._histories.popleft() if self._histories else None
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
        """Return audio without what is here already, or None if all of it is.

        A server that took over the session may not know of the last audio that the one before sent, and sends it again.
        """
        size = _SAMPLE_BYTES.get(event.format)
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
        """Return the event of a change of ``resumable``."""
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
        reply = self._configurations.popleft() if self._configurations else None
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
        """Assign a refusal to the oldest truncation that has none. One that was sent twice may still succeed."""
        pending = next((one for one in self._truncations if one.refusal is None), None)
        if pending is None:
            return
        if pending.note_refusal(error):
            self._truncations.remove(pending)
            pending.fail(error)

    def settle_truncations(self, answered: asyncio.Future[None]) -> None:
        """Fail the refused truncations once a pong shows that everything sent before its ping has been answered."""
        if answered.cancelled() or answered.exception() is not None:
            return
        for pending in [*self._truncations]:
            if pending.refusal is not None:
                self._truncations.remove(pending)
                pending.fail(pending.refusal)

    def _error(self, fields: ErrorFields) -> Event | None:
        """Assign an error to the ``session_config`` or ``history_truncate`` it refuses, or return it as an event.

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
        may_refuse = isinstance(error, InvalidRequest) and not isinstance(error, EmptyInput)
        if self._configurations and belongs_to_nothing and may_refuse:
            reply = self._configurations.popleft()
            if not reply.done():
                reply.set_exception(error)
            return None
        blocks = False
        if error.sequence_id is not None and error.request_id is None:
            blocks = self._outgoing.refused(error.sequence_id)
        event = ErrorEvent(error, fields.retryable, blocks)
        self.last_error = event
        return self._output(event)
