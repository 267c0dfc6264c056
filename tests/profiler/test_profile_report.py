"""Reports on event files, including damaged ones."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from omni_ws.profiler.__main__ import FORMATS, main
from omni_ws.profiler.report import MS, NoEvents, Timeline, build_report, gaps, percentile, read, statistics, timelines

START = 1_700_000_000_000_000_000


def line(
    at_ms: float,
    stage: str,
    name: str,
    *,
    request: str = "r",
    run: str = "run",
    wall_ms: float | None = None,
    **metadata: Any,
) -> dict[str, Any]:
    wall = at_ms if wall_ms is None else wall_ms
    return {
        "request_id": request,
        "stage": stage,
        "event_name": name,
        "timestamp_ns": START + int(wall * MS),
        "run_id": run,
        "pid": 1,
        "metadata": {"monotonic_ns": 5 + int(at_ms * MS), **metadata},
    }


def written(folder: Path, *lines: dict[str, Any], name: str = "events_server_1.jsonl", tail: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(one) + "\n" for one in lines) + tail)
    return folder


def request(request: str = "r", run: str = "run", at: float = 0) -> list[dict[str, Any]]:
    """100 ms: 10 of input, 5 in the queue, 40 of voice, 35 on the way, 10 that nobody knows of."""
    named: dict[str, Any] = {"request": request, "run": run}
    return [
        line(at, "coordinator", "request_admission", origin="websocket", task="chat", **named),
        line(at, "input", "stage_input_received", from_stage="coordinator", **named),
        line(at + 5, "input", "input_received", gap_ms=2.5, chunks=3, **named),
        line(at + 10, "input", "policy_fired", **named),
        line(at + 10, "input", "stage_complete", **named),
        line(at + 10, "queue", "stage_input_received", from_stage="input", **named),
        line(at + 15, "queue", "stage_complete", **named),
        line(at + 15, "engine", "model_path_start", **named),
        line(at + 15, "voice", "stage_input_received", **named),
        line(at + 55, "voice", "stage_complete", **named),
        line(at + 55, "answer", "stage_stream_chunk_sent", to_stage="transport", chunk_id=0, modality="audio", **named),
        line(at + 90, "transport", "stage_stream_chunk_received", from_stage="answer", chunk_id=0, **named),
        line(at + 90, "transport", "first_byte_written", **named),
        line(at + 95, "engine", "model_path_end", **named),
        line(at + 95, "coordinator", "terminal_response", finish_reason="stop", output_audio_ms=160, **named),
        line(at + 100, "transport", "response_written", **named),
    ]


def test_the_figures_of_one_request(tmp_path: Path) -> None:
    report = build_report(read([written(tmp_path / "e", *request())]))
    assert (report["request_count"], report["partial_requests"], report["end_to_end_ms"]) == (1, 0, 100)
    assert report["accounted_share"] == 0.9
    (one,) = report["requests"]
    expected = {"end_to_end_ms": 100, "unaccounted_ms": 10, "ttfa_ms": 80, "ttft_ms": None, "rtf": 0.5}
    assert {name: one[name] for name in expected} == expected
    assert (one["reorder_wait_ms"], one["interrupt_ms"], one["send_stall_ms"]) == (2.5, None, None)
    stages = {(row["stage"], row["interval"]): row["total_ms"] for row in report["stage_breakdown"]}
    assert stages["voice", "stage_input_received->stage_complete"] == 40
    assert stages["queue", "stage_input_received->stage_complete"] == 5
    last = report["stage_breakdown"][-1]
    assert (last["stage"], last["total_ms"]) == ("(unaccounted)", 10)
    (hop,) = report["hop_breakdown"]
    assert (hop["src"], hop["dst"], hop["kind"], hop["total_ms"]) == ("answer", "transport", "stream_chunk", 35)
    times = [event["t_rel_ms"] for event in report["timelines"]["r"]]
    assert times == sorted(times)
    assert (times[0], times[-1]) == (0, 100)


def test_an_interruption_lasts_until_the_client_is_told() -> None:
    lines = [*request(), line(60, "coordinator", "interrupt", by="other")]
    (one,) = build_report(recorded(lines))["requests"]
    assert (one["interrupt_ms"], one["interrupt_to_engine_free_ms"]) == (40, 35)


def recorded(lines: list[dict[str, Any]]) -> Any:
    import msgspec

    from omni_ws.profiler.events import ProfileEvent
    from omni_ws.profiler.report import EventFiles

    return EventFiles([msgspec.convert(one, ProfileEvent) for one in lines], [], [])


def test_an_answer_that_begins_before_the_input_ends_is_measured_from_the_start_of_the_work() -> None:
    lines = [one for one in request() if (one["stage"], one["event_name"]) != ("input", "stage_complete")]
    lines.append(line(93, "input", "stage_complete"))
    (one,) = build_report(recorded(lines))["requests"]
    assert one["ttfa_ms"] == 80  # the policy fired at 10


def test_a_clock_that_is_set_while_a_request_runs_changes_nothing() -> None:
    lines = [
        line(0, "coordinator", "request_admission"),
        line(10, "voice", "stage_input_received", wall_ms=-5000),
        line(30, "voice", "stage_complete", wall_ms=-4980),
        line(40, "coordinator", "terminal_response", wall_ms=9000),
    ]
    (one,) = timelines(recorded(lines).events).values()
    assert (one.end - one.start) / MS == 40
    assert [interval.ms for interval in one.intervals] == [20]
    for event in lines:
        del event["metadata"]["monotonic_ns"]
    (one,) = timelines(recorded(lines).events).values()
    assert (one.end - one.start) / MS == 14_000  # the time of day is all that there is


def test_intervals_of_a_pair_close_in_the_order_of_their_opening() -> None:
    lines = [line(at, "encoder", name) for at, name in ((0, "encoder_start"), (5, "encoder_start"), (6, "encoder_end"))]
    lines += [line(9, "encoder", "encoder_end"), line(10, "encoder", "encoder_end")]
    (one,) = timelines(recorded(lines).events).values()
    assert [(interval.start // MS, interval.end // MS) for interval in one.intervals] == [(0, 6), (5, 9)]


def test_an_opener_may_be_part_of_several_pairs() -> None:
    names = ("scheduler_queue_enter", "scheduler_first_emit", "generation_end")
    (one,) = timelines(recorded([line(at, "talker", name) for at, name in enumerate(names)]).events).values()
    assert {interval.name: interval.ms for interval in one.intervals} == {
        "scheduler_queue_enter->scheduler_first_emit": 1,
        "scheduler_queue_enter->generation_end": 2,
    }


def test_presence_explains_nothing() -> None:
    lines = [
        line(0, "coordinator", "request_admission"),
        line(0, "thinker", "stage_input_received", resident=True),
        line(10, "thinker", "stage_complete"),
        line(10, "coordinator", "terminal_response"),
    ]
    (one,) = timelines(recorded(lines).events).values()
    assert one.unaccounted == 10 * MS
    assert [interval.explains for interval in one.intervals] == [False]


def test_gaps_lie_between_what_overlaps() -> None:
    lines = [
        line(0, "coordinator", "request_admission"),
        line(1, "a", "stage_input_received"),
        line(2, "b", "stage_input_received"),
        line(3, "a", "stage_complete"),
        line(4, "b", "stage_complete"),
        line(6, "c", "stage_input_received"),
        line(8, "coordinator", "terminal_response"),
        line(9, "c", "stage_complete"),
    ]
    (one,) = timelines(recorded(lines).events).values()
    assert [(start // MS, end // MS) for start, end in gaps(one)] == [(0, 1), (4, 6)]
    assert isinstance(one, Timeline)


def test_percentiles_lie_between_the_values_in_proportion() -> None:
    assert percentile([1], 0.95) == 1
    assert percentile([0, 10], 0.5) == 5
    assert percentile([0, 1, 2, 3, 4], 0.95) == pytest.approx(3.8)
    assert statistics([])["p50_ms"] is None


# files that are not as they should be


def test_a_line_that_was_cut_off_is_passed_over_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "e", *request(), tail='{"request_id": "r", "stage": "tr')
    (folder / "events_other_2.jsonl").write_bytes(b'\xff\xfe\n[]\n{"request_id": 7}\n\n')
    report = build_report(read([folder]))
    assert report["request_count"] == 1
    assert report["broken_lines"] == [
        *(f"{folder}/events_other_2.jsonl:{number}" for number in (1, 2, 3)),
        f"{folder}/events_server_1.jsonl:17",
    ]
    assert main([str(folder)]) == 0
    assert "4 invalid lines, the first at" in capsys.readouterr().out


def test_of_several_runs_the_newest_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "e", *request("old", "one"), *request("new", "two", at=1000))
    report = build_report(read([folder]))
    assert (report["run_id"], list(report["timelines"]), report["other_runs"]) == ("two", ["new"], {"one": 16})
    assert list(build_report(read([folder]), run_id="one")["timelines"]) == ["old"]
    assert main([str(folder), "--run", "three"]) == 1
    assert "no run 'three'; the runs are 'two', 'one'" in capsys.readouterr().err


def test_requests_without_a_beginning_or_an_end_are_no_figures(tmp_path: Path) -> None:
    folder = written(tmp_path / "e", *request(), *request("cut", at=50)[:-2], *request("late", at=70)[3:])
    report = build_report(read([folder]))
    assert (report["request_count"], report["partial_requests"], report["end_to_end_ms"]) == (3, 2, 100)
    only = build_report(read([written(tmp_path / "f", *request()[3:])]))
    assert (only["accounted_share"], only["stage_breakdown"]) == (None, [])
    assert all(row["count"] == 0 and row["p50"] is None for row in only["rollups"])


@pytest.mark.parametrize("form", FORMATS)
def test_every_form_takes_requests_without_an_end(form: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "e", *request()[3:])
    assert main([str(folder), "--format", form, "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out").stat().st_size > 100


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, "", "no such file or folder"),
        ("other.txt", "", "no file events_*.jsonl"),
        ("events_server_1.jsonl", "", "no event"),
        ("events_server_1.jsonl", "x\n", "no event; 1 lines are invalid"),
    ],
)
def test_where_there_is_nothing_that_is_said(
    name: str | None, content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "e"
    if name is not None:
        folder.mkdir()
        (folder / name).write_text(content)
    with pytest.raises(NoEvents):
        read([folder])
    assert main([str(folder)]) == 1
    assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "e", *request())
    assert main([str(folder), "--out", str(tmp_path / "nowhere" / "x")]) == 1
    assert "No such file or directory" in capsys.readouterr().err


# forms


def test_the_page_needs_nothing_else_and_lets_nothing_out_of_its_data(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = written(tmp_path / "e", *request(evil), *request())
    assert main([str(folder), "--format", "html", "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()

    class Reader(HTMLParser):
        scripts = 0

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.scripts += tag == "script"
            assert not {"src", "href"} & {name for name, _ in attrs}

    reader = Reader()
    reader.feed(page)
    assert reader.scripts == 1
    assert "http://" not in page
    assert "https://" not in page


def test_the_trace_has_slices_that_lie_beside_or_inside_of_each_other(tmp_path: Path) -> None:
    crossing = [line(at, "voice", name) for at, name in ((20, "stage_input_received"), (30, "encoder_start"))]
    crossing += [line(70, "voice", "stage_complete"), line(80, "voice", "encoder_end")]
    folder = written(tmp_path / "e", *request(), *crossing, *request("other", at=500))
    assert main([str(folder), "--format", "perfetto", "--out", str(tmp_path / "trace.json")]) == 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"r", "other"}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert max(start for spans in slices.values() for start, _ in spans) >= 500_000
    for spans in slices.values():
        for first, second in ((a, b) for a in spans for b in spans if a < b):
            assert first[1] <= second[0] or second[1] <= first[1], (first, second)
