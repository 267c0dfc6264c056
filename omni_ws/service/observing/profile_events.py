"""ProfileEvents: writes what happens to sessions and requests as events of the profiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from omni_ws.core.chunks import FinalChunk
from omni_ws.core.reorder import NONE_REORDERED
from omni_ws.profiler import events
from omni_ws.profiler.events import COORDINATOR, TakesEvents
from omni_ws.service.observing.observer import (
    InputAcknowledged,
    Observation,
    OutputMade,
    OutputStalled,
    OutputWritten,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SpeechHeard,
)
from omni_ws.service.observing.timeline import Milestone, RequestEnded, RequestReached, RequestTimeline

#: Stages of the service, beside the coordinator. An engine has stages of its own.
INPUT: Final = "input"
QUEUE: Final = "queue"
ENGINE: Final = "engine"
ANSWER: Final = "answer"
TRANSPORT: Final = "transport"


@dataclass(slots=True)
class _ProfiledSession:
    #: None until the first acknowledgement of a session that was open before the profile began.
    acknowledged: InputAcknowledged | None = None
    #: The request that opened last, to which the input belongs.
    newest: str | None = None
    #: Requests that opened since the profile began, and are not over.
    followed: set[str] = field(default_factory=set)
    #: Those of which the socket has got no output.
    unwritten: set[str] = field(default_factory=set)


class ProfileEvents:
    """Emits an event for each step of each request that opens while it observes.

    Requests that were open before are left out: half a request explains nothing.
    """

    def __init__(self, recorder: TakesEvents | None = None) -> None:
        """``recorder`` takes the events; None stands for those that are active."""
        self._sessions: dict[str, _ProfiledSession] = {}
        self._recorder = recorder

    def _emit(self, stage: str, name: str, *, request_id: str | None, **metadata: Any) -> None:
        if self._recorder is None:
            events.emit(stage, name, request_id=request_id, **metadata)
        elif request_id is not None:
            self._recorder.record(request_id, stage, name, metadata)

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Emit the events of an observation."""
        known = self._sessions.get(session.session_id)
        if type(observation) is InputAcknowledged:  # by far the most frequent
            if known is not None:
                self._input(observation, known)
            return
        match observation:
            case SessionOpened():
                self._sessions[session.session_id] = _ProfiledSession(InputAcknowledged(0, 0, 0, NONE_REORDERED))
                return
            case SessionEnded():
                self._sessions.pop(session.session_id, None)
                return
            case RequestReached(milestone=Milestone.OPENED) if known is None:
                known = self._sessions[session.session_id] = _ProfiledSession()
        if known is not None:
            self._observe(session, known, observation)

    def _observe(self, session: SessionIdentity, known: _ProfiledSession, observation: Observation) -> None:
        match observation:
            case OutputMade(chunk=chunk):
                self._emit(
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
                self._emit(INPUT, str(name), request_id=known.newest, audio_ms=event.audio_ms)
            case OutputStalled(request_id=str() as request_id, seconds=seconds):
                self._emit(TRANSPORT, "send_stall", request_id=request_id, stalled_ms=seconds * 1000)
            case RequestReached(timeline=timeline, milestone=Milestone.OPENED):
                self._opened(session, timeline, known)
            case RequestReached(timeline=timeline, milestone=milestone) if timeline.request_id in known.followed:
                self._reached(timeline, milestone)
                self._drop_if_over(timeline, known)
            case RequestEnded(timeline=timeline) if timeline.request_id in known.followed:
                self._ended(observation)
                self._drop_if_over(timeline, known)

    def _drop_if_over(self, timeline: RequestTimeline, known: _ProfiledSession) -> None:
        if timeline.is_over:
            known.followed.discard(timeline.request_id)

    def _opened(self, session: SessionIdentity, timeline: RequestTimeline, known: _ProfiledSession) -> None:
        request_id = known.newest = timeline.request_id
        known.followed.add(request_id)
        known.unwritten.add(request_id)
        self._emit(
            COORDINATOR,
            "request_admission",
            request_id=request_id,
            session_id=session.session_id,
            origin=str(session.origin),
            task=timeline.task.value,
            by_speech=timeline.by_speech,
        )
        self._emit(INPUT, events.STAGE_START, request_id=request_id, from_stage=COORDINATOR)

    def _reached(self, timeline: RequestTimeline, milestone: Milestone) -> None:
        request_id = timeline.request_id
        match milestone:
            case Milestone.POLICY_FIRED if timeline.policy is not None:
                self._emit(
                    INPUT,
                    "policy_fired",
                    request_id=request_id,
                    trigger=timeline.policy.trigger.value,
                    sequence_id=timeline.policy.sequence_id,
                    chunks=timeline.policy.chunks,
                    input_mode=timeline.input_mode.value,
                )
                self._emit(QUEUE, events.STAGE_START, request_id=request_id, from_stage=INPUT)
            case Milestone.ENGINE_STARTED:
                self._emit(QUEUE, events.STAGE_END, request_id=request_id, next=ENGINE)
                self._emit(ENGINE, "model_path_start", request_id=request_id)
            case Milestone.INPUT_ENDED:
                self._emit(INPUT, events.STAGE_END, request_id=request_id, next=ENGINE)
            case Milestone.CANCELLED:
                by = timeline.cancellations[-1].by
                self._emit(COORDINATOR, "cancel" if by is None else "interrupt", request_id=request_id, by=by)
            case Milestone.ENGINE_ENDED if timeline.engine_end is not None:
                self._emit(ENGINE, "model_path_end", request_id=request_id, status=timeline.engine_end.status)

    def _ended(self, ended: RequestEnded) -> None:
        timeline, final, error = ended.timeline, ended.outcome.final, ended.outcome.error
        request_id = timeline.request_id
        # Stages that the end cut short are closed, so that each event of a beginning has its end.
        if timeline.input_ended is None:
            self._emit(INPUT, events.STAGE_END, request_id=request_id, next=ENGINE)
        if timeline.policy is not None and not timeline.reached_engine:
            self._emit(QUEUE, events.STAGE_END, request_id=request_id, next=ENGINE)
        self._emit(
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

    def _input(self, new: InputAcknowledged, known: _ProfiledSession) -> None:
        """Emit what was acknowledged since the last time."""
        request_id = known.newest
        old, known.acknowledged = known.acknowledged, new
        if request_id is None or old is None:
            return
        if (old.next_sequence_id, old.duplicates) == (new.next_sequence_id, new.duplicates):
            return
        before, now = old.reordering, new.reordering
        counts: dict[str, float] = {
            "chunks": new.next_sequence_id - old.next_sequence_id,
            "bytes": new.received_bytes - old.received_bytes,
            "duplicates": new.duplicates - old.duplicates,
        }
        if now is not before:  # nearly always they are one object
            counts |= {
                "reordered": now.items - before.items,
                "reorder_wait_ms": 1000 * (now.waited - before.waited),
                "gap_ms": 1000 * (now.gaps - before.gaps),
            }
        self._emit(INPUT, "input_received", request_id=request_id, **counts)

    def _written(self, observation: OutputWritten, known: _ProfiledSession) -> None:
        chunk = observation.chunk
        request_id = chunk.request_id
        if isinstance(chunk, FinalChunk):
            known.unwritten.discard(request_id)
            self._emit(TRANSPORT, "response_written", request_id=request_id)
            return
        self._emit(
            TRANSPORT,
            "stage_stream_chunk_received",
            request_id=request_id,
            from_stage=ANSWER,
            chunk_id=chunk.sequence_id,
        )
        if request_id in known.unwritten:
            known.unwritten.discard(request_id)
            self._emit(TRANSPORT, "first_byte_written", request_id=request_id, modality=chunk.modality.value)
