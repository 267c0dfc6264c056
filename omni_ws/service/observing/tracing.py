"""Requests as spans of OpenTelemetry.

Imported only if tracing is on: it needs the extra ``otel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_ws import __version__
from omni_ws.engine.turn_times import TurnPart
from omni_ws.errors import EngineError
from omni_ws.service.observing.accounts import incoming_trace
from omni_ws.service.observing.observer import (
    MAX_UNPLAYED,
    AnswerPlayed,
    Observation,
    RequestEnded,
    RequestReached,
    RequestTimeline,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
)

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def resource_of_server() -> Resource:
    """Return the names under which spans and metrics of this server are exported."""
    return Resource.create({SERVICE_NAME: "omni_ws", SERVICE_VERSION: __version__})


def tracer_provider(*processors: SpanProcessor) -> TracerProvider:
    """Return a provider for this server's spans, which OpenTelemetry's environment variables may configure further.

    Call ``shutdown`` at the end; it waits for the network.
    """
    provider = TracerProvider(resource=resource_of_server())
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def network_processor() -> SpanProcessor:
    """Return a processor that sends spans by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT, from its own thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


class RequestSpans:
    """The observer that exports each request as a span when it is over: stages are child spans, other steps events.

    Register it without ``every_chunk`` and ``every_output``. No span contains anything that a client wrote.
    """

    def __init__(self, tracer: Tracer, *, model: Callable[[], str] | None = None) -> None:
        """``model`` returns the name of the model that the server answers with, if that is to be in the spans."""
        self._tracer = tracer
        self._model = model
        #: By session id and request id, where the part belongs that tells when an answer began to play, if its span is
        #: exported before.
        self._unplayed: dict[str, dict[str, Context]] = {}
        #: By session id, the context of the trace that its client named; an empty context if it named none.
        self._parents: dict[str, Context] = {}

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Export the request that this observation completes, if it completes one."""
        match observation:
            case SessionOpened():
                self._parents[session.session_id] = _PROPAGATOR.extract(incoming_trace.get() or {}, Context())
            case SessionEnded(timeline=session_timeline):
                parent = self._parents.pop(session.session_id, None)
                self._unplayed.pop(session.session_id, None)
                if parent is not None:
                    # An engine that has not released a request by now is not waited for.
                    for timeline in session_timeline.unfinished.values():
                        if not timeline.withdrawn:
                            self._export(session, timeline, parent)
            case RequestReached(timeline=timeline) | RequestEnded(timeline=timeline) if (
                timeline.is_over and not timeline.withdrawn
            ):
                parent = self._parents.get(session.session_id)
                if parent is not None:
                    self._export(session, timeline, parent)

            case AnswerPlayed(timeline=timeline):
                within = self._unplayed.get(session.session_id, {}).pop(timeline.request_id, None)
                if within is not None and (parts := timeline.times.parts()):
                    self._part(timeline, parts[-1], within)

    def _export(self, session: SessionIdentity, timeline: RequestTimeline, parent: Context) -> None:
        wall_ns = timeline.wall_ns
        span = self._tracer.start_span(
            "request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(session, timeline, None if self._model is None else self._model()),
            start_time=wall_ns(timeline.opened),
        )
        within = set_span_in_context(span, Context())
        for passed in timeline.stages(timeline.now()):
            stage = self._tracer.start_span(passed.stage, context=within, start_time=wall_ns(passed.began))
            stage.end(wall_ns(passed.ended))
        self._export_turn(session, timeline, within)
        for when, name, attributes in sorted(_events(timeline), key=itemgetter(0)):
            span.add_event(name, attributes, wall_ns(when))
        error = None if timeline.outcome is None else timeline.outcome.error
        # By OpenTelemetry's conventions, a server's span is an error only if the fault is the server's.
        if isinstance(error, EngineError):
            span.set_status(Status(StatusCode.ERROR, error.code))
        span.end(wall_ns(timeline.now()))

    def _export_turn(self, session: SessionIdentity, timeline: RequestTimeline, parent: Context) -> None:
        """Export what the answer waited for: a span ``turn``, with a child for each part."""
        times = timeline.times
        if not (parts := times.parts()):
            return
        turn = self._tracer.start_span("turn", context=parent, start_time=timeline.wall_ns(parts[0].began))
        if times.turn_decided_audio_ms is not None:
            turn.set_attribute("omni_ws.turn_decided_audio_ms", times.turn_decided_audio_ms)
        if times.transcript_guessed is not None:
            turn.add_event("transcript_guessed", None, timeline.wall_ns(times.transcript_guessed))
        within = set_span_in_context(turn, Context())
        for part in parts:
            self._part(timeline, part, within)
        turn.end(timeline.wall_ns(parts[-1].ended))
        if times.first_audio_sent is not None and times.first_audio_played is None:
            late = self._unplayed.setdefault(session.session_id, {})
            late[timeline.request_id] = within
            if len(late) > MAX_UNPLAYED:
                del late[next(iter(late))]

    def _part(self, timeline: RequestTimeline, part: TurnPart, within: Context) -> None:
        span = self._tracer.start_span(part.name, context=within, start_time=timeline.wall_ns(part.began))
        span.end(timeline.wall_ns(part.ended))


def _attributes(
    session: SessionIdentity, timeline: RequestTimeline, model: str | None
) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {
        "gen_ai.operation.name": timeline.task.value,
        "gen_ai.provider.name": "omni_ws",
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.response.id": timeline.request_id,
        "omni_ws.request_id": timeline.request_id,
        "omni_ws.session_id": session.session_id,
        "omni_ws.origin": str(session.origin),
        "omni_ws.task": timeline.task.value,
    }
    if model is not None:
        attributes["gen_ai.response.model"] = model
    if session.owner is not None:
        attributes["omni_ws.key_name"] = session.owner
    if (outcome := timeline.outcome) is not None:
        usage = outcome.final.usage
        attributes |= {
            "omni_ws.finish_reason": outcome.final.finish_reason.value,
            "omni_ws.input_audio_ms": usage.input_audio_ms,
            "omni_ws.output_audio_ms": usage.output_audio_ms,
            "omni_ws.input_tokens": usage.input_tokens,
            "omni_ws.output_tokens": usage.output_tokens,
            "gen_ai.usage.input_tokens": usage.input_tokens,
            "gen_ai.usage.output_tokens": usage.output_tokens,
            "gen_ai.response.finish_reasons": [outcome.final.finish_reason.value],
        }
        if usage.cached_tokens is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        if timeline.times.discarded_sec:
            attributes["omni_ws.discarded_ms"] = round(timeline.times.discarded_sec * 1000)
            attributes["omni_ws.discarded_tokens"] = timeline.times.discarded_tokens
        if outcome.error is not None:
            attributes["error.type"] = outcome.error.code
    return attributes


def _events(timeline: RequestTimeline) -> Iterator[tuple[float, str, dict[str, str]]]:
    """Yield the steps that are no stages: their times, names and attributes."""
    if timeline.policy is not None:
        yield timeline.policy.at, "policy_fired", {"omni_ws.trigger": timeline.policy.trigger.value}
    if timeline.input_ended is not None:
        yield timeline.input_ended, "input_ended", {}
    for modality, when in timeline.first_outputs.items():
        yield when, "first_output", {"omni_ws.modality": modality.value}
    for cancelled in timeline.cancellations:
        yield cancelled.at, "cancelled" if cancelled.by is None else "interrupted", {}
