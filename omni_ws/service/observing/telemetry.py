"""Requests as spans of OpenTelemetry, and the server's metrics, both exported by OTLP over HTTP.

Imported only if one of the two is enabled, as it needs the extra ``otel``. OpenTelemetry's environment variables
configure the exporters.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Final, NamedTuple

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY, OTEL_METRIC_EXPORT_INTERVAL
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    MetricExporter,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Metric as Exported
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from omni_ws import __version__
from omni_ws.engine.base import TimedPart
from omni_ws.errors import EngineError
from omni_ws.service import new_id
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
#: How long spans wait for others, unless OTEL_BSP_SCHEDULE_DELAY, in milliseconds, says otherwise: a request costs as
#: much CPU time as a hundred spans.
SPANS_INTERVAL_MS: Final = 15_000


class _HashedResource(Resource):
    """A resource whose hash is known: the exporter asks for it with each span, and it costs as much as the span."""

    def __init__(self, of: Resource) -> None:
        super().__init__(of.attributes, of.schema_url)
        self._hash = hash(of)

    def __hash__(self) -> int:
        return self._hash


def resource_of_server() -> Resource:
    """Return the resource (service name and version) under which spans and metrics of this server are exported."""
    return _HashedResource(Resource.create({SERVICE_NAME: "omni_ws", SERVICE_VERSION: __version__}))


def tracer_provider(processor: SpanProcessor) -> TracerProvider:
    """Return a provider for this server's spans, which OpenTelemetry's environment variables may configure further.

    Call the provider's ``shutdown`` at the end; this waits for the network.
    """
    provider = TracerProvider(resource=resource_of_server())
    provider.add_span_processor(processor)
    return provider


def network_processor() -> SpanProcessor:
    """Return a processor that sends spans by OTLP over HTTP to OTEL_EXPORTER_OTLP_ENDPOINT, from its own thread."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    interval_ms = None if OTEL_BSP_SCHEDULE_DELAY in os.environ else SPANS_INTERVAL_MS
    return BatchSpanProcessor(OTLPSpanExporter(), schedule_delay_millis=interval_ms)


class _Place(NamedTuple):
    """Where a child span belongs: the request's own span, and the context of the span right above."""

    request: ReadableSpan
    parent: SpanContext


class RequestSpans:
    """The observer that exports each request as a span, when the request or its session has ended.

    Stages are child spans, as is the time from the user's speech to the answer (``turn``); other steps are events. Of
    what a client wrote, a span contains only the trace context (``traceparent``, ``tracestate``). Register the observer
    without ``every_chunk`` and ``every_output``.

    Only the span of the request is started by the tracer, which samples it and bounds its attributes. Its about ten
    children have ended by then, and are made directly, which takes a third of the time.
    """

    def __init__(self, tracer: Tracer, processor: SpanProcessor, *, model: Callable[[], str] | None = None) -> None:
        """``processor`` is that of the tracer, see ``tracer_provider``; it gets child spans.

        ``model`` returns the name of the model that answers, for the spans; None: the spans do not name it.
        """
        self._tracer = tracer
        self._processor = processor
        self._model = model
        self._new_id = RandomIdGenerator().generate_span_id
        #: By session id and request id, the place of the span that tells when an answer began to play, for requests
        #: that were exported before playback began.
        self._unplayed: dict[str, dict[str, _Place]] = {}
        #: By session id, the context of the trace that its client named; an empty context if it named none.
        self._parents: dict[str, Context] = {}

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Export the request that this observation completes, if any."""
        match observation:
            case SessionOpened():
                self._parents[session.session_id] = _PROPAGATOR.extract(incoming_trace.get() or {}, Context())
            case SessionEnded(timeline=session_timeline):
                parent = self._parents.pop(session.session_id, None)
                self._unplayed.pop(session.session_id, None)
                if parent is not None:
                    # An engine that has not released a request by now is not waited for.
                    for timeline in session_timeline.unfinished.values():
                        if not _ends_elsewhere(timeline):
                            self._export(session, timeline, parent)
            case RequestReached(timeline=timeline) | RequestEnded(timeline=timeline) if (
                timeline.is_over and not _ends_elsewhere(timeline)
            ):
                parent = self._parents.get(session.session_id)
                if parent is not None:
                    self._export(session, timeline, parent)

            case AnswerPlayed(timeline=timeline):
                place = self._unplayed.get(session.session_id, {}).pop(timeline.request_id, None)
                if place is not None and (parts := timeline.times.parts()):
                    self._add(place, timeline, parts[-1])

    def _export(self, session: SessionIdentity, timeline: RequestTimeline, parent: Context) -> None:
        wall_ns = timeline.wall_ns
        span = self._tracer.start_span(
            "request",
            context=parent,
            kind=SpanKind.SERVER,
            attributes=_attributes(session, timeline, None if self._model is None else self._model()),
            start_time=wall_ns(timeline.opened),
        )
        if not isinstance(span, ReadableSpan):
            return  # it is not sampled
        place = _Place(span, span.get_span_context())
        for passed in timeline.stages(timeline.now()):
            self._add(place, timeline, passed)
        self._export_turn(session, timeline, place)
        for when, name, attributes in sorted(_events(timeline), key=itemgetter(0)):
            span.add_event(name, attributes, wall_ns(when))
        error = None if timeline.outcome is None else timeline.outcome.error
        # By OpenTelemetry's conventions, a server's span is an error only if the fault is the server's.
        if isinstance(error, EngineError):
            span.set_status(Status(StatusCode.ERROR, error.code))
        span.end(wall_ns(timeline.now()))

    def _export_turn(self, session: SessionIdentity, timeline: RequestTimeline, place: _Place) -> None:
        """Export a span ``turn`` for the time between the user's speech and the answer, with a child for each part."""
        times = timeline.times
        if not (parts := times.parts()):
            return
        attributes = events = None
        if times.turn_decided_audio_ms is not None:
            attributes = {"omni_ws.turn_decided_audio_ms": times.turn_decided_audio_ms}
        if times.transcript_guessed is not None:
            events = [Event("transcript_guessed", timestamp=timeline.wall_ns(times.transcript_guessed))]
        whole = TimedPart("turn", parts[0].began, parts[-1].ended)
        within = self._add(place, timeline, whole, attributes=attributes, events=events)
        for part in parts:
            self._add(within, timeline, part)
        if times.first_audio_sent is not None and times.first_audio_played is None:
            late = self._unplayed.setdefault(session.session_id, {})
            late[timeline.request_id] = within
            if len(late) > MAX_UNPLAYED:
                del late[next(iter(late))]

    def _add(
        self,
        place: _Place,
        timeline: RequestTimeline,
        lasted: TimedPart,
        *,
        attributes: Mapping[str, int] | None = None,
        events: Sequence[Event] | None = None,
    ) -> _Place:
        """Export the span ``lasted``, a child of ``place``; return the place for the span's own children."""
        request, above = place
        context = SpanContext(above.trace_id, self._new_id(), False, above.trace_flags, above.trace_state)
        span = ReadableSpan(
            lasted.name,
            context,
            above,
            resource=request.resource,
            attributes=attributes,
            events=events or (),
            start_time=timeline.wall_ns(lasted.began),
            end_time=timeline.wall_ns(lasted.ended),
            instrumentation_scope=request.instrumentation_scope,
        )
        self._processor.on_end(span)
        return _Place(request, context)


def _ends_elsewhere(timeline: RequestTimeline) -> bool:
    """Return whether a request was taken back, or goes on where its session is taken from the store."""
    return timeline.withdrawn or (timeline.outcome is not None and timeline.outcome.elsewhere)


def _attributes(
    session: SessionIdentity, timeline: RequestTimeline, model: str | None
) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {
        "gen_ai.operation.name": timeline.task.value,
        "gen_ai.provider.name": "omni_ws",
        "gen_ai.conversation.id": session.session_id,
        "gen_ai.response.id": timeline.request_id,
        "omni_ws.origin": str(session.origin),
    }
    if model is not None:
        attributes["gen_ai.response.model"] = model
    if session.owner is not None:
        attributes["omni_ws.key_name"] = session.owner
    if (outcome := timeline.outcome) is not None:
        usage = outcome.final.usage
        attributes |= {
            "omni_ws.input_audio_ms": usage.input_audio_ms,
            "omni_ws.output_audio_ms": usage.output_audio_ms,
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
    """Yield the steps that are not stages: their times, names and attributes."""
    if timeline.policy is not None:
        yield timeline.policy.at, "policy_fired", {"omni_ws.trigger": timeline.policy.trigger.value}
    if (ended := timeline.times.input_ended) is not None:
        yield ended, "input_ended", {}
    for modality, when in timeline.first_outputs.items():
        yield when, "first_output", {"omni_ws.modality": modality.value}
    for cancelled in timeline.cancellations:
        yield cancelled.at, "cancelled" if cancelled.by is None else "interrupted", {}


log = logging.getLogger(__name__)

#: Metrics that OpenTelemetry's conventions for generative AI have: their name and unit there, and the names there of
#: their labels.
_GENERATIVE_AI: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "omni_ws_time_to_first_token_seconds": ("gen_ai.server.time_to_first_token", "s", {}),
    "omni_ws_request_tokens": ("gen_ai.client.token.usage", "{token}", {"type": "gen_ai.token.type"}),
}
_UNITS: Final = {"_seconds": "s", "_bytes": "By"}
#: Unless OTEL_METRIC_EXPORT_INTERVAL, in milliseconds, says otherwise.
_INTERVAL_MS: Final = 60_000


class MetricsExport:
    """Exports metrics at intervals. ``families`` returns the metrics, and is called on the event loop."""

    def __init__(
        self, families: Callable[[], list[Metric]], *, model: Callable[[], str], exporter: MetricExporter | None = None
    ) -> None:
        """``model`` returns the name of the model that answers."""
        self._families = families
        self._model = model
        self._exporter = exporter or OTLPMetricExporter()
        self._resource = resource_of_server().merge(Resource({SERVICE_INSTANCE_ID: new_id("")}))
        self._began_ns = time.time_ns()

    async def run(self) -> None:
        """Export the metrics at every interval until cancelled, and once more at the end; then close the exporter."""
        interval_sec = _interval_ms() / 1000
        try:
            while True:
                await asyncio.sleep(interval_sec)
                await self.send()
        finally:
            await self.send()
            await asyncio.to_thread(self._exporter.shutdown)

    async def send(self) -> None:
        """Export the present metrics.

        A failed export is only logged: as counts are totals, the next one makes up for it.
        """
        families, now_ns = self._families(), time.time_ns()
        try:
            await asyncio.to_thread(lambda: self._exporter.export(self._data(families, now_ns)))
        except Exception:
            log.warning("the metrics could not be exported", exc_info=True)

    def _data(self, families: Iterable[Metric], now_ns: int) -> MetricsData:
        metrics = [self._exported(family, now_ns) for family in families if family.samples]
        scope = ScopeMetrics(InstrumentationScope("omni_ws", __version__), metrics, "")
        return MetricsData([ResourceMetrics(self._resource, [scope], "")])

    def _exported(self, family: Metric, now_ns: int) -> Exported:
        unit = next((unit for ending, unit in _UNITS.items() if family.name.endswith(ending)), "")
        name, unit, labels = _GENERATIVE_AI.get(family.name, (family.name, unit, {}))
        constant = {}
        if family.name in _GENERATIVE_AI:
            constant = {
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "omni_ws",
                "gen_ai.response.model": self._model(),
            }

        def attributes(sample: Sample) -> dict[str, str]:
            named = {labels.get(key, key): value for key, value in sample.labels.items() if key != "le"}
            return {**constant, **named}

        data: Sum | Gauge | Histogram
        if family.type == "histogram":
            points = [self._histogram(attributes(one[0]), one, now_ns) for one in _series(family)]
            data = Histogram(points, AggregationTemporality.CUMULATIVE)
        else:
            numbers = [NumberDataPoint(attributes(one), self._began_ns, now_ns, one.value) for one in family.samples]
            is_sum = family.type == "counter"
            data = Sum(numbers, AggregationTemporality.CUMULATIVE, is_monotonic=True) if is_sum else Gauge(numbers)
        return Exported(name, family.documentation, unit, data)

    def _histogram(self, attributes: dict[str, str], series: list[Sample], now_ns: int) -> HistogramDataPoint:
        below = [(float(one.labels["le"]), one.value) for one in series if one.name.endswith("_bucket")]
        upto = [0.0, *(count for _, count in below)]
        return HistogramDataPoint(
            attributes,
            self._began_ns,
            now_ns,
            count=round(below[-1][1]),
            sum=next((one.value for one in series if one.name.endswith("_sum")), 0.0),
            bucket_counts=[round(count - before) for before, count in pairwise(upto)],
            explicit_bounds=[bound for bound, _ in below[:-1]],
            min=None,  # type: ignore[arg-type]  # not known; the encoder then leaves them out
            max=None,  # type: ignore[arg-type]
        )


def _series(family: Metric) -> Iterator[list[Sample]]:
    """Yield the samples of a histogram by series: the buckets, the sum and the count of equal labels."""
    by_labels: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in family.samples:
        labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
        by_labels.setdefault(labels, []).append(sample)
    yield from (series for series in by_labels.values() if any(one.name.endswith("_bucket") for one in series))


def _interval_ms() -> float:
    try:
        interval = float(os.environ.get(OTEL_METRIC_EXPORT_INTERVAL, _INTERVAL_MS))
    except ValueError:
        interval = 0
    return interval if 0 < interval < float("inf") else _INTERVAL_MS
