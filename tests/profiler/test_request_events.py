"""Event files: lines, write errors, and profiling off."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.recordings import event_lines

from omni_ws.profiler import events
from omni_ws.profiler.events import EventRecorder


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[EventRecorder]:
    events.recorder = EventRecorder("run-1", tmp_path / "events")
    yield events.recorder
    events.recorder.close()
    events.recorder = None


def test_a_line_has_the_fields_of_the_schema(recorder: EventRecorder) -> None:
    events.emit("input", "policy_fired", request_id="req_1", trigger="min_length")
    (line,) = event_lines(recorder)
    assert list(line) == ["request_id", "stage", "event_name", "timestamp_ns", "run_id", "pid", "metadata"]
    assert (line["request_id"], line["stage"], line["event_name"]) == ("req_1", "input", "policy_fired")
    assert (line["run_id"], line["pid"]) == ("run-1", os.getpid())
    assert line["metadata"].pop("monotonic_ns") > 0
    assert line["metadata"] == {"trigger": "min_length"}
    assert [path.name for path in recorder.paths] == [
        f"events_{stage}_{os.getpid()}.jsonl" for stage in ("coordinator", "input")
    ]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in recorder.paths)


def test_without_a_recorder_nothing_happens() -> None:
    assert events.recorder is None
    events.emit("input", "policy_fired", request_id="req_1")
    with events.span("decode") as nothing:
        assert nothing is None

    async def items() -> Any:
        yield 1

    source = items()
    assert events.awaited("voice", source) is source


def test_events_without_a_request_are_dropped(recorder: EventRecorder) -> None:
    events.emit("decode", "preprocess_start")
    assert event_lines(recorder) == []


async def test_spans_belong_to_the_request_of_their_task(recorder: EventRecorder) -> None:
    async def work(request_id: str) -> None:
        events.current_request.set(request_id)
        with events.span("decode", modality="audio"):
            await asyncio.sleep(0)

    await asyncio.gather(asyncio.create_task(work("req_1")), asyncio.create_task(work("req_2")))
    found = [(line["request_id"], line["event_name"]) for line in event_lines(recorder)]
    assert sorted(found) == [
        (request, name) for request in ("req_1", "req_2") for name in ("stage_complete", "stage_input_received")
    ]


async def test_a_span_ends_when_its_work_fails(recorder: EventRecorder) -> None:
    async def failing() -> Any:
        yield 1
        raise ValueError("broken")

    events.current_request.set("req_1")
    with pytest.raises(ValueError, match="broken"):
        async for _ in events.awaited("voice", failing()):
            pass
    names = [line["event_name"] for line in event_lines(recorder)]
    assert names == ["stage_input_received", "stage_complete"] * 2


def test_a_tensor_is_summarised(recorder: EventRecorder) -> None:
    events.emit("x", "y", request_id="r", tensor=np.zeros((2, 3), np.float32), scalar=np.array(7), other=object)
    metadata = event_lines(recorder)[0]["metadata"]
    assert metadata["tensor"] == {"__tensor_summary__": True, "type": "ndarray", "shape": [2, 3], "dtype": "float32"}
    assert metadata["scalar"] == 7
    assert metadata["other"] == "<class 'object'>"


def test_an_event_that_json_cannot_hold_is_counted(recorder: EventRecorder) -> None:
    endless: dict[str, Any] = {}
    endless["self"] = endless
    events.emit("x", "y", request_id="r", endless=endless)
    events.emit("x", "z", request_id="r")
    assert [line["event_name"] for line in event_lines(recorder)] == ["z"]
    assert recorder.dropped == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_events_lost_to_a_full_disk_are_counted(tmp_path: Path) -> None:
    recorder = EventRecorder("run-1", tmp_path)
    recorder.path.with_name(f"events_input_{os.getpid()}.jsonl").symlink_to("/dev/full")
    recorder.record("req_1", "input", "x", {})
    recorder.record("req_1", "input", "y", {})
    recorder.close()
    assert recorder.dropped == 2


def test_events_are_dropped_while_the_disk_lags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_WAITING", 3)
    monkeypatch.setattr(events, "FLUSH_SEC", 3600)
    recorder = EventRecorder("run-1", tmp_path)
    for number in range(5):
        recorder.record("req_1", "input", str(number), {})
    assert [line["event_name"] for line in event_lines(recorder)] == ["0", "1", "2"]
    assert recorder.dropped == 2


def test_a_folder_that_cannot_be_made_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        EventRecorder("run-1", tmp_path / "file" / "events")


def test_close_ends_the_thread_and_is_idempotent(tmp_path: Path) -> None:
    recorder = EventRecorder("run-1", tmp_path)
    recorder.close()
    recorder.close()
    assert all(thread.name != "request events" for thread in threading.enumerate())
