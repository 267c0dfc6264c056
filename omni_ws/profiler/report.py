"""Builds the report on a run: timelines, stages, hops, latencies, and time that no stage accounts for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from omni_ws.profiler.reading import EventFiles, NoEvents
from omni_ws.profiler.timeline import MS, Timeline, timelines

#: Name of the row for time that no stage accounts for.
UNACCOUNTED: Final = "(unaccounted)"


def build_report(recording: EventFiles, *, run_id: str | None = None) -> dict[str, Any]:
    """Builds the report as JSON data.

    ``run_id`` selects a run; None means the newest. Raises NoEvents if the run does not exist.
    """
    chosen, runs = _chosen(recording, run_id), recording.runs
    lines = timelines(recording.of_run(chosen))
    whole = [one for one in lines.values() if one.whole]
    requests = [summary(one) for one in lines.values()]
    end_to_end = sum(one.end - one.start for one in whole)
    unaccounted = [one.unaccounted for one in whole]
    return {
        "run_id": chosen,
        "other_runs": {name: count for name, count in runs.items() if name != chosen},
        "files": [str(path) for path in recording.files],
        "broken_lines": recording.broken,
        "request_count": len(lines),
        "partial_requests": len(lines) - len(whole),
        "end_to_end_ms": _round(end_to_end / MS),
        "accounted_share": None if not end_to_end else round(1 - sum(unaccounted) / end_to_end, 4),
        "rollups": rollups(request for request in requests if request["whole"]),
        "stage_breakdown": stage_breakdown(whole, unaccounted),
        "hop_breakdown": hop_breakdown(whole),
        "requests": requests,
        "timelines": {request_id: _relative(one) for request_id, one in lines.items()},
    }


def chosen_timelines(recording: EventFiles, run_id: str | None) -> dict[str, Timeline]:
    """Returns the timelines of a run by request id. Raises NoEvents if the run does not exist."""
    return timelines(recording.of_run(_chosen(recording, run_id)))


def _chosen(recording: EventFiles, run_id: str | None) -> str:
    runs = recording.runs
    if run_id is None:
        return next(iter(runs))
    if run_id not in runs:
        raise NoEvents(f"no run {run_id!r}; the runs are {', '.join(map(repr, runs))}")
    return run_id


def stage_breakdown(lines: Iterable[Timeline], unaccounted: Sequence[int]) -> list[dict[str, Any]]:
    """Statistics by stage and interval, the largest total first; the last row is unaccounted time."""
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for line in lines:
        for interval in line.intervals:
            found[interval.stage, interval.name].append(interval.ms)
    rows = [{"stage": stage, "interval": name, **statistics(values)} for (stage, name), values in found.items()]
    rows.sort(key=lambda row: (-row["total_ms"], row["stage"]))
    if unaccounted:
        rows.append({"stage": UNACCOUNTED, "interval": "", **statistics([time / MS for time in unaccounted])})
    return rows


def hop_breakdown(lines: Iterable[Timeline]) -> list[dict[str, Any]]:
    """Statistics of the hops between stages, the largest total first."""
    found: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in lines:
        for hop in line.hops:
            found[hop.source, hop.target, hop.kind].append(hop.ms)
    rows = [
        {"src": source, "dst": target, "kind": kind, **statistics(values)}
        for (source, target, kind), values in found.items()
    ]
    return sorted(rows, key=lambda row: (-row["total_ms"], row["src"], row["dst"]))


def summary(line: Timeline) -> dict[str, Any]:
    """Figures of one request; None for those that its events do not allow."""
    admission = line.first("request_admission")
    terminal = line.first("terminal_response")
    origin = _answer_origin(line)
    first_audio, last_audio = _written(line, "audio", min), _written(line, "audio", max)
    audio_ms = terminal.metadata.get("output_audio_ms", 0) if terminal is not None else 0
    interrupt = line.first("interrupt")
    return {
        "request_id": line.request_id,
        "whole": line.whole,
        "origin": None if admission is None else admission.metadata.get("origin"),
        "task": None if admission is None else admission.metadata.get("task"),
        "finish_reason": None if terminal is None else terminal.metadata.get("finish_reason"),
        "error": None if terminal is None else terminal.metadata.get("error"),
        "end_to_end_ms": _round((line.end - line.start) / MS),
        "unaccounted_ms": _round(line.unaccounted / MS),
        "ttft_ms": _since(origin, _written(line, "text", min)),
        "ttfa_ms": _since(origin, first_audio),
        "rtf": None if not audio_ms or last_audio is None else round((last_audio - origin) / MS / audio_ms, 4),
        "reorder_wait_ms": _sum(line, "input_received", "gap_ms"),
        "send_stall_ms": _sum(line, "send_stall", "stalled_ms"),
        "interrupt_ms": None if interrupt is None else _since(line.at(interrupt), line.end),
        "interrupt_to_engine_free_ms": None if interrupt is None else _until(line, interrupt, "model_path_end"),
    }


ROLLUPS: Final = (
    "end_to_end_ms",
    "ttft_ms",
    "ttfa_ms",
    "rtf",
    "reorder_wait_ms",
    "send_stall_ms",
    "interrupt_ms",
    "interrupt_to_engine_free_ms",
    "unaccounted_ms",
)


def rollups(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Statistics of each figure over all requests."""
    requests = list(requests)
    rows = []
    for name in ROLLUPS:
        values = [request[name] for request in requests if request[name] is not None]
        figures = statistics(values)
        rows.append({"measure": name, **{key.removesuffix("_ms"): value for key, value in figures.items()}})
    return rows


def statistics(values: Iterable[float]) -> dict[str, Any]:
    """Count, total, average, percentiles and maximum; None instead of 0 if there are no values."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0, "total_ms": None, "avg_ms": None, "p50_ms": None, "p95_ms": None, "max_ms": None}
    return {
        "count": len(ordered),
        "total_ms": _round(sum(ordered)),
        "avg_ms": _round(sum(ordered) / len(ordered)),
        "p50_ms": _round(percentile(ordered, 0.5)),
        "p95_ms": _round(percentile(ordered, 0.95)),
        "max_ms": _round(ordered[-1]),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Interpolates linearly between the neighbouring values."""
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _answer_origin(line: Timeline) -> int:
    """When the user starts to wait: at the end of the input, or, if the answer precedes it, at the start of work."""
    ended = next(
        (line.at(one) for one in line.events if (one.stage, one.event_name) == ("input", "stage_complete")), None
    )
    fired = line.first("policy_fired")
    outputs = [line.at(one) for one in line.events if one.event_name == "first_byte_written"]
    if ended is not None and not (outputs and outputs[0] < ended):
        return ended
    return line.start if fired is None else line.at(fired)


def _written(line: Timeline, modality: str, choose: Callable[[list[int]], int]) -> int | None:
    """When the first or last output of a modality was handed to the socket."""
    numbers = {
        event.metadata.get("chunk_id")
        for event in line.events
        if event.event_name == "stage_stream_chunk_sent" and event.metadata.get("modality") == modality
    }
    times = [
        line.at(event)
        for event in line.events
        if event.event_name == "stage_stream_chunk_received"
        and event.stage == "transport"
        and event.metadata.get("chunk_id") in numbers
    ]
    return choose(times) if times else None


def _since(origin: int, when: int | None) -> float | None:
    return None if when is None else _round((when - origin) / MS)


def _until(line: Timeline, start: Any, name: str) -> float | None:
    times = [line.at(event) for event in line.events if event.event_name == name and line.at(event) >= line.at(start)]
    return _since(line.at(start), min(times, default=None))


def _sum(line: Timeline, name: str, field: str) -> float | None:
    values = [event.metadata.get(field, 0) for event in line.events if event.event_name == name]
    return _round(sum(values)) if values else None


def _relative(line: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "t_rel_ms": _round((line.at(event) - line.start) / MS),
            "stage": event.stage,
            "event_name": event.event_name,
            "timestamp_ns": event.timestamp_ns,
            "metadata": event.metadata,
        }
        for event in line.events
    ]


def _round(value: float) -> float:
    return round(value, 3)
