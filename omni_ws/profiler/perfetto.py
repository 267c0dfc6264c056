"""Renders timelines as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from omni_ws.profiler.timeline import Interval, Timeline

#: Maximum number of threads of a stage, for intervals that overlap without being nested.
_LANES: Final = 64


def as_trace(lines: Iterable[Timeline]) -> dict[str, Any]:
    """Builds the JSON object of the Trace Event Format.

    Each request is a process, each stage a thread. Times are in microseconds.
    """
    lines = list(lines)
    # Monotonic clocks of processes are not comparable, so requests are placed by the time of day of their first event.
    origin = min((line.events[0].timestamp_ns for line in lines), default=0)
    events = [event for number, line in enumerate(lines, 1) for event in _request(number, line, origin)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _request(process: int, line: Timeline, origin: int) -> Iterator[dict[str, Any]]:
    def microseconds(when: int) -> float:
        return (line.events[0].timestamp_ns - origin + when - line.start) / 1000

    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": line.request_id}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    threads: dict[str, int] = {}
    stages = dict.fromkeys(event.stage for event in line.events)
    for number, stage in enumerate(stages):
        threads[stage] = number * _LANES
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": threads[stage],
            "args": {"name": stage},
        }
    for lane, interval in _in_lanes(line.intervals):
        yield {
            "ph": "X",
            "name": interval.name,
            "cat": "stage" if interval.explains else "presence",
            "pid": process,
            "tid": threads[interval.stage] + lane,
            "ts": microseconds(interval.start),
            "dur": (interval.end - interval.start) / 1000,
        }
    for event in line.events:
        yield {
            "ph": "i",
            "s": "t",
            "name": event.event_name,
            "pid": process,
            "tid": threads[event.stage],
            "ts": microseconds(line.at(event)),
            "args": event.metadata,
        }


def _in_lanes(intervals: Iterable[Interval]) -> Iterator[tuple[int, Interval]]:
    """Assigns intervals to threads, whose slices must be disjoint or nested."""
    ends: dict[tuple[str, int], list[int]] = {}
    for interval in sorted(intervals, key=lambda one: (one.start, -one.end)):
        for lane in range(_LANES):
            around = ends.setdefault((interval.stage, lane), [])
            while around and around[-1] <= interval.start:
                around.pop()
            if not around or interval.end <= around[-1] or lane == _LANES - 1:
                around.append(interval.end)
                yield lane, interval
                break
