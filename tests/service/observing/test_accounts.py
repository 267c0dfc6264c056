"""Metrics of requests, read from their timelines on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from omni_ws.core.chunks import FinalChunk, FinishReason, InputMode, OutputModality, StartTrigger, Task, Usage
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.core.request_input import GenerationStarted
from omni_ws.errors import EngineFailed, OmniError
from omni_ws.metrics import Metrics
from omni_ws.service.observing.accounts import Accounts
from omni_ws.service.observing.observer import (
    ObservedSession,
    Observers,
    Origin,
    PlayerStatistics,
    RequestTimeline,
    SessionIdentity,
)


class Bench:
    """A session whose requests are counted."""

    def __init__(self) -> None:
        self.clock = asyncio.get_running_loop().time()
        self.metrics = Metrics()
        observers = Observers()
        observers.add(Accounts(self.metrics), every_output=False)
        identity = SessionIdentity("sess_1", Origin.WEBSOCKET)
        self.session = ObservedSession(identity, observers, now=lambda: self.clock)
        self.session.opened()

    def open(self, request_id: str = "req_1", *, by_speech: bool = False) -> RequestTimeline:
        return self.session.open_request(request_id, task=Task.CHAT, input_mode=InputMode.EXTEND, by_speech=by_speech)

    def start(self, request_id: str = "req_1") -> RequestTimeline:
        timeline = self.open(request_id)
        timeline.mark_policy_fired(GenerationStarted(StartTrigger.FIRST_CHUNK, 0, ()))
        timeline.mark_engine_started()
        return timeline

    def end(self, timeline: RequestTimeline, error: OmniError | None = None) -> None:
        final = FinalChunk(
            request_id=timeline.request_id, sequence_id=0, finish_reason=FinishReason.STOP, usage=Usage()
        )
        player = PlayerStatistics(2, 0.5, 40)
        timeline.mark_ended(
            final, error, received_chunks=0, received_bytes=0, player=player, content=LedgerEntry(request_id="req_1")
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"omni_ws_{name}", labels)

    def active(self) -> tuple[float | None, ...]:
        return tuple(self.value("requests_active", stage=stage) for stage in ("input", "queue", "engine"))


async def test_active_requests_are_counted_by_stage() -> None:
    bench = Bench()
    first, _ = bench.open("req_1"), bench.open("req_2")
    assert bench.active() == (2, 0, 0)
    first.mark_policy_fired(GenerationStarted(StartTrigger.FIRST_CHUNK, 0, ()))
    assert bench.active() == (1, 1, 0)
    first.mark_engine_started()
    assert bench.active() == (1, 0, 1)
    first.mark_engine_ended(whole=True, error=None)
    bench.end(first)
    assert bench.active() == (1, 0, 0)
    bench.session.ended()
    assert bench.active() == (0, 0, 0)


async def test_a_refused_request_was_in_the_first_stage_only() -> None:
    bench = Bench()
    timeline = bench.open()
    bench.clock += 2
    bench.end(timeline, EngineFailed("broken"))
    assert bench.value("requests_total", origin="websocket", finish_reason="stop", code="engine_failed") == 1
    assert bench.value("stage_duration_seconds_sum", stage="input") == pytest.approx(2)
    assert not bench.value("stage_duration_seconds_count", stage="queue")
    assert bench.value("player_underruns_total") == 2


async def test_the_engine_s_time_ends_when_it_releases_a_cancelled_request() -> None:
    bench = Bench()
    timeline = bench.start()
    bench.clock += 1
    timeline.mark_cancelled(bench.open("req_2", by_speech=True))
    bench.end(timeline)
    assert bench.active() == (1, 0, 1)
    bench.clock += 3
    timeline.mark_engine_ended(whole=False, error=None)
    assert bench.active() == (1, 0, 0)
    assert bench.value("stage_duration_seconds_sum", stage="engine") == pytest.approx(4)
    assert bench.value("interrupt_seconds_sum", by="speech") == pytest.approx(3)
    assert bench.value("request_duration_seconds_sum", origin="websocket") == pytest.approx(1)


async def test_an_engine_that_is_not_done_when_the_session_ends_is_counted_up_to_there() -> None:
    bench = Bench()
    timeline = bench.start()
    bench.end(timeline)
    bench.session.ended()
    assert bench.value("stage_duration_seconds_count", stage="engine") == 1
    timeline.mark_engine_ended(whole=False, error=None)
    assert bench.value("stage_duration_seconds_count", stage="engine") == 1


async def test_the_first_output_is_timed_once_and_audio_by_itself() -> None:
    bench = Bench()
    timeline = bench.start()
    timeline.mark_input_ended()
    timeline.mark_output_began(OutputModality.TRANSCRIPT)
    bench.clock += 1
    timeline.mark_output_began(OutputModality.TEXT)
    bench.clock += 1
    timeline.mark_output_began(OutputModality.AUDIO)
    assert bench.value("time_to_first_output_seconds_count", origin="websocket") == 1
    assert bench.value("time_to_first_output_seconds_sum", origin="websocket") == pytest.approx(1)
    assert bench.value("time_to_first_audio_seconds_sum", origin="websocket") == pytest.approx(2)
