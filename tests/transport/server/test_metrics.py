"""GET /metrics: real conversations with a real server, and the numbers that they leave."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from support.inline_workers import InlineWorkers
from support.live_server import Scrape, live_server, metrics_answer, read, scrape
from support.mode_b_client import mode_b, text
from support.native_client import native_client
from support.raw_http import post, raw_client, request
from support.scripted_engines import ToneEngine, WordEngine
from support.speech_clips import silence

from omni_ws import __version__
from omni_ws.audio.speech_watch import ORDINARY_BAR, SpeechWatch, StreamPiece
from omni_ws.audio.vad import SpeechDetector
from omni_ws.config import ServerConfig
from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.chunks import AudioFormat
from omni_ws.engine.base import AudioOutput, EngineState
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.fake import EchoEngine, EchoSettings, ScriptedEngine
from omni_ws.engine.threads import Lane
from omni_ws.errors import ShuttingDown
from omni_ws.metrics import Metrics, rendered
from omni_ws.server import create_app
from omni_ws.service.listening import SpeechWorkers

REPOSITORY = Path(__file__).parents[3]
#: A second of silence at 16 kHz.
SECOND = bytes(32_000)
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
SPOKEN: dict[str, Any] = {"modalities": ["audio"], "output_audio": {"format": "pcm16", "sample_rate": 16_000}}


# --- the route


async def test_the_text_form_and_the_open_one() -> None:
    async with live_server() as server:
        plain = await metrics_answer(server)
        open_ = await metrics_answer(server, "Accept: application/openmetrics-text; version=1.0.0")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open_.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in openmetrics_families(open_.body.decode())}  # type: ignore[no-untyped-call]
    assert {"omni_ws_sessions_active", "process_cpu_seconds", "python_info"} <= names
    assert Scrape(plain.body.decode()).value("info", version=__version__, engine="fake") == 1


async def test_a_key_is_needed_where_there_are_keys() -> None:
    async with live_server(keys=(ApiKey(name="alice", key_sha256=digest("sesame")),)) as server:
        assert (await metrics_answer(server)).status == 401
        assert (await metrics_answer(server, "Authorization: Bearer sesame")).status == 200


async def test_whatever_clients_write_becomes_no_label() -> None:
    async with live_server() as server:
        for line in ("GET /evil-1", "BREW /v1/models", "GET /v1/models/evil-2", "GET /v1/models?evil=3"):
            method, target = line.split()
            async with raw_client(server.port) as client:
                await client.send(request(method, target, "X-Evil: evil-4"))
                await client.response()
        async with native_client(server) as client:
            await client.send("session_config", model="evil-5", voice="evil-6")
            await client.error()
        found = await scrape(server)
    assert "evil" not in found.text
    assert "BREW" not in found.text
    assert found.value("http_requests_total", method="GET", route="unmatched", status="404") == 1
    assert found.value("http_requests_total", method="other", route="unmatched", status="405") == 1
    assert found.value("http_requests_total", method="GET", route="/v1/models/{id:path}", status="404") == 1
    assert found.value("http_requests_total", method="GET", route="/v1/streaming_input", status="101") == 1


# --- sessions and requests


async def test_what_a_session_and_its_requests_leave() -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            for number in (0, 2, 3, 1, 1):
                await client.chunk(str(number), number=number)
            await client.chunk("4", number=4, end=True)
            assert (await client.answer()).text == "01234"
            await client.chunk("")
            await client.send("finish")
            assert (await client.answer()).errors[0]["code"] == "empty_input"
            during = await scrape(server)
        await server.until(lambda: not server.sessions)
        after = await scrape(server)
    assert (during.value("sessions_active"), after.value("sessions_active")) == (1, 0)
    assert during.value("websocket_connections") == 1
    assert during.value("session_duration_seconds_count", origin="websocket") == 0
    assert after.value("session_duration_seconds_count", origin="websocket") == 1
    assert after.value("sessions_opened_total", origin="websocket") == 1
    requests = {"origin": "websocket", "finish_reason": "stop", "code": ""}
    assert after.value("requests_total", **requests) == 1
    assert after.value("requests_total", **requests | {"finish_reason": "error", "code": "empty_input"}) == 1
    assert after.value("request_duration_seconds_count", origin="websocket") == 2
    assert after.value("time_to_first_output_seconds_count", origin="websocket") == 1
    assert after.value("time_to_first_audio_seconds_count", origin="websocket") == 0
    # The request without any input never left the first stage.
    assert [after.value("stage_duration_seconds_count", stage=one) for one in ("input", "queue", "engine")] == [2, 1, 1]
    assert [after.value("requests_active", stage=one) for one in ("input", "queue", "engine")] == [0, 0, 0]
    assert (after.value("input_chunks_total"), after.value("input_bytes_total")) == (6, 5)
    assert (after.value("input_duplicates_total"), after.value("input_reordered_total")) == (1, 2)


@pytest.mark.virtual_clock
async def test_how_long_chunks_waited_for_what_was_missing() -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            await client.chunk("0", number=0)
            await client.chunk("2", number=2)
            await asyncio.sleep(1)
            await client.chunk("3", number=3)
            await client.barrier()
            held = read(server)
            await asyncio.sleep(2)
            await client.chunk("1", number=1)
            await client.chunk(number=4, end=True)
            await client.answer()
        found = read(server)
    assert (held.value("queue_items", hop="reorder"), held.value("input_reordered_total")) == (2, 0)
    assert (found.value("queue_items", hop="reorder"), found.value("input_reordered_total")) == (0, 2)
    assert found.value("input_reorder_wait_seconds_total") == pytest.approx(3 + 2, abs=0.02)
    assert found.value("input_gap_seconds_total") == pytest.approx(3, abs=0.02)


async def test_every_way_to_come_is_counted_apart() -> None:
    async with live_server() as server:
        assert (await post(server.port, CHAT, HELLO)).status == 200
        assert (await post(server.port, CHAT, HELLO | {"stream": True})).status == 200
        async with mode_b(server) as session:
            await session.append(text("hello", end_of_input=True))
            await session.result(wait=10)
        await server.until(lambda: not server.sessions)
        found = await scrape(server)
    for origin, count in (("http", 2), ("sessions", 1), ("websocket", 0)):
        assert found.value("sessions_opened_total", origin=origin) == count
        assert found.value("requests_total", origin=origin, finish_reason="stop", code="") == count
    assert found.value("http_requests_total", method="POST", route=CHAT, status="200") == 2
    assert found.value("http_request_duration_seconds_count", route=CHAT) == 2
    assert found.value("sessions_active") == 0


async def test_audio_in_and_out_by_its_length() -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            await client.configure(**SPOKEN)
            await client.chunk(SECOND, modality="audio")
            await client.chunk(SECOND, modality="audio", end=True)
            assert len((await client.answer()).audio) == 64_000
        found = await scrape(server)
    assert found.value("input_audio_seconds_total") == pytest.approx(2)
    assert found.value("output_audio_seconds_total") == pytest.approx(2)
    assert found.value("time_to_first_audio_seconds_count", origin="websocket") == 1


@pytest.mark.virtual_clock
async def test_times_are_counted_from_the_end_of_the_input() -> None:
    async with live_server(EchoEngine(EchoSettings(first_chunk_delay_ms=600))) as server:
        async with native_client(server) as client:
            await client.configure(start_policy="on_end_only", **SPOKEN)
            await client.chunk(SECOND, modality="audio")
            await asyncio.sleep(5)
            await client.chunk(end=True)
            await client.answer()
        found = read(server)
    assert found.value("time_to_first_audio_seconds_sum", origin="websocket") == pytest.approx(0.6, abs=0.01)
    assert found.value("time_to_first_output_seconds_sum", origin="websocket") == pytest.approx(0.6, abs=0.01)
    assert found.value("stage_duration_seconds_sum", stage="input") == pytest.approx(5, abs=0.01)
    assert found.value("stage_duration_seconds_sum", stage="queue") == pytest.approx(0, abs=0.01)
    assert found.value("stage_duration_seconds_sum", stage="engine") == pytest.approx(0.6, abs=0.01)
    assert found.value("request_duration_seconds_sum", origin="websocket") == pytest.approx(5.6, abs=0.01)


@pytest.mark.virtual_clock
async def test_output_that_comes_before_the_end_of_the_input_was_not_waited_for() -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            await client.configure(start_policy="on_first_chunk")
            await client.chunk("hel")
            await client.until("output_chunk")
            await asyncio.sleep(3)
            await client.chunk("lo", end=True)
            await client.answer()
        found = read(server)
    assert found.value("time_to_first_output_seconds_count", origin="websocket") == 1
    assert found.value("time_to_first_output_seconds_sum", origin="websocket") == 0


async def test_where_requests_are_while_they_are_there() -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))
    async with live_server(engine) as server:
        async with native_client(server) as client:
            await client.say("worked on")
            await client.until("response_started")
            await client.say("waits")
            await client.chunk("has no end yet")
            await client.barrier()
            found = await scrape(server)
        await server.until(lambda: not server.sessions)
        after = await scrape(server)
    stages = ("input", "queue", "engine")
    assert [found.value("requests_active", stage=stage) for stage in stages] == [0, 2, 1]
    assert found.value("engine_active_requests", engine="fake") == 1
    assert (found.value("engine_up", engine="fake"), found.value("draining")) == (1, 0)
    # The engine has taken the first request's input over, and not the others'.
    assert found.value("queue_bytes", hop="input") == found.value("held_bytes") == len("waits" + "has no end yet")
    assert [after.value("requests_active", stage=stage) for stage in stages] == [0, 0, 0]
    assert after.value("requests_total", origin="websocket", finish_reason="cancelled", code="") == 3
    assert after.value("queue_bytes", hop="input") == after.value("held_bytes") == 0


async def test_each_part_of_a_composition_is_up_or_not() -> None:
    asr, tts = WordEngine(), ToneEngine()
    async with live_server(ComposedEngine(EchoEngine(), asr=asr, tts=tts)) as server:
        asr.state = EngineState.UNHEALTHY
        found = read(server)
        assert [found.value("part_up", part=part) for part in ("asr", "llm", "tts")] == [0, 1, 1]
        assert found.value("engine_up", engine="fake") == 1


async def test_a_part_whose_work_the_llm_does_is_up_with_it() -> None:
    llm = EchoEngine()
    engine = ComposedEngine(llm, asr=WordEngine(), where_missing=True)  # an EchoEngine hears by itself
    app = create_app(engine, ServerConfig())
    ups = []
    for step in (engine.start, llm.stop, llm.start):
        await step()
        found = Scrape(rendered(app.sessions.metrics.families(), "")()[0].decode())
        ups.append([found.value("part_up", part=part) for part in ("asr", "llm")])
    assert ups == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.parametrize("by", ["cancel", "request"])
async def test_interruptions_are_timed_by_what_interrupts(by: str) -> None:
    engine = EchoEngine(EchoSettings(first_chunk_delay_ms=60_000))
    async with live_server(engine) as server:
        async with native_client(server) as client:
            await client.configure(overlap="interrupt")
            await client.say("one")
            await client.until("response_started")
            await (client.send("cancel") if by == "cancel" else client.chunk("two"))
            assert (await client.answer()).reason == "cancelled"
            if by == "cancel":
                await client.chunk("two")
            await client.until("response_started")  # for which the engine must have let go of the first
        found = await scrape(server)
    assert found.value("interrupt_seconds_count", by=by) == 1
    assert len(found.labels("interrupt_seconds_count")) == 1


async def test_what_is_refused_a_place_or_comes_too_often() -> None:
    alice = ApiKey(name="alice", key_sha256=digest("sesame"), requests_per_sec=0.001, burst=1)
    key = "Authorization: Bearer sesame"
    async with live_server(keys=(alice,), limits={"max_sessions": 1}) as server:
        assert (await post(server.port, CHAT, HELLO, key)).status == 200
        assert (await post(server.port, CHAT, HELLO, key)).status == 429
        async with native_client(server, additional_headers={"Authorization": "Bearer sesame"}) as client:
            await client.say("too much")
            assert (await client.answer()).errors[0]["code"] == "rate_limited"
            assert (await post(server.port, CHAT, HELLO, key)).status == 503
        found = Scrape((await metrics_answer(server, key)).body.decode())
    assert found.value("refused_total", what="request", code="rate_limited") == 2
    assert found.value("refused_total", what="session", code="engine_overloaded") == 1
    assert found.value("requests_total", origin="websocket", finish_reason="error", code="rate_limited") == 1


async def test_coming_back_and_failing_to() -> None:
    async with live_server(streaming_input={"resume_grace_sec": 30}) as server:
        async with native_client(server) as client:
            session, token = client.created["session_id"], client.created["resume_token"]
            client.gone()
        await server.until(lambda: not server.connections)
        away = await scrape(server)
        async with native_client(server, query=f"?session_id={session}&resume_token=wrong", greeted=False) as client:
            assert (await client.error())["code"] == "session_not_found"
        query = f"?session_id={session}&resume_token={token}&last_output="
        async with native_client(server, query=query + "-1", greeted=False) as client:
            token = (await client.until("session_resumed"))["resume_token"]
            back = await scrape(server)
            client.gone()
        await server.until(lambda: not server.connections)
        query = f"?session_id={session}&resume_token={token}&last_output=7"
        async with native_client(server, query=query, greeted=False) as client:
            assert (await client.error())["code"] == "resync_required"
            found = await scrape(server)
            await client.connection.close()
        server.native.end_all(ShuttingDown("the test is over"))
    assert (away.value("sessions_away"), back.value("sessions_away")) == (1, 0)
    outcomes = {outcome: found.value("resumes_total", outcome=outcome) for outcome in ("resumed", "resync", "refused")}
    assert outcomes == {"resumed": 1, "resync": 1, "refused": 1}


@pytest.mark.virtual_clock
async def test_a_player_that_tells_how_far_it_is_and_runs_dry() -> None:
    second = AudioOutput(np.zeros(16_000, dtype=np.float32), 16_000)

    async def rest() -> None:
        await asyncio.sleep(3)

    async with live_server(ScriptedEngine([second, rest, second])) as server:
        async with native_client(server) as client:
            await client.configure(**SPOKEN)
            await client.say("speak")
            first = await client.until("output_chunk")
            await asyncio.sleep(0.75)
            await client.send("output_ack", sequence_id=first["sequence_id"], played_ms=750)
            await client.answer()
        found = read(server)
    assert found.value("player_lead_seconds_count") == 1
    assert found.value("player_lead_seconds_sum") == pytest.approx(0.25, abs=0.01)
    assert found.value("player_underruns_total") == 1
    assert found.value("player_underrun_seconds_total") == pytest.approx(2, abs=0.02)


async def test_players_that_tell_nothing_say_nothing() -> None:
    async with live_server() as server:
        async with native_client(server) as client:
            await client.configure(**SPOKEN)
            await client.chunk(SECOND, modality="audio", end=True)
            await client.answer()
        found = await scrape(server)
    assert found.value("player_lead_seconds_count") == found.value("player_underruns_total") == 0


@pytest.mark.slow
@pytest.mark.real_time
async def test_turns_that_are_heard_in_an_open_microphone() -> None:
    spoken = (8000 + np.arange(16 * 600) % 9973).astype("<i2").tobytes()
    async with live_server() as server:
        server.app.sessions.speech_workers = InlineWorkers()
        async with native_client(server) as client:
            await client.configure(turn_detection={"type": "server_vad"}, output_audio={"sample_rate": 16_000})
            for _ in range(2):
                await client.binary(spoken)
                await client.binary(SECOND)
                await client.answer()
        found = await scrape(server)
    assert found.value("speech_turns_total") == 2
    assert found.value("requests_total", origin="websocket", finish_reason="stop", code="") == 2


async def test_the_work_of_listening_threads_is_timed() -> None:
    metrics = Metrics()
    workers = SpeechWorkers(metrics)
    done = asyncio.Event()
    watch = SpeechWatch(SpeechDetector(), threshold=0.5, silence_duration_ms=500)
    second = StreamPiece(watch, silence(1), AudioFormat(sample_rate=16_000), ORDINARY_BAR)
    workers.submit(second, lambda outcome: done.set(), Lane())
    await done.wait()
    workers.close()
    found = Scrape(rendered(metrics.families(), "")()[0].decode())
    assert found.value("listening_pieces_total") == 1
    assert 0.001 <= found.value("listening_seconds_total") < 5


async def test_nobody_is_told_of_every_chunk_and_output_without_asking() -> None:
    async with live_server() as server:
        observers = server.app.sessions.observers
        assert (observers.listening, observers.listening_to_chunks, observers.listening_to_outputs) == (
            True,
            False,
            False,
        )


# --- what is written about them


def test_every_metric_is_named_by_the_conventions() -> None:
    described = Metrics().descriptions
    assert len({one.name for one in described}) == len(described) == len(Metrics().registry._collector_to_names)
    for one in described:
        assert one.name.startswith("omni_ws_")
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert not re.search(r"_(ms|milliseconds|minutes|kb|mb)(_|$)", one.name), f"{one.name} is in no base unit"


def test_every_metric_of_the_dashboard_exists_and_has_those_labels() -> None:
    dashboard = json.loads((REPOSITORY / "docs/grafana/omni_ws.json").read_text(encoding="utf-8"))
    known: dict[str, set[str]] = {}
    for one in Metrics().descriptions:
        for suffix in ("_bucket", "_sum", "_count") if one.kind == "histogram" else ("",):
            known[one.name + suffix] = {*one.labels, *(["le"] if suffix == "_bucket" else [])}
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    queries = [one["query"]["query"] for one in dashboard["templating"]["list"] if isinstance(one["query"], dict)]
    used = {name for expression in (*expressions, *queries) for name in re.findall(r"omni_ws_\w+", expression)}
    assert used - known.keys() == set()
    for expression in expressions:
        names = re.findall(r"omni_ws_\w+", expression)
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", expression) for label in group.split(",")}
        for name in names:
            assert grouped <= known[name], f"{name} has not all of {grouped}"
    # The dashboard shows them all, but for what only a query about one route or session would ask.
    families = {one.name for one in Metrics().descriptions if not any(name.startswith(one.name) for name in used)}
    assert families <= {
        *("omni_ws_session_duration_seconds", "omni_ws_request_duration_seconds", "omni_ws_input_chunks_total"),
        *("omni_ws_input_bytes_total", "omni_ws_listening_pieces_total", "omni_ws_draining"),
        *("omni_ws_http_request_duration_seconds", "omni_ws_grpc_call_duration_seconds"),
        *("omni_ws_http_connections", "omni_ws_websocket_connections"),
    }
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(places)
