"""Spans of real requests to a real server, kept in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.live_server import LiveServer, live_server
from support.mode_b_client import mode_b, text
from support.native_client import native_client
from support.patience import PATIENCE_SEC
from support.raw_http import call, post
from support.scripted_engines import HearingEngine

pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry is not installed (the extra otel)")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from omni_ws.engine.base import TranscriptOutput
from omni_ws.engine.fake import EchoEngine, EchoSettings
from omni_ws.service.observing.telemetry import RequestSpans, tracer_provider

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Spans:
    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def requests(self) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == "request"]

    def stages(self, request: ReadableSpan) -> list[ReadableSpan]:
        assert request.context is not None
        number = request.context.span_id
        children = [span for span in self.all if span.parent is not None and span.parent.span_id == number]
        return [span for span in children if span.name != "turn"]


@contextmanager
def traced(server: LiveServer) -> Iterator[Spans]:
    exporter = InMemorySpanExporter()
    processor = SimpleSpanProcessor(exporter)
    provider = tracer_provider(processor)
    server.app.sessions.observers.add(RequestSpans(provider.get_tracer("omni_ws"), processor), every_output=False)
    yield Spans(exporter)
    provider.shutdown()


async def test_a_request_is_a_span_with_its_stages() -> None:
    async with live_server() as server:
        with traced(server) as spans:
            async with native_client(server) as client:
                await client.say("hello")
                final = (await client.answer()).final
            await server.until(lambda: not server.sessions)
    (request,) = spans.requests
    assert request.attributes is not None
    attributes: dict[str, Any] = dict(request.attributes)
    assert attributes["omni_ws.origin"] == "websocket"
    assert (request.kind, request.parent, request.status.status_code) == (SpanKind.SERVER, None, StatusCode.UNSET)
    assert {event.name for event in request.events} == {"policy_fired", "input_ended", "first_output"}
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.provider.name"]) == ("chat", "omni_ws")
    assert attributes["gen_ai.response.id"] == final["request_id"]
    assert attributes["gen_ai.conversation.id"] == client.created["session_id"]
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["gen_ai.usage.output_tokens"] == final["usage"]["output_tokens"]
    assert not {"gen_ai.response.model", "gen_ai.usage.cache_read.input_tokens"} & attributes.keys(), "neither is known"
    stages = spans.stages(request)
    assert [span.name for span in stages] == ["input", "queue", "engine"]
    times = [time for span in stages for time in (span.start_time, span.end_time)]
    assert [request.start_time, *times, request.end_time] == sorted(
        time for time in (request.start_time, *times, request.end_time) if time is not None
    )
    assert request.resource.attributes["service.name"] == "omni_ws"
    assert "hello" not in "".join(span.to_json() for span in spans.all)


async def test_requests_join_the_trace_that_a_client_names() -> None:
    async with live_server() as server:
        with traced(server) as spans:
            headers = {"traceparent": TRACEPARENT}
            async with native_client(server, additional_headers=headers) as client:
                for _ in range(2):
                    await client.say("hello")
                    await client.answer()
            await post(server.port, CHAT, HELLO, f"traceparent: {TRACEPARENT}")
            async with mode_b(server, None, f"traceparent: {TRACEPARENT}") as session:
                await session.append(text("hello", end_of_input=True))
                await session.result(wait=10)
            await server.until(lambda: not server.sessions)
    assert len(spans.requests) == 4
    for span in spans.requests:
        assert span.context is not None
        assert span.parent is not None
        assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)


@pytest.mark.parametrize(
    "given", ["", "nonsense", "00-" + "0" * 32 + f"-{PARENT}-01", "00-" + "g" * 32 + f"-{PARENT}-01"]
)
async def test_an_invalid_trace_is_replaced_by_a_new_one(given: str) -> None:
    async with live_server() as server:
        with traced(server) as spans:
            # On one connection after one that named a trace: what was named is not taken over.
            await post(server.port, CHAT, HELLO, f"traceparent: {TRACEPARENT}")
            assert (await post(server.port, CHAT, HELLO, f"traceparent: {given}")).status == 200
            await server.until(lambda: not server.sessions)
    _, span = spans.requests
    assert span.parent is None
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" != TRACE


async def test_an_unsampled_trace_has_no_spans() -> None:
    async with live_server() as server:
        with traced(server) as spans:
            await post(server.port, CHAT, HELLO, f"traceparent: {TRACEPARENT[:-1]}0")
            await server.until(lambda: not server.sessions)
    assert spans.all == ()


async def test_only_failures_of_the_server_have_the_status_error() -> None:
    async with live_server(EchoEngine(EchoSettings(fail_after_chunks=1))) as server:
        with traced(server) as spans:
            async with native_client(server) as client:
                await client.say("a b c")
                await client.answer()
                await client.chunk("")
                await client.send("finish")
                await client.answer()
            await server.until(lambda: not server.sessions)
    codes = [(dict(span.attributes or {})["error.type"], span.status.status_code) for span in spans.requests]
    assert codes == [("engine_failed", StatusCode.ERROR), ("empty_input", StatusCode.UNSET)]
    assert [span.name for span in spans.stages(spans.requests[1])] == ["input"]


async def test_an_interrupted_request_lasts_until_the_engine_has_released_it() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))
    async with live_server(engine) as server:
        with traced(server) as spans:
            async with native_client(server) as client:
                await client.configure(overlap="interrupt")
                await client.say("one")
                await client.until("response_started")
                await client.say("two")
                await client.answer()
                await client.until("response_started")
            await server.until(lambda: not server.sessions)
    first, second = spans.requests
    assert [event.name for event in first.events][-1] == "interrupted"
    for request in (first, second):
        assert dict(request.attributes or {})["gen_ai.response.finish_reasons"] == ("cancelled",)
        assert [span.name for span in spans.stages(request)] == ["input", "queue", "engine"]
        assert all(span.end_time is not None for span in spans.stages(request))


async def test_speech_that_is_cancelled_before_the_engine_gets_it_is_one_span() -> None:
    """Its final is sent at once, and the engine then only writes it down."""
    engine = HearingEngine(heard=[TranscriptOutput("some words")])
    async with live_server(engine) as server:
        with traced(server) as spans:
            async with native_client(server) as client:
                await client.chunk(bytes(3200), end=True)
                await client.send("cancel")
                assert (await client.answer()).reason == "cancelled"
                await server.until(lambda: len(engine.inputs) == 1)
                await client.barrier()
            await server.until(lambda: not server.sessions)
        stages = 'omni_ws_stage_duration_seconds_count{stage="%s"} 1.0'
        metrics = (await call(server.port, "GET", "/metrics")).body.decode()
    (request,) = spans.requests
    assert [span.name for span in spans.stages(request)] == ["input", "queue", "engine"]
    assert all(stages % stage in metrics for stage in ("input", "queue", "engine"))


def test_a_server_without_tracing_never_imports_it() -> None:
    program = (
        "import asyncio, sys\n"
        "from omni_ws.config.model import ServerConfig\n"
        "from omni_ws.engine.fake import EchoEngine\n"
        "from omni_ws.server import create_app, exporting_to_otlp\n"
        "async def run():\n"
        "    app = create_app(EchoEngine(), ServerConfig())\n"
        "    async with exporting_to_otlp(app): pass\n"
        "asyncio.run(run()); assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_SEC)
