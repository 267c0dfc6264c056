"""Renders a report as a self-contained HTML page: a waterfall of each request, and the tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

from omni_ws.profiler.report import UNACCOUNTED
from omni_ws.profiler.timeline import MS, PAIRS, Timeline, gaps

#: Limits of what is drawn: requests, the longest first, and marks of each.
MOST_REQUESTS: Final = 300
MOST_MARKS: Final = 500
_PLACE: Final = "/*DATA*/null"
#: Events that are drawn as the ends of bars.
_SHOWN_AS_BARS: Final = frozenset(
    {"stage_stream_chunk_sent", "stage_stream_chunk_received", *(name for pair in PAIRS for name in pair)}
)


def as_page(report: Mapping[str, Any], lines: Mapping[str, Timeline]) -> str:
    """Renders the page."""
    template = resources.files("omni_ws.profiler").joinpath("page.html").read_text(encoding="utf-8")
    requests = sorted(report["requests"], key=lambda request: -request["end_to_end_ms"])[:MOST_REQUESTS]
    origin = min((line.events[0].timestamp_ns for line in lines.values()), default=0)
    drawn = [{**request, **_drawing(lines[request["request_id"]], origin)} for request in requests]
    drawn.sort(key=lambda request: request["begin_ms"])
    keys = ("run_id", "other_runs", "request_count", "partial_requests", "end_to_end_ms", "accounted_share")
    data = {key: report[key] for key in keys} | {
        "broken_lines": len(report["broken_lines"]),
        "rollups": report["rollups"],
        "stages": report["stage_breakdown"],
        "hops": report["hop_breakdown"],
        "requests": drawn,
        "unaccounted": UNACCOUNTED,
    }
    # Escapes "<", so that no text of an event can end the script element.
    return template.replace(_PLACE, json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"), 1)


def _drawing(line: Timeline, origin: int) -> dict[str, Any]:
    """Converts a timeline to what the page draws, in milliseconds since the start of the request."""

    def ms(when: int) -> float:
        return round((when - line.start) / MS, 3)

    marks = [
        [event.stage, event.event_name, ms(line.at(event)), _metadata(event.metadata)]
        for event in line.events
        if event.event_name not in _SHOWN_AS_BARS
    ]
    return {
        "begin_ms": round((line.events[0].timestamp_ns - origin) / MS, 3),
        "spans": [[one.stage, one.name, ms(one.start), ms(one.end), one.explains] for one in line.intervals]
        + [[hop.target, f"from {hop.source}", ms(hop.start), ms(hop.end), True] for hop in line.hops],
        "gaps": [[ms(start), ms(end)] for start, end in gaps(line)],
        "marks": marks[:MOST_MARKS],
        "marks_left_out": max(0, len(marks) - MOST_MARKS),
    }


def _metadata(metadata: Mapping[str, Any]) -> str:
    shown = (
        f"{name}: {_short(value)}" for name, value in metadata.items() if name != "monotonic_ns" and value is not None
    )
    return ", ".join(shown)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:80]
