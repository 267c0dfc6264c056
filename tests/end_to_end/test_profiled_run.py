"""A profiled run of many kinds of requests: each is whole in the report, with its stages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import ways_in
from support.embedded_engine import EmbeddedEngine
from support.live_server import live_server
from support.raw_http import post
from support.speech_clips import clip_bytes

from omni_ws.config.model import VoiceChoice
from omni_ws.profiler.__main__ import main
from omni_ws.profiler.report import build_report, read

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

REQUESTS = 20


async def test_ways_in_on_the_embedded_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clip = clip_bytes("goforward")
    text = {"modalities": ["text"]}
    kinds = [
        ways_in.typed(),
        ways_in.spoken(clip),
        ways_in.chat(stream=True, **text),
        ways_in.chat(**text),
        ways_in.spoken(clip, disorder=True),
        ways_in.streamed_body(modalities=["text"]),
        ways_in.several_requests(modalities=["text"]),
        interrupted := ways_in.interrupted(),
        ways_in.speech(),
        ways_in.typed(modalities=["text"]),
    ]
    interruptions = sum(kinds[number % len(kinds)] is interrupted for number in range(REQUESTS))
    # One voice is enough for stages, and every machine has this one.
    async with live_server(EmbeddedEngine(voice=VoiceChoice.ESPEAK), profiler={"root": tmp_path}) as server:
        started = await post(server.port, "/start_request_profile", {"run_id": "mixed"})
        await ways_in.run_mixed(server, kinds, REQUESTS)
        stopped = (await post(server.port, "/stop_request_profile", {})).json()
    assert stopped["dropped_events"] == 0
    folder = Path(started.json()["event_file"]).parent
    report = build_report(read([folder]))
    assert (report["request_count"], report["partial_requests"]) == (REQUESTS + interruptions, 0)
    # Between two stages a request waits for its turn on the loop, and on a busy machine long: benchmarks/gate.py says
    # which share of the time the stages explain where nothing else runs.
    assert 0 < report["accounted_share"] <= 1
    assert {row["stage"] for row in report["stage_breakdown"]} >= {"asr", "llm", "tts"}
    rollups = {row["measure"]: row for row in report["rollups"]}
    assert rollups["interrupt_ms"]["count"] == interruptions
    assert rollups["reorder_wait_ms"]["max"] > 0
    assert len([row for row in report["requests"] if row["reorder_wait_ms"]]) == REQUESTS // len(kinds)
    assert rollups["ttfa_ms"]["count"] > 0
    assert main([str(folder), "--format", "html", "--out", str(tmp_path / "page.html")]) == 0
    assert main([str(folder)]) == 0
    assert "(unaccounted)" in capsys.readouterr().out
    assert main([str(folder), "--format", "perfetto"]) == 0
    assert len(json.loads(capsys.readouterr().out)["traceEvents"]) > 1000
