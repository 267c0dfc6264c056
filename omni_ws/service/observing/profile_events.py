"""ProfileEvents: what happens to sessions and requests, as events of the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_ws.core.output import FinalChunk
from omni_ws.core.reorder import NONE_REORDERED
from omni_ws.profiler import events
from omni_ws.profiler.events import COORDINATOR
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import (
    AnswerEnded,
    AnswerStarted,
    InputAcknowledged,
    InputEnded,
    Observation,
    OutputMade,
    OutputStalled,
    OutputWritten,
    PolicyFired,
    RequestCancelled,
    RequestEnded,
    RequestOpened,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SpeechHeard,
)

#: Stages of the service, beside the coordinator. An engine has stages of its own.
INPUT: Final = "input"
QUEUE: Final = "queue"
ENGINE: Final = "engine"
ANSWER: Final = "answer"
TRANSPORT: Final = "transport"


@dataclass(slots=True)
class _Record:
    """What is open of a request, to be closed at its end."""

    input_open: bool = True
    queued: bool = False


@dataclass(slots=True)
class _Session:
    """What was told of a session's input so far, where that is known, and its requests that have not ended, or said
    nothing yet."""

    acknowledged: InputAcknowledged | None = None
    newest: str | None = None
    requests: dict[str, _Record] = field(default_factory=dict)
    unwritten: set[str] = field(default_factory=set)
    #: Those that an engine works on, which may take longer than they do.
    in_engine: set[str] = field(default_factory=set)


class ProfileEvents:
    """Requests that were open when it began to listen are not told of: half of a request explains nothing."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        known = self._sessions.get(session.session_id)
        if type(observation) is InputAcknowledged:  # what comes most often
            if known is not None:
                self._input(observation, known)
            return
        match observation:
            case SessionOpened():
                self._sessions[session.session_id] = _Session(InputAcknowledged(None, 0, 0, 0, NONE_REORDERED))
                return
            case SessionEnded():
                self._sessions.pop(session.session_id, None)
                return
            case RequestOpened() if known is None:
                known = self._sessions[session.session_id] = _Session()
        if known is not None:
            self._observe(session, known, observation)

    def _observe(self, session: SessionIdentity, known: _Session, observation: Observation) -> None:
        match observation:
            case OutputMade(chunk=chunk):
                events.emit(
                    ANSWER,
                    "stage_stream_chunk_sent",
                    request_id=chunk.request_id,
                    to_stage=TRANSPORT,
                    chunk_id=chunk.sequence_id,
                    modality=chunk.modality.value,
                )
            case OutputWritten():
                self._written(observation, known)
            case SpeechHeard(event=event):
                name = type(event).__struct_config__.tag
                events.emit(INPUT, str(name), request_id=known.newest, audio_ms=event.audio_ms)
            case OutputStalled(request=request, seconds=seconds) if request is not None:
                events.emit(TRANSPORT, "send_stall", request_id=request.request_id, stalled_ms=seconds * 1000)
            case RequestOpened(request=request, by_speech=by_speech):
                self._opened(session, request, known, by_speech=by_speech)
            case AnswerEnded() if observation.request.request_id in known.in_engine:
                self._answer_ended(observation, known)
            case PolicyFired() | InputEnded() | AnswerStarted() | RequestCancelled() | RequestEnded():
                record = known.requests.get(observation.request.request_id)
                if record is not None:
                    self._progress(observation, record, known)

    def _opened(self, session: SessionIdentity, request: Request, known: _Session, *, by_speech: bool) -> None:
        request_id = request.request_id
        known.newest = request_id
        known.requests[request_id] = _Record()
        known.unwritten.add(request_id)
        events.emit(
            COORDINATOR,
            "request_admission",
            request_id=request_id,
            session_id=session.session_id,
            origin=str(session.origin),
            task=request.config.task.value,
            by_speech=by_speech,
        )
        events.emit(INPUT, events.STAGE_START, request_id=request_id, from_stage=COORDINATOR)

    def _progress(
        self,
        observation: PolicyFired | InputEnded | AnswerStarted | RequestCancelled | RequestEnded,
        record: _Record,
        known: _Session,
    ) -> None:
        request_id = observation.request.request_id
        match observation:
            case PolicyFired(request=request, event=event):
                mode = request.session.settings.mode.value
                events.emit(
                    INPUT,
                    "policy_fired",
                    request_id=request_id,
                    trigger=event.trigger.value,
                    sequence_id=event.sequence_id,
                    chunks=len(event.chunks),
                    input_mode=mode,
                )
                record.queued = True
                events.emit(QUEUE, events.STAGE_START, request_id=request_id, from_stage=INPUT)
            case AnswerStarted():
                self._leave_queue(request_id, record)
                known.in_engine.add(request_id)
                events.emit(ENGINE, "model_path_start", request_id=request_id)
            case InputEnded():
                self._end_input(request_id, record)
            case RequestCancelled(by=by):
                name = "cancel" if by is None else "interrupt"
                events.emit(COORDINATOR, name, request_id=request_id, by=None if by is None else by.request_id)
            case RequestEnded(final=final, error=error):
                self._end_input(request_id, record)
                self._leave_queue(request_id, record)
                del known.requests[request_id]
                events.emit(
                    COORDINATOR,
                    "terminal_response",
                    request_id=request_id,
                    finish_reason=final.finish_reason.value,
                    error=None if error is None else error.code,
                    input_audio_ms=final.usage.input_audio_ms,
                    output_audio_ms=final.usage.output_audio_ms,
                    input_tokens=final.usage.input_tokens,
                    output_tokens=final.usage.output_tokens,
                )

    def _answer_ended(self, observation: AnswerEnded, known: _Session) -> None:
        request = observation.request
        known.in_engine.discard(request.request_id)
        cut_short = "cancelled" if request.error is None else request.error.code
        status = "ok" if observation.whole else cut_short
        events.emit(ENGINE, "model_path_end", request_id=request.request_id, status=status)

    def _end_input(self, request_id: str, record: _Record) -> None:
        if record.input_open:
            record.input_open = False
            events.emit(INPUT, events.STAGE_END, request_id=request_id, next=ENGINE)

    def _leave_queue(self, request_id: str, record: _Record) -> None:
        if record.queued:
            record.queued = False
            events.emit(QUEUE, events.STAGE_END, request_id=request_id, next=ENGINE)

    def _input(self, new: InputAcknowledged, known: _Session) -> None:
        """What came since the last time."""
        request_id = known.newest if new.request is None else new.request.request_id
        old, known.acknowledged = known.acknowledged, new
        if request_id is None or old is None:
            return
        if (old.next_sequence_id, old.duplicates) == (new.next_sequence_id, new.duplicates):
            return
        before, now = old.reordering, new.reordering
        told: dict[str, float] = {
            "chunks": new.next_sequence_id - old.next_sequence_id,
            "bytes": new.received_bytes - old.received_bytes,
            "duplicates": new.duplicates - old.duplicates,
        }
        if now is not before:  # nearly always they are one
            told |= {
                "reordered": now.items - before.items,
                "reorder_wait_ms": 1000 * (now.waited - before.waited),
                "gap_ms": 1000 * (now.gaps - before.gaps),
            }
        events.emit(INPUT, "input_received", request_id=request_id, **told)

    def _written(self, observation: OutputWritten, known: _Session) -> None:
        chunk = observation.chunk
        request_id = chunk.request_id
        if isinstance(chunk, FinalChunk):
            known.unwritten.discard(request_id)
            events.emit(TRANSPORT, "response_written", request_id=request_id)
            return
        events.emit(
            TRANSPORT,
            "stage_stream_chunk_received",
            request_id=request_id,
            from_stage=ANSWER,
            chunk_id=chunk.sequence_id,
        )
        if request_id in known.unwritten:
            known.unwritten.discard(request_id)
            events.emit(TRANSPORT, "first_byte_written", request_id=request_id, modality=chunk.modality.value)
