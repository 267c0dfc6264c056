"""Metrics by OTLP: the numbers of GET /metrics, sent to a collector of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.live_server import live_server
from support.native_client import native_client
from support.scripted_engines import RetortEngine

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed (the extra otel)")

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.metrics import Metrics
from omni_ws.service.observing.telemetry import MetricsExport


class Collector:
    """Takes what exporters send, as OpenTelemetry's collector does."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[ExportMetricsServiceRequest] = []
        self.paths: list[str] = []
        self.got = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.paths.append(head.split()[1])
        (length,) = [int(line.split(":")[1]) for line in head.lower().splitlines() if line.startswith("content-length")]
        self.requests.append(ExportMetricsServiceRequest.FromString(await reader.readexactly(length)))
        self.got.set()
        writer.write(f"HTTP/1.1 {self.status} .\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
        writer.close()

    @property
    def metrics(self) -> dict[str, Any]:
        """The latest of each, by name."""
        (resource,) = self.requests[-1].resource_metrics
        return {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


@asynccontextmanager
async def collector(status: int = 200) -> AsyncIterator[tuple[Collector, OTLPMetricExporter]]:
    taking = Collector(status)
    server = await asyncio.start_server(taking.serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield taking, OTLPMetricExporter(endpoint=f"http://127.0.0.1:{port}/v1/metrics")


def attributes(point: Any) -> dict[str, Any]:
    return {one.key: one.value.string_value for one in point.attributes}


def samples(metrics: Metrics, family: str) -> Iterator[Any]:
    (found,) = (one for one in metrics.registry.collect() if one.name == family)
    yield from found.samples


async def test_they_are_the_numbers_of_the_metrics_route() -> None:
    async with collector() as (taking, exporter), live_server(ComposedEngine(RetortEngine())) as server:
        async with native_client(server) as client:
            await client.say("go forward")
            await client.answer()
        metrics = server.app.sessions.metrics
        await MetricsExport(metrics.families, model=lambda: "retort", exporter=exporter).send()
        sent = taking.metrics
        (point,) = sent["omni_ws_sessions_opened"].sum.data_points
        assert (point.as_double, attributes(point)) == (1, {"origin": "websocket"})
        assert sent["omni_ws_sessions_opened"].sum.is_monotonic
        (limit,) = samples(metrics, "omni_ws_sessions_limit")
        assert sent["omni_ws_sessions_limit"].gauge.data_points[0].as_double == limit.value
        # Histograms: buckets that are not cumulative, bounds, count and sum.
        (first,) = sent["omni_ws_time_to_first_output_seconds"].histogram.data_points
        buckets = [
            one for one in samples(metrics, "omni_ws_time_to_first_output_seconds") if one.name.endswith("_bucket")
        ]
        assert sum(first.bucket_counts) == first.count == 1
        assert list(first.explicit_bounds) == [float(one.labels["le"]) for one in buckets[:-1]]
        assert first.bucket_counts[next(n for n, one in enumerate(buckets) if one.value)] == 1
        assert sent["omni_ws_time_to_first_output_seconds"].unit == "s"
        assert not first.HasField("min"), "it is not known"
        parts = {attributes(one)["part"]: one.sum for one in sent["omni_ws_turn_part_seconds"].histogram.data_points}
        wanted = {
            one.labels["part"]: one.value
            for one in samples(metrics, "omni_ws_turn_part_seconds")
            if one.name.endswith("_sum")
        }
        assert parts == wanted
        assert {"queue", "llm_first_token"} <= parts.keys()


async def test_generative_ai_has_the_names_of_the_conventions() -> None:
    async with collector() as (taking, exporter), live_server(ComposedEngine(RetortEngine())) as server:
        async with native_client(server) as client:
            await client.say("go forward")
            await client.answer()
        await MetricsExport(server.app.sessions.metrics.families, model=lambda: "retort", exporter=exporter).send()
        sent = taking.metrics
        common = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "omni_ws",
            "gen_ai.response.model": "retort",
        }
        (first,) = sent["gen_ai.server.time_to_first_token"].histogram.data_points
        assert (first.count, attributes(first)) == (1, common)
        tokens = {attributes(one)["gen_ai.token.type"]: one for one in _points(sent["gen_ai.client.token.usage"])}
        assert {name: one.sum for name, one in tokens.items()} == {"input": 2, "output": 4}
        assert sent["gen_ai.client.token.usage"].unit == "{token}"
        assert common.items() <= attributes(tokens["input"]).items()
        resource = {
            one.key: one.value.string_value for one in taking.requests[-1].resource_metrics[0].resource.attributes
        }
        assert resource["service.name"] == "omni_ws"
        assert resource["service.instance.id"]
        assert taking.paths == ["/v1/metrics"]


async def test_they_are_sent_at_every_interval_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "20")
    async with collector() as (taking, exporter):
        metrics = Metrics()
        running = asyncio.create_task(MetricsExport(metrics.families, model=str, exporter=exporter).run())
        for _ in range(2):
            await taking.got.wait()
            taking.got.clear()
        metrics.duplicates.inc(3)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        (last,) = taking.metrics["omni_ws_input_duplicates"].sum.data_points
        assert last.as_double == 3


@pytest.mark.counts_passes
@pytest.mark.parametrize("interval", ["", "nonsense", "-1", "inf", "0"])
async def test_an_interval_that_makes_no_sense_is_the_usual_one(interval: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", interval)
    async with collector() as (taking, exporter):
        running = asyncio.create_task(MetricsExport(Metrics().families, model=str, exporter=exporter).run())
        await asyncio.sleep(0)
        assert taking.requests == []
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert len(taking.requests) == 1


async def test_a_collector_that_refuses_or_is_away_harms_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with collector(400) as (taking, exporter):
        await MetricsExport(Metrics().families, model=str, exporter=exporter).send()
        assert len(taking.requests) == 1
    await MetricsExport(Metrics().families, model=str, exporter=_Broken()).send()  # type: ignore[arg-type]
    assert "the metrics could not be exported" in caplog.text


class _Broken:
    def export(self, data: object) -> None:
        raise OSError("no route")


def _points(metric: Any) -> Any:
    return metric.histogram.data_points
