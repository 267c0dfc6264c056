"""Spans of OpenTelemetry: one for each request, and one in it for each of its stages.

Imported only where tracing is on: it needs the extra ``otel``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from omni_ws import __version__
from omni_ws.errors import EngineError
from omni_ws.service.conversation.request import Request
from omni_ws.service.observing.observer import (
    AnswerEnded,
    AnswerStarted,
    InputEnded,
    Observation,
    OutputBegan,
    PolicyFired,
    RequestCancelled,
    RequestEnded,
    RequestOpened,
    RequestProgress,
    SessionEnded,
    SessionIdentity,
    SessionOpened,
)
from omni_ws.service.observing.trace_context import incoming_trace

_PROPAGATOR: Final = TraceContextTextMapPropagator()


def tracer_provider(*processors: SpanProcessor) -> TracerProvider:
    """What ends with ``shutdown``, which waits for the network. The variables of OpenTelemetry may say more of it."""
    resource = Resource.create({SERVICE_NAME: "omni_ws", SERVICE_VERSION: __version__})
    provider = TracerProvider(resource=resource)
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def network_processor() -> SpanProcessor:
    """Sends spans by OTLP over HTTP to where OTEL_EXPORTER_OTLP_ENDPOINT says, from a thread of its own."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter())


@dataclass(slots=True)
class _Record:
    span: Span
    within: Context
    stage: Span | None = None
    answering: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Session:
    #: The trace that its client named.
    parent: Context
    requests: dict[str, _Record] = field(default_factory=dict)


class RequestSpans:
    """An observer, but not of every chunk and output. What a client wrote is in no span."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._sessions: dict[str, _Session] = {}

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        if isinstance(observation, SessionOpened):
            self._sessions[session.session_id] = _Session(_PROPAGATOR.extract(incoming_trace.get() or {}, Context()))
            return
        known = self._sessions.get(session.session_id)
        if known is None:
            return
        match observation:
            case SessionEnded():
                del self._sessions[session.session_id]
                for record in known.requests.values():
                    self._end(record)
            case RequestOpened(request=request):
                known.requests[request.request_id] = self._open(session, known, request)
            case _ if isinstance(observation, RequestProgress):
                request_id = observation.request.request_id
                if (found := known.requests.get(request_id)) is not None:
                    self._progress(found, observation)
                    if found.ended and not found.answering:
                        self._end(known.requests.pop(request_id))

    def _open(self, session: SessionIdentity, known: _Session, request: Request) -> _Record:
        now = time.time_ns()
        attributes = {
            "omni_ws.request_id": request.request_id,
            "omni_ws.session_id": session.session_id,
            "omni_ws.origin": str(session.origin),
            "omni_ws.task": request.config.task.value,
        }
        if session.owner is not None:
            attributes["omni_ws.key_name"] = session.owner
        span = self._tracer.start_span(
            "request", context=known.parent, kind=SpanKind.SERVER, attributes=attributes, start_time=now
        )
        record = _Record(span, set_span_in_context(span, Context()))
        self._enter("input", record, now)
        return record

    def _progress(
        self,
        record: _Record,
        observation: RequestProgress,
    ) -> None:
        now = time.time_ns()
        match observation:
            case PolicyFired(event=event):
                record.span.add_event("policy_fired", {"omni_ws.trigger": event.trigger.value}, now)
                self._enter("queue", record, now)
            case InputEnded():
                record.span.add_event("input_ended", timestamp=now)
            case AnswerStarted():
                record.answering = True
                self._enter("engine", record, now)
            case AnswerEnded():
                record.answering = False
                self._leave(record, now)
            case OutputBegan(modality=modality):
                record.span.add_event("first_output", {"omni_ws.modality": modality.value}, now)
            case RequestCancelled(by=by):
                record.span.add_event("cancelled" if by is None else "interrupted", timestamp=now)
            case RequestEnded():
                self._account(record, observation)

    def _account(self, record: _Record, observation: RequestEnded) -> None:
        final, error, span = observation.final, observation.error, record.span
        record.ended = True
        usage = final.usage
        span.set_attributes(
            {
                "omni_ws.finish_reason": final.finish_reason.value,
                "omni_ws.input_audio_ms": usage.input_audio_ms,
                "omni_ws.output_audio_ms": usage.output_audio_ms,
                "omni_ws.input_tokens": usage.input_tokens,
                "omni_ws.output_tokens": usage.output_tokens,
            }
        )
        if error is not None:
            span.set_attribute("error.type", error.code)
            # By the conventions a server's span is an error where the fault is the server's.
            if isinstance(error, EngineError):
                span.set_status(Status(StatusCode.ERROR, error.code))

    def _enter(self, stage: str, record: _Record, now: int) -> None:
        self._leave(record, now)
        record.stage = self._tracer.start_span(stage, context=record.within, start_time=now)

    def _leave(self, record: _Record, now: int) -> None:
        if record.stage is not None:
            record.stage.end(now)
            record.stage = None

    def _end(self, record: _Record) -> None:
        now = time.time_ns()
        self._leave(record, now)
        record.span.end(now)
