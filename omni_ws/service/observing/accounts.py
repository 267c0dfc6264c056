"""Accounts: what became of sessions and requests, counted for the metrics and told to the log."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from omni_ws.core.chunks import OutputModality, Task
from omni_ws.core.reorder import ReorderStatistics
from omni_ws.metrics import Metrics
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import (
    AnswerEnded,
    AnswerStarted,
    InputAcknowledged,
    InputEnded,
    Observation,
    OutputBegan,
    OutputStalled,
    PolicyFired,
    RequestCancelled,
    RequestEnded,
    RequestOpened,
    RequestProgress,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SpeechHeard,
)
from omni_ws.service.observing.session_log import RequestTimes, SessionLog
from omni_ws.wire.server_frames import SpeechStartedFrame

#: The stages of a request, in their order.
STAGES: Final = ("input", "queue", "engine")


_NOTHING: Final = InputAcknowledged(None, 0, 0, 0, ReorderStatistics())


@dataclass(slots=True)
class _Record:
    times: RequestTimes
    by_speech: bool
    stage: str = STAGES[0]
    #: When the stage began.
    stage_since: float = 0
    ended: bool = False
    #: When, and by what, its answer was interrupted.
    interrupted: tuple[float, str] | None = None


@dataclass(slots=True)
class _Session:
    opened: float
    acknowledged: InputAcknowledged
    #: What of that has been counted.
    counted: InputAcknowledged
    requests: dict[str, _Record] = field(default_factory=dict)
    #: How many there have been.
    request_count: int = 0


class Accounts:
    """An observer, but not of every chunk and output: what those would tell comes with acknowledgements and ends."""

    def __init__(self, metrics: Metrics, log: SessionLog) -> None:
        self._metrics = metrics
        self._log = log
        self._sessions: dict[str, _Session] = {}
        self._in_stage: Counter[str] = Counter()
        metrics.before_reading.append(self._count_all_input)
        for stage in STAGES:
            metrics.requests_active.labels(stage).set_function(partial(self._in_stage.__getitem__, stage))

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        if type(observation) is InputAcknowledged:
            # By far the most frequent: counted when the request ends, or when somebody asks.
            if (receiving := self._sessions.get(session.session_id)) is not None:
                receiving.acknowledged = observation
            return
        now = asyncio.get_running_loop().time()
        if isinstance(observation, SessionOpened):
            self._sessions[session.session_id] = _Session(now, _NOTHING, _NOTHING)
            self._metrics.sessions_opened.labels(session.origin).inc()
            return
        known = self._sessions.get(session.session_id)
        if known is None:
            return
        match observation:
            case SessionEnded():
                self._session_ended(session, known, now)
            case OutputStalled(seconds=seconds):
                self._metrics.stalls.inc()
                self._metrics.stall_seconds.inc(seconds)
            case SpeechHeard(event=SpeechStartedFrame()):
                self._metrics.speech_turns.inc()
            case RequestOpened(request=request, by_speech=by_speech):
                known.requests[request.request_id] = _Record(RequestTimes(now), by_speech, stage_since=now)
                known.request_count += 1
                self._in_stage[STAGES[0]] += 1
            case _ if isinstance(observation, RequestProgress):
                record = known.requests.get(observation.request.request_id)
                if record is not None:
                    self._progress(session, known, record, observation, now)

    def _progress(
        self,
        session: SessionIdentity,
        known: _Session,
        record: _Record,
        observation: RequestProgress,
        now: float,
    ) -> None:
        request = observation.request
        match observation:
            case PolicyFired():
                self._enter("queue", record, now)
            case AnswerStarted():
                self._enter("engine", record, now)
            case InputEnded():
                record.times.input_ended = now
            case OutputBegan(modality=modality):
                self._began(session, request, modality, record, now)
            case RequestCancelled(by=by) if request.answer is not None and record.interrupted is None:
                record.interrupted = (now, self._cause(known, by))
            case AnswerEnded():
                self._answer_ended(record, now)
            case RequestEnded():
                self._count_input(known)
                self._request_ended(session, record, observation, now)
        if record.ended and record.stage != "engine":
            known.requests.pop(request.request_id, None)

    def _enter(self, stage: str, record: _Record, now: float) -> None:
        self._leave(record, now)
        record.stage, record.stage_since = stage, now
        self._in_stage[stage] += 1

    def _leave(self, record: _Record, now: float) -> None:
        if record.stage:
            self._in_stage[record.stage] -= 1
            self._metrics.stage_seconds.labels(record.stage).observe(now - record.stage_since)
            record.stage = ""

    def _began(
        self, session: SessionIdentity, request: Request, modality: OutputModality, record: _Record, now: float
    ) -> None:
        times = record.times
        if modality is OutputModality.TRANSCRIPT and request.config.task is not Task.TRANSCRIBE:
            return  # what was heard is not yet an answer
        waited = 0.0 if times.input_ended is None else now - times.input_ended
        if times.first_output_sec is None:
            times.first_output_sec = waited
            self._metrics.first_output_seconds.labels(session.origin).observe(waited)
        if modality is OutputModality.AUDIO:
            times.first_audio_sec = waited
            self._metrics.first_audio_seconds.labels(session.origin).observe(waited)

    def _cause(self, known: _Session, by: Request | None) -> str:
        if by is None:
            return "cancel"
        interrupting = known.requests.get(by.request_id)
        return "speech" if interrupting is not None and interrupting.by_speech else "request"

    def _answer_ended(self, record: _Record, now: float) -> None:
        self._leave(record, now)
        if record.interrupted is not None:
            since, cause = record.interrupted
            self._metrics.interrupt_seconds.labels(cause).observe(now - since)

    def _request_ended(self, session: SessionIdentity, record: _Record, observation: RequestEnded, now: float) -> None:
        metrics, request, final, error = self._metrics, observation.request, observation.final, observation.error
        record.ended = True
        if record.stage != "engine":
            self._leave(record, now)
        seconds = now - record.times.opened
        metrics.requests.labels(session.origin, final.finish_reason, "" if error is None else error.code).inc()
        metrics.request_seconds.labels(session.origin).observe(seconds)
        metrics.input_audio_seconds.inc(final.usage.input_audio_ms / 1000)
        metrics.output_audio_seconds.inc(final.usage.output_audio_ms / 1000)
        playback = request.playback
        metrics.player_underruns.inc(playback.underruns)
        metrics.player_underrun_seconds.inc(playback.underrun_sec)
        if playback.least_lead_ms is not None:
            metrics.player_lead_seconds.observe(playback.least_lead_ms / 1000)
        self._log.request_ended(session, observation, record.times, seconds=seconds)

    def _count_all_input(self) -> None:
        for known in self._sessions.values():
            self._count_input(known)

    def _count_input(self, known: _Session) -> None:
        """What came since the last time."""
        old, new = known.counted, known.acknowledged
        known.counted = new
        metrics, before, after = self._metrics, old.reordering, new.reordering
        if new.next_sequence_id > old.next_sequence_id:
            metrics.input_chunks.inc(new.next_sequence_id - old.next_sequence_id)
            metrics.input_bytes.inc(new.received_bytes - old.received_bytes)
        if new.duplicates > old.duplicates:
            metrics.duplicates.inc(new.duplicates - old.duplicates)
        if after is not before:
            metrics.reordered.inc(after.items - before.items)
            metrics.reorder_wait_seconds.inc(after.waited - before.waited)
            metrics.gap_seconds.inc(after.gaps - before.gaps)

    def _session_ended(self, session: SessionIdentity, known: _Session, now: float) -> None:
        for record in known.requests.values():
            self._leave(record, now)
        self._count_input(known)
        del self._sessions[session.session_id]
        seconds = now - known.opened
        self._metrics.session_seconds.labels(session.origin).observe(seconds)
        self._log.session_ended(session, known.acknowledged, seconds=seconds, requests=known.request_count)
