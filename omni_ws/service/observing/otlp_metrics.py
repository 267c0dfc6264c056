"""The server's metrics, exported by OTLP over HTTP: the same numbers that ``GET /metrics`` returns.

Imported only if that is on: it needs the extra ``otel``. OpenTelemetry's environment variables configure the exporter.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.environment_variables import OTEL_METRIC_EXPORT_INTERVAL
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
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from omni_ws import __version__
from omni_ws.service.failure import new_id
from omni_ws.service.observing.tracing import resource_of_server

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
    """Sends the metrics that ``families`` returns, which is called on the event loop, until it is cancelled."""

    def __init__(
        self, families: Callable[[], list[Metric]], *, model: Callable[[], str], exporter: MetricExporter | None = None
    ) -> None:
        """``model`` returns the name of the model that the server answers with."""
        self._families = families
        self._model = model
        self._exporter = exporter or OTLPMetricExporter()
        self._resource = resource_of_server().merge(Resource({SERVICE_INSTANCE_ID: new_id("")}))
        self._began_ns = time.time_ns()

    async def run(self) -> None:
        """Send the metrics at every interval, and once more at the end."""
        interval_sec = _interval_ms() / 1000
        try:
            while True:
                await asyncio.sleep(interval_sec)
                await self.send()
        finally:
            await self.send()
            await asyncio.to_thread(self._exporter.shutdown)

    async def send(self) -> None:
        """Send the metrics as they are now. A failure is logged, and nothing else: the next interval sends them all."""
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
