"""Accounts: counts sessions and requests for the metrics, and writes their lines in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from omni_ws.core.chunks import OutputModality
from omni_ws.core.reorder import ReorderStatistics
from omni_ws.errors import EngineFailed
from omni_ws.metrics import Metrics
from omni_ws.service.observing.observer import (
    InputAcknowledged,
    Observation,
    OutputStalled,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SpeechHeard,
)
from omni_ws.service.observing.session_log import SessionLog
from omni_ws.service.observing.timeline import (
    Milestone,
    OutputBegan,
    PassedStage,
    RequestEnded,
    RequestReached,
    RequestStage,
    RequestTimeline,
    SessionTimeline,
)
from omni_ws.wire.server_frames import SpeechStartedFrame

_NOTHING: Final = InputAcknowledged(0, 0, 0, ReorderStatistics())


@dataclass(slots=True)
class _OpenSession:
    timeline: SessionTimeline
    acknowledged: InputAcknowledged
    #: The part of it that is in the metrics already.
    counted: InputAcknowledged


class Accounts:
    """Keeps the metrics of sessions and requests, and the log of both.

    Register it without ``every_chunk`` and ``every_output``: acknowledgements and outcomes have the same totals. It
    must observe a server from its start.
    """

    def __init__(self, metrics: Metrics, log: SessionLog) -> None:
        self._metrics = metrics
        self._log = log
        self._sessions: dict[str, _OpenSession] = {}
        metrics.before_reading.append(self._count_all_input)
        for stage in RequestStage:
            metrics.requests_active.labels(stage).set_function(partial(self._count_in, stage))

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Count an observation."""
        if type(observation) is InputAcknowledged:
            # By far the most frequent. It is counted when a request ends, or when the metrics are read.
            if (receiving := self._sessions.get(session.session_id)) is not None:
                receiving.acknowledged = observation
            return
        if isinstance(observation, SessionOpened):
            self._sessions[session.session_id] = _OpenSession(observation.timeline, _NOTHING, _NOTHING)
            self._metrics.sessions_opened.labels(session.origin).inc()
            return
        known = self._sessions.get(session.session_id)
        if known is None:
            return  # an engine winds up a request of a session that is over
        match observation:
            case SessionEnded():
                self._session_ended(session, known)
            case OutputStalled(seconds=seconds):
                self._metrics.stalls.inc()
                self._metrics.stall_seconds.inc(seconds)
            case SpeechHeard(event=SpeechStartedFrame()):
                self._metrics.speech_turns.inc()
            case RequestReached(timeline=timeline, milestone=milestone):
                self._request_reached(timeline, milestone)
            case OutputBegan(timeline=timeline, modality=modality):
                self._output_began(session, timeline, modality)
            case RequestEnded():
                self._count_input(known)
                self._request_ended(session, observation)

    # requests

    def _request_reached(self, timeline: RequestTimeline, milestone: Milestone) -> None:
        match milestone:
            case Milestone.POLICY_FIRED | Milestone.ENGINE_STARTED:
                self._count_stage(timeline.passed[-1])
            case Milestone.ENGINE_ENDED:
                self._count_stage(timeline.passed[-1])
                if timeline.cancellations and timeline.engine_end is not None:
                    cancelled = timeline.cancellations[-1]
                    self._metrics.interrupt_seconds.labels(cancelled.cause).observe(
                        timeline.engine_end.at - cancelled.at
                    )

    def _output_began(self, session: SessionIdentity, timeline: RequestTimeline, modality: OutputModality) -> None:
        waited = timeline.first_output_sec(modality)
        assert waited is not None
        if modality is timeline.first_answer_modality:
            self._metrics.first_output_seconds.labels(session.origin).observe(waited)
        if modality is OutputModality.AUDIO:
            self._metrics.first_audio_seconds.labels(session.origin).observe(waited)

    def _request_ended(self, session: SessionIdentity, ended: RequestEnded) -> None:
        metrics, timeline, outcome = self._metrics, ended.timeline, ended.outcome
        if not timeline.reached_engine:
            self._count_stage(timeline.passed[-1])
        final, error, player = outcome.final, outcome.error, outcome.player
        metrics.requests.labels(session.origin, final.finish_reason, "" if error is None else error.code).inc()
        for failure in (error, *final.warnings):
            if isinstance(failure, EngineFailed) and failure.param is not None:
                metrics.part_failures.labels(failure.param).inc()
        metrics.request_seconds.labels(session.origin).observe(outcome.at - timeline.opened)
        metrics.input_audio_seconds.inc(final.usage.input_audio_ms / 1000)
        metrics.output_audio_seconds.inc(final.usage.output_audio_ms / 1000)
        metrics.player_underruns.inc(player.underruns)
        metrics.player_underrun_seconds.inc(player.underrun_sec)
        if player.least_lead_ms is not None:
            metrics.player_lead_seconds.observe(player.least_lead_ms / 1000)
        self._log.request_ended(session, ended)

    def _count_stage(self, passed: PassedStage) -> None:
        self._metrics.stage_seconds.labels(passed.stage).observe(passed.seconds)

    def _count_in(self, stage: RequestStage) -> int:
        """Requests that are in this stage now."""
        return sum(timeline.stage is stage for timeline in self._unfinished())

    def _unfinished(self) -> Iterator[RequestTimeline]:
        for known in self._sessions.values():
            yield from known.timeline.unfinished.values()

    # input

    def _count_all_input(self) -> None:
        for known in self._sessions.values():
            self._count_input(known)

    def _count_input(self, known: _OpenSession) -> None:
        """Count what was acknowledged since the last time."""
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

    # sessions

    def _session_ended(self, session: SessionIdentity, known: _OpenSession) -> None:
        now = asyncio.get_running_loop().time()
        for timeline in known.timeline.unfinished.values():
            if timeline.stage is not None:
                self._count_stage(PassedStage(timeline.stage, timeline.stage_began, now))
        self._count_input(known)
        del self._sessions[session.session_id]
        seconds = now - known.timeline.opened
        self._metrics.session_seconds.labels(session.origin).observe(seconds)
        self._log.session_ended(session, known.acknowledged, seconds=seconds, requests=known.timeline.request_count)
