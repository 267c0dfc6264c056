"""Metrics and log lines of sessions and requests; and context variables for the trace and location of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Final

import msgspec

from omni_ws.config.loading import is_loopback
from omni_ws.core.chunks import FinalChunk, OutputModality, Task
from omni_ws.engine.base import TimedPart
from omni_ws.errors import EngineError, EngineFailed, EngineOverloaded, OmniError, ShuttingDown
from omni_ws.metrics import Metrics
from omni_ws.service.observing.observer import (
    STAGES,
    AnswerPlayed,
    InputAccepted,
    Observation,
    Origin,
    OutputBegan,
    OutputStalled,
    RequestEnded,
    RequestReached,
    RequestTimeline,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
    SessionTimeline,
    SpeechHeard,
    Stage,
    Step,
)
from omni_ws.wire.server_frames import SpeechConfirmedFrame, SpeechStartedFrame


class Accounts:
    """The observer that keeps the metrics of sessions and requests, and writes their log lines.

    Register it without ``every_chunk`` and ``every_output``, since timelines and outcomes have the totals, and before
    the first session opens.
    """

    def __init__(self, metrics: Metrics, *, log_content: bool = False) -> None:
        """With ``log_content``, log lines contain text of clients and engines; else they contain none."""
        self._metrics = metrics
        self._log_content = log_content
        #: By id of each open session: its timeline, and its input when the metrics last counted that; None before.
        self._sessions: dict[str, SessionTimeline] = {}
        self._counted: dict[str, InputAccepted | None] = {}
        metrics.before_reading.append(self._count_all_input)
        for stage in STAGES:
            metrics.requests_active.labels(stage).set_function(partial(self._count_in, stage))

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Count an observation in the metrics, and log the ends of requests and sessions, and playback after an end."""
        if isinstance(observation, SessionOpened):
            self._sessions[session.session_id] = observation.timeline
            self._counted[session.session_id] = None
            self._metrics.sessions_opened.labels(session.origin).inc()
            return
        if session.session_id not in self._sessions:
            return  # an engine winds up a request of a session that is over
        match observation:
            case SessionEnded():
                self._session_ended(session)
            case OutputStalled(seconds=seconds):
                self._metrics.stalls.inc()
                self._metrics.stall_seconds.inc(seconds)
            case SpeechHeard(event=SpeechStartedFrame(certain=msgspec.UNSET) | SpeechConfirmedFrame()):
                self._metrics.speech_turns.inc()
            case RequestReached(timeline=timeline, step=step):
                self._request_reached(timeline, step)
            case OutputBegan(timeline=timeline, modality=modality):
                self._output_began(session, timeline, modality)
            case AnswerPlayed(timeline=timeline) if timeline.outcome is not None:
                self._count_played(session, timeline)
                _log_played(session, timeline)
            case RequestEnded(outcome=outcome):
                self._count_input(session.session_id)
                self._metrics.input_audio_seconds.inc(outcome.new_audio_ms / 1000)
                if not outcome.elsewhere:
                    self._request_ended(session, observation)

    # requests

    def _request_reached(self, timeline: RequestTimeline, step: Step) -> None:
        match step:
            case "policy_fired" | "engine_started":
                self._count_stage(timeline.stages(timeline.now())[-2])  # the stage before the one that begins
            case "engine_ended":
                self._count_stage(timeline.stages(timeline.now())[-1])
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
        if timeline.times.engine_started is None and not timeline.heard_later:
            self._count_stage(timeline.stages(outcome.at)[-1])
        final, error, player = outcome.final, outcome.error, outcome.player
        metrics.requests.labels(session.origin, final.finish_reason, "" if error is None else error.code).inc()
        for failure in (error, *final.warnings):
            if isinstance(failure, EngineFailed) and failure.param is not None:
                metrics.part_failures.labels(failure.param).inc()
        metrics.request_seconds.labels(session.origin).observe(outcome.at - timeline.opened)
        metrics.output_audio_seconds.inc(final.usage.output_audio_ms / 1000)
        self._count_times(session, timeline, final)
        metrics.player_underruns.inc(player.underruns)
        metrics.player_underrun_seconds.inc(player.underrun_sec)
        if player.least_lead_ms is not None:
            metrics.player_lead_seconds.observe(player.least_lead_ms / 1000)
        _log_request(session, ended, content=self._log_content)

    def _count_times(self, session: SessionIdentity, timeline: RequestTimeline, final: FinalChunk) -> None:
        metrics, times, usage = self._metrics, timeline.times, final.usage
        for part in times.parts():
            if part.name != "playing":
                metrics.turn_part_seconds.labels(part.name).observe(part.seconds)
        self._count_played(session, timeline)
        if times.discarded_sec:
            metrics.discarded_seconds.inc(times.discarded_sec)
            metrics.discarded_tokens.inc(times.discarded_tokens)
        if timeline.task is not Task.CHAT or timeline.times.engine_started is None:
            return
        if times.llm_asked is not None and times.first_token is not None:
            metrics.first_token_seconds.observe(max(0.0, times.first_token - times.llm_asked))
        metrics.request_tokens.labels("input").observe(usage.input_tokens)
        metrics.request_tokens.labels("output").observe(usage.output_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens or 0)

    def _count_played(self, session: SessionIdentity, timeline: RequestTimeline) -> None:
        """Count when the answer began to play. Called as the request ends or, if later, as playback begins."""
        times = timeline.times
        if times.first_audio_played is None or not (parts := times.parts()):
            return
        self._metrics.turn_part_seconds.labels("playing").observe(parts[-1].seconds)
        if times.mouth_to_ear is not None:
            self._metrics.mouth_to_ear_seconds.labels(session.origin).observe(times.mouth_to_ear)

    def _count_stage(self, passed: TimedPart) -> None:
        self._metrics.stage_seconds.labels(passed.name).observe(passed.seconds)

    def _count_in(self, stage: Stage) -> int:
        """Return how many requests are in the stage ``stage`` now."""
        return sum(timeline.stage == stage for timeline in self._unfinished())

    def _unfinished(self) -> Iterator[RequestTimeline]:
        for session in self._sessions.values():
            yield from session.unfinished.values()

    # input

    def _count_all_input(self) -> None:
        for session_id in self._sessions:
            self._count_input(session_id)

    def _count_input(self, session_id: str) -> None:
        """Count the input of a session that was accepted here since the last call."""
        timeline = self._sessions[session_id]
        old, new = self._counted[session_id] or timeline.before, timeline.received
        self._counted[session_id] = new
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

    def _session_ended(self, session: SessionIdentity) -> None:
        now = asyncio.get_running_loop().time()
        self._count_input(session.session_id)
        timeline = self._sessions.pop(session.session_id)
        del self._counted[session.session_id]
        for request in timeline.unfinished.values():
            if request.stage is not None:
                self._count_stage(request.stages(now)[-1])
        seconds = now - timeline.opened
        self._metrics.session_seconds.labels(session.origin).observe(seconds)
        _log_session(session, timeline.received, seconds=seconds, requests=timeline.request_count)


# Lines of the log.

logger = logging.getLogger("omni_ws.session")

#: A longer text is cut when it is logged.
MAX_CONTENT_CHARACTERS: Final = 2000


def _log_request(session: SessionIdentity, ended: RequestEnded, *, content: bool) -> None:
    """Write the log line of an ended request, at the level of its error.

    ``content``: include the texts of both sides.
    """
    timeline, outcome = ended.timeline, ended.outcome
    final, error = outcome.final, outcome.error
    usage = final.usage
    write_line(
        logger,
        logging.INFO if error is None else level_of(error),
        "request",
        request_id=timeline.request_id,
        session_id=session.session_id,
        key_name=session.owner,
        origin=session.origin,
        task=timeline.task,
        finish_reason=final.finish_reason,
        code=None if error is None else error.code,
        chunks=outcome.received_chunks,
        received_bytes=outcome.received_bytes,
        input_audio_ms=usage.input_audio_ms,
        output_audio_ms=usage.output_audio_ms,
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        first_output_seconds=_rounded(timeline.first_output_sec(timeline.first_answer_modality)),
        first_audio_seconds=_rounded(timeline.first_output_sec(OutputModality.AUDIO)),
        seconds=_rounded(outcome.at - timeline.opened),
        cached_tokens=usage.cached_tokens,
        interrupted_by=timeline.cancellations[0].cause if timeline.cancellations else None,
        **_times_of(timeline),
        input_text=ended.content.user_text[:MAX_CONTENT_CHARACTERS] if content else None,
        output_text=ended.content.answer_text[:MAX_CONTENT_CHARACTERS] if content else None,
    )


def _log_played(session: SessionIdentity, timeline: RequestTimeline) -> None:
    """Write the log line of an answer that began to play after the line of its request was written."""
    write_line(
        logger,
        logging.INFO,
        "played",
        request_id=timeline.request_id,
        session_id=session.session_id,
        first_audio_played_ms=timeline.times.in_ms().get("first_audio_played"),
    )


def _times_of(timeline: RequestTimeline) -> dict[str, int]:
    """Return the moments and counts of an answer by their names in a log line, such as ``first_token_ms``."""
    told = timeline.times.in_ms()
    told.pop("speech_ended", None)  # from which the others are counted
    return {name if name.endswith(("_ms", "_tokens")) else f"{name}_ms": value for name, value in told.items()}


def _log_session(session: SessionIdentity, received: InputAccepted, *, seconds: float, requests: int) -> None:
    """Write the log line of a session that ended."""
    write_line(
        logger,
        # A session of one request over HTTP has a line as that request, and as an HTTP request.
        logging.DEBUG if session.origin is Origin.HTTP else logging.INFO,
        "session",
        session_id=session.session_id,
        key_name=session.owner,
        origin=session.origin,
        requests=requests,
        chunks=received.next_sequence_id,
        received_bytes=received.received_bytes,
        duplicates=received.duplicates,
        reordered=received.reordering.items,
        seconds=_rounded(seconds),
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


#: A value of a log line, whose message is one word: ``request request_id=req_1 seconds=0.5``.
Fact = str | int | float | bool | None


def write_line(logger: logging.Logger, level: int, message: str, **facts: Fact) -> None:
    """Log a message with named values, which the formatter renders; values that are None are omitted."""
    if logger.isEnabledFor(level):
        known = {name: fact for name, fact in facts.items() if fact is not None}
        logger.log(level, message, extra={"facts": known})


def level_of(error: OmniError) -> int:
    """Return the log level of an error: ERROR for faults of the server, WARNING for lack of capacity, else INFO."""
    if isinstance(error, EngineError):
        return logging.ERROR
    if isinstance(error, EngineOverloaded | ShuttingDown):
        return logging.WARNING
    return logging.INFO


# The client of the running task: its trace (W3C Trace Context), and whether it is on this machine.

#: The trace header fields of the request that the running task serves, unchecked, as the client sent them.
incoming_trace: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_trace", default=None)

#: Whether the client of the running task is on this machine.
near_client: ContextVar[bool] = ContextVar("near_client", default=False)

#: Header fields that proxies add: the client behind a proxy may be on any machine.
_FORWARDING: Final = ("forwarded", "x-forwarded-for", "x-real-ip", "via")
_FIELDS: Final = ("traceparent", "tracestate")


def take_trace(header: Callable[[str], str | None]) -> None:
    """Set the trace for sessions that the running task opens: the one that the request's headers name, or none.

    ``header`` returns the value of a header field, or None.
    """
    found = {name: value for name in _FIELDS if (value := header(name)) is not None}
    incoming_trace.set(found if "traceparent" in found else None)


def take_place(client: str, header: Callable[[str], str | None]) -> None:
    """For the sessions that the running task opens, note whether their client is on this machine; see ``is_near``."""
    near_client.set(is_near(client, header))


def is_near(client: str, header: Callable[[str], str | None]) -> bool:
    """Whether a client is on this machine, and no header shows that a proxy stands in between.

    ``client`` is the client's address; ``header`` returns the value of a header field, or None.
    """
    return is_loopback(client) and all(header(name) is None for name in _FORWARDING)
