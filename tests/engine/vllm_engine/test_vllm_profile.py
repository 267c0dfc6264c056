"""Profiles of the vLLM engine: the events of its stages, and the traces of its processes."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support import ways_in
from support.live_server import LiveServer, live_server
from support.raw_http import post

from omni_ws.engine.vllm.engine import VllmEngine
from omni_ws.profiler.report import build_report, read

#: Two of each kind.
REQUESTS = 16
ACCOUNTED = 0.95
#: Codec tokens of a voice that knows no end: ten frames.
BRIEF = 70


@pytest_asyncio.fixture(loop_scope="session", scope="module")
async def server(voice_model: VllmEngine) -> AsyncIterator[LiveServer]:
    profiler = {"root": voice_model._trace._root}
    async with live_server(voice_model, stops_engine=False, profiler=profiler) as running:
        yield running


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="session")
class TestWithVllm:
    async def test_ways_in(self, server: LiveServer) -> None:
        short = {"sampling": {"max_tokens": 12}}
        text = {"modalities": ["text"]}
        kinds = [
            ways_in.typed(**short, **text),
            ways_in.typed(**short, stage_sampling={"talker": {"max_tokens": BRIEF}}),
            ways_in.chat(stream=True, max_tokens=12, **text),
            ways_in.chat(max_tokens=12, **text),
            ways_in.streamed_body(max_tokens=12, **text),
            ways_in.several_requests(max_tokens=12, **text),
            interrupted := ways_in.interrupted(sampling={"max_tokens": 1500}, **text),
            ways_in.speech("ada", talker_max_tokens=BRIEF),
        ]
        await post(server.port, "/start_request_profile", {"run_id": "mixed"})
        await ways_in.run_mixed(server, kinds, REQUESTS)
        stopped = (await post(server.port, "/stop_request_profile", {})).json()
        assert stopped["dropped_events"] == 0
        report = build_report(read([Path(name) for name in stopped["event_files"]]))
        interruptions = sum(kinds[number % len(kinds)] is interrupted for number in range(REQUESTS))
        assert (report["request_count"], report["partial_requests"]) == (REQUESTS + interruptions, 0)
        assert report["accounted_share"] >= ACCOUNTED, report["stage_breakdown"]
        stages = {row["stage"] for row in report["stage_breakdown"]}
        assert stages >= {"input", "queue", "decode", "thinker", "talker", "code2wav", "answer"}
        hops = {(row["src"], row["dst"]) for row in report["hop_breakdown"]}
        assert hops >= {("thinker", "talker"), ("talker", "code2wav"), ("answer", "transport")}

    async def test_a_trace_of_every_process(self, server: LiveServer) -> None:
        for run in ("first", "second"):
            started = await post(server.port, "/start_profile", {"run_id": run})
            assert started.status == 200, started.body
            await ways_in.speech("ada", "Hi.", talker_max_tokens=BRIEF)(server)
            await ways_in.typed(sampling={"max_tokens": 2}, modalities=["text"])(server)
            stopped = await post(server.port, "/stop_profile", {})
            files = [Path(name) for name in stopped.json()["trace_files"]]
            assert {path.name.split("_")[1] for path in files} == {"talker", "thinker"}, files
            computed = set()
            for path in files:
                assert str(path).startswith(started.json()["trace_path_template"])
                if ".json" not in path.suffixes:
                    continue  # tables that vLLM writes next to the traces
                data = path.read_bytes()
                trace = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
                # Both the worker process and the one that controls it write a trace.
                if any("aten::" in event.get("name", "") for event in trace["traceEvents"]):
                    computed.add(path.name.split("_")[1])
            assert computed == {"talker", "thinker"}, files
