"""Profiles of a server: reads event files, and shows reports as a table, as a page, and for Perfetto.

Each request's events become a timeline. A report on a run is computed from its timelines: stages, hops, latencies, and
time that no stage accounts for. It is JSON data; each form of output renders the report or the timelines.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from omni_ws.profiler.events import ProfileEvent
from omni_ws.web import folders

#: Name of the row for time that no stage accounts for.
UNACCOUNTED: Final = "(unaccounted)"


def build_report(recording: EventFiles, *, run_id: str | None = None) -> dict[str, Any]:
    """Build the report on a run as JSON data.

    ``run_id`` selects the run; None means the newest. Raises NoEvents if the run does not exist.
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
    """Return the timelines of a run by request id. Raises NoEvents if the run does not exist."""
    return timelines(recording.of_run(_chosen(recording, run_id)))


def _chosen(recording: EventFiles, run_id: str | None) -> str:
    runs = recording.runs
    if run_id is None:
        return next(iter(runs))
    if run_id not in runs:
        raise NoEvents(f"no run {run_id!r}; the runs are {', '.join(map(repr, runs))}")
    return run_id


def stage_breakdown(lines: Iterable[Timeline], unaccounted: Sequence[int]) -> list[dict[str, Any]]:
    """Return statistics by stage and interval in ms, the largest total first; the last row is unaccounted time.

    ``unaccounted`` has the unaccounted time of each request in nanoseconds.
    """
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
    """Return statistics of the hops between stages in ms, the largest total first."""
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
    """Return the figures of one request; a figure is None if it cannot be computed from the recorded events."""
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
    *("end_to_end_ms", "ttft_ms", "ttfa_ms", "rtf", "reorder_wait_ms", "send_stall_ms", "interrupt_ms"),
    *("interrupt_to_engine_free_ms", "unaccounted_ms"),
)


def rollups(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return statistics of each figure in ROLLUPS over ``requests``, which are results of ``summary``."""
    requests = list(requests)
    rows = []
    for name in ROLLUPS:
        values = [request[name] for request in requests if request[name] is not None]
        figures = statistics(values)
        rows.append({"measure": name, **{key.removesuffix("_ms"): value for key, value in figures.items()}})
    return rows


def statistics(values: Iterable[float]) -> dict[str, Any]:
    """Return count, total, average, percentiles and maximum of ``values``.

    Without values, the count is 0, and all else is None.
    """
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
    """Return the percentile of ``ordered`` values at ``share`` (0 to 1), with linear interpolation."""
    position = (len(ordered) - 1) * share
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def _answer_origin(line: Timeline) -> int:
    """Return when the user began to wait: the end of the input or, if output came earlier, the start of work."""
    ended = next(
        (line.at(one) for one in line.events if (one.stage, one.event_name) == ("input", "stage_complete")), None
    )
    fired = line.first("policy_fired")
    outputs = [line.at(one) for one in line.events if one.event_name == "first_byte_written"]
    if ended is not None and not (outputs and outputs[0] < ended):
        return ended
    return line.start if fired is None else line.at(fired)


def _written(line: Timeline, modality: str, choose: Callable[[list[int]], int]) -> int | None:
    """Return the time at which the first or last output of a modality (by ``choose``) was handed to the socket."""
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


def _sum(line: Timeline, name: str, key: str) -> float | None:
    values = [event.metadata.get(key, 0) for event in line.events if event.event_name == name]
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


# Event files

_FILES: Final = "events_*.jsonl"
#: Longer lines are invalid.
_MAX_LINE_BYTES: Final = 1 << 20


class NoEvents(Exception):
    """Raised if there are no events to report on; the message explains why."""


class EventFiles(NamedTuple):
    """The events in some event files.

    ``broken`` lists the places of invalid lines: a writer may have been killed while it wrote a line.
    """

    events: list[ProfileEvent]
    files: list[Path]
    broken: list[str]

    @property
    def runs(self) -> dict[str, int]:
        """Number of events by run, the newest run first."""
        counts: Counter[str] = Counter()
        newest: dict[str, int] = defaultdict(int)
        for event in self.events:
            name = event.run_id or ""
            counts[name] += 1
            newest[name] = max(newest[name], event.timestamp_ns)
        return {name: counts[name] for name in sorted(counts, key=lambda name: -newest[name])}

    def of_run(self, run_id: str) -> list[ProfileEvent]:
        """Return the events of the run ``run_id``."""
        return [event for event in self.events if (event.run_id or "") == run_id]


def read(paths: Iterable[Path]) -> EventFiles:
    """Read event files; ``paths`` may name folders of them. Damaged lines go to ``broken``. Raises NoEvents."""
    paths, files = list(paths), list[Path]()
    for path in paths:
        if path.is_dir():
            files += sorted(path.glob(_FILES))
        elif path.is_file():
            files.append(path)
        else:
            raise NoEvents(f"{path}: no such file or folder")
    if not files:
        raise NoEvents(f"{', '.join(map(str, paths))}: no file {_FILES}")
    recording = EventFiles([], files, [])
    for path in files:
        _read_file(path, recording)
    if not recording.events:
        broken = f"; {len(recording.broken)} lines are invalid" if recording.broken else ""
        raise NoEvents(f"{', '.join(map(str, files))}: no event{broken}")
    return recording


def _read_file(path: Path, recording: EventFiles) -> None:
    decoder = msgspec.json.Decoder(ProfileEvent)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, _MAX_LINE_BYTES), b""), 1):
                try:
                    if line.strip():
                        recording.events.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    recording.broken.append(f"{path}:{number}")
    except OSError as error:
        raise NoEvents(f"{path}: {error.strerror}") from None


# Timelines

#: Pairs of events that start and end an interval of a stage. An event may be in several pairs.
PAIRS: Final = (
    ("stage_input_received", "stage_complete"),
    ("preprocess_start", "preprocess_end"),
    ("encoder_start", "encoder_end"),
    ("scheduler_request_build_start", "scheduler_request_build_end"),
    ("scheduler_request_build_end", "scheduler_queue_enter"),
    ("scheduler_queue_enter", "scheduler_prefill_start"),
    ("scheduler_queue_enter", "scheduler_first_emit"),
    ("scheduler_queue_enter", "generation_end"),
    ("scheduler_prefill_start", "scheduler_prefill_end"),
    ("scheduler_prefill_end", "stage_complete"),
    ("scheduler_prefill_start", "stage_first_stream_chunk_sent"),
    ("scheduler_prefill_start", "scheduler_first_emit"),
    ("scheduler_first_emit", "stage_complete"),
    ("early_work_start", "early_work_end"),
    ("code2wav_decode_start", "code2wav_decode_end"),
    ("model_path_start", "model_path_end"),
)
#: Intervals in which a stage is present, but may be idle: they account for no time.
_PRESENCE: Final = frozenset(
    {
        ("model_path_start", "model_path_end"),
        ("scheduler_first_emit", "stage_complete"),
        ("scheduler_prefill_end", "stage_complete"),
    }
)
#: Events that end a request; the last one counts.
_ENDS: Final = ("terminal_response", "response_written")
MS: Final = 1_000_000


class Interval(NamedTuple):
    """Work of a stage between two events, in nanoseconds of the timeline.

    ``explains`` is False for an interval that does not account for its time, because the stage may have been idle in
    it.
    """

    stage: str
    name: str
    start: int
    end: int
    explains: bool = True

    @property
    def ms(self) -> float:
        return (self.end - self.start) / MS


class Hop(NamedTuple):
    """Transfer from one stage to another; ``kind`` is ``payload`` or ``stream_chunk``."""

    source: str
    target: str
    kind: str
    start: int
    end: int

    @property
    def ms(self) -> float:
        return (self.end - self.start) / MS


class Timeline:
    """Events of one request in order, and the intervals and hops they delimit.

    Times are monotonic if every event has a monotonic time, otherwise times of day.
    """

    def __init__(self, request_id: str, events: Sequence[ProfileEvent]) -> None:
        self.request_id: Final = request_id
        self._is_monotonic = all(event.monotonic_ns is not None for event in events)
        self.events: Final = tuple(sorted(events, key=self.at))

    def at(self, event: ProfileEvent) -> int:
        """Return the time of an event, in nanoseconds."""
        monotonic = event.monotonic_ns if self._is_monotonic else None
        return event.timestamp_ns if monotonic is None else monotonic

    @property
    def start(self) -> int:
        """Time of the first event."""
        return self.at(self.events[0])

    @property
    def end(self) -> int:
        """The end of the request. Events of the engine may come later."""
        ends = [self.at(event) for event in self.events if event.event_name in _ENDS]
        return max(ends, default=self.at(self.events[-1]))

    @property
    def whole(self) -> bool:
        """Whether the start and the end of the request were recorded."""
        names = {event.event_name for event in self.events}
        return "request_admission" in names and not names.isdisjoint(_ENDS)

    def first(self, name: str, **metadata: Any) -> ProfileEvent | None:
        """Return the first event with this name and at least this metadata; None if there is none."""
        for event in self.events:
            if event.event_name == name and metadata.items() <= event.metadata.items():
                return event
        return None

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Intervals in the order of their end. An end belongs to the earliest open start of the same pair and stage."""
        opened: defaultdict[tuple[str, tuple[str, str]], deque[tuple[int, bool]]] = defaultdict(deque)
        found: list[Interval] = []
        for event in self.events:
            now = self.at(event)
            for pair in _CLOSES.get(event.event_name, ()):
                waiting = opened[event.stage, pair]
                if waiting:
                    start, explains = waiting.popleft()
                    name = "->".join(pair)
                    found.append(Interval(event.stage, name, start, now, explains and pair not in _PRESENCE))
            for pair in _OPENS.get(event.event_name, ()):
                opened[event.stage, pair].append((now, not event.metadata.get("resident", False)))
        return tuple(found)

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """Hops in the order of their arrival."""
        sent: defaultdict[tuple[str, str, str, object], deque[int]] = defaultdict(deque)
        found: list[Hop] = []
        for event in self.events:
            now, metadata = self.at(event), event.metadata
            match event.event_name:
                case "stage_hop_sent":
                    sent[event.stage, str(metadata.get("to_stage", "?")), "payload", None].append(now)
                case "stage_stream_chunk_sent":
                    target, number = str(metadata.get("to_stage", "?")), metadata.get("chunk_id")
                    sent[event.stage, target, "stream_chunk", number].append(now)
                case "stage_input_received" | "stage_stream_chunk_received" if "from_stage" in metadata:
                    kind = "payload" if event.event_name == "stage_input_received" else "stream_chunk"
                    number = metadata.get("chunk_id") if kind == "stream_chunk" else None
                    source = str(metadata["from_stage"])
                    waiting = sent[source, event.stage, kind, number]
                    if waiting:
                        found.append(Hop(source, event.stage, kind, waiting.popleft(), now))
        return tuple(found)

    @property
    def unaccounted(self) -> int:
        """Nanoseconds that no interval and no hop accounts for."""
        return sum(end - start for start, end in gaps(self))


def timelines(events: Iterable[ProfileEvent]) -> dict[str, Timeline]:
    """Return the timeline of each request in ``events``, by request id, ordered by their first event."""
    grouped: defaultdict[str, list[ProfileEvent]] = defaultdict(list)
    for event in events:
        if event.request_id:
            grouped[event.request_id].append(event)
    found = [Timeline(request_id, of_one) for request_id, of_one in grouped.items()]
    return {one.request_id: one for one in sorted(found, key=lambda one: one.events[0].timestamp_ns)}


def gaps(line: Timeline) -> list[tuple[int, int]]:
    """Return the spans of a request that no interval and no hop accounts for."""
    spans = [(one.start, one.end) for one in line.intervals if one.explains]
    spans += [(hop.start, hop.end) for hop in line.hops]
    found: list[tuple[int, int]] = []
    reached = line.start
    for start, end in sorted(spans):
        if start >= line.end:
            break
        if start > reached:
            found.append((reached, start))
        reached = max(reached, end)
    if reached < line.end:
        found.append((reached, line.end))
    return found


def _by(position: int) -> dict[str, list[tuple[str, str]]]:
    table: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair in PAIRS:
        table[pair[position]].append(pair)
    return dict(table)


_OPENS: Final = _by(0)
_CLOSES: Final = _by(1)


# As text for a terminal

_FIGURES: Final = ("count", "avg", "p50", "p95", "max")
#: Requests that are listed, the longest first.
MOST_TIMELINES: Final = 20


def as_text(report: Mapping[str, Any]) -> str:
    """Return the report as text for a terminal, with the MOST_TIMELINES longest requests."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield from _head(report)
    yield ""
    yield "Latencies (ms; rtf: a ratio)"
    yield from _table(report["rollups"], ("measure", *_FIGURES))
    yield ""
    yield "Stages (ms)"
    yield from _table(report["stage_breakdown"], ("stage", "interval", *_in_ms(_FIGURES), "total_ms"))
    yield ""
    yield "Hops (ms)"
    yield from _table(report["hop_breakdown"], ("src", "dst", "kind", *_in_ms(_FIGURES)))
    yield ""
    requests = sorted(report["requests"], key=lambda request: -request["end_to_end_ms"])
    shown = f", the {MOST_TIMELINES} longest" if len(requests) > MOST_TIMELINES else ""
    yield f"Requests (ms){shown}"
    columns = ("request_id", "origin", "task", "finish_reason", "end_to_end_ms", "ttft_ms", "ttfa_ms", "unaccounted_ms")
    yield from _table(requests[:MOST_TIMELINES], columns)


def _head(report: Mapping[str, Any]) -> Iterator[str]:
    share = report["accounted_share"]
    yield (
        f"run {report['run_id'] or '(unnamed)'}: {report['request_count']} requests, "
        f"{report['end_to_end_ms']:g} ms in total" + (f", {share:.1%} accounted for" if share is not None else "")
    )
    if report["partial_requests"]:
        yield f"{report['partial_requests']} requests without a recorded start or end are left out of the figures"
    if report["broken_lines"]:
        first = report["broken_lines"][0]
        yield f"{len(report['broken_lines'])} invalid lines, the first at {first}"
    if report["other_runs"]:
        others = ", ".join(f"{name or '(unnamed)'} ({count} events)" for name, count in report["other_runs"].items())
        yield f"other runs (select with --run): {others}"


def _in_ms(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name if name == "count" else f"{name}_ms" for name in names)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Iterator[str]:
    if not rows:
        yield "  (none)"
        return
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    titles = [column.removesuffix("_ms") for column in columns]
    widths = [max(len(title), *(len(row[at]) for row in cells)) for at, title in enumerate(titles)]
    numeric = [all(isinstance(row[column], int | float | None) for row in rows) for column in columns]
    for row in (titles, *cells):
        line = (
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numeric, strict=True)
        )
        yield ("  " + "  ".join(line)).rstrip()


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


# As a self-contained HTML page: a waterfall of each request, and the tables

#: Limits of what is drawn: requests, the longest first, and marks of each.
MOST_REQUESTS: Final = 300
MOST_MARKS: Final = 500
_DATA_PLACE: Final = "/*DATA*/null"
_DRAWING_PLACES: Final = {"/*WATERFALL CSS*/": "waterfall.css", "/*WATERFALL*/": "waterfall.js"}
#: Events that are drawn as the ends of bars.
_SHOWN_AS_BARS: Final = frozenset(
    {"stage_stream_chunk_sent", "stage_stream_chunk_received", *(name for pair in PAIRS for name in pair)}
)


def as_page(report: Mapping[str, Any], lines: Mapping[str, Timeline]) -> str:
    """Return the report as a self-contained HTML page, which draws the MOST_REQUESTS longest requests.

    ``lines`` are the timelines of the same run, by request id.
    """
    template = resources.files("omni_ws.profiler").joinpath("page.html").read_text(encoding="utf-8")
    # The page is one file, so it has what draws waterfalls on all pages within it.
    drawing = folders()[0].joinpath("calls")
    for place, name in _DRAWING_PLACES.items():
        template = template.replace(place, drawing.joinpath(name).read_text(encoding="utf-8"), 1)
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
    return template.replace(_DATA_PLACE, msgspec.json.encode(data).decode().replace("<", "\\u003c"), 1)


def _drawing(line: Timeline, origin: int) -> dict[str, Any]:
    """Convert a timeline to the data that the page draws, in milliseconds since the start of the request."""

    def ms(when: int) -> float:
        return round((when - line.start) / MS, 3)

    marks = [
        [event.stage, event.event_name, ms(line.at(event)), _shown_metadata(event.metadata)]
        for event in line.events
        if event.event_name not in _SHOWN_AS_BARS
    ]
    return {
        "begin_ms": round((line.events[0].timestamp_ns - origin) / MS, 3),
        "spans": [[one.stage, one.name, ms(one.start), ms(one.end), one.explains] for one in line.intervals]
        + [[hop.target, f"from {hop.source}", ms(hop.start), ms(hop.end), True] for hop in line.hops],
        "marks": marks[:MOST_MARKS],
        "marks_left_out": max(0, len(marks) - MOST_MARKS),
    }


def _shown_metadata(metadata: Mapping[str, Any]) -> str:
    shown = (
        f"{name}: {_short(value)}" for name, value in metadata.items() if name != "monotonic_ns" and value is not None
    )
    return ", ".join(shown)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)[:80]


# As a trace for Perfetto and chrome://tracing

#: Maximum number of threads of a stage, for intervals that overlap without being nested.
_LANES: Final = 64


def as_trace(lines: Iterable[Timeline]) -> dict[str, Any]:
    """Build the JSON object of the Trace Event Format.

    Each request is a process, each stage a thread. Times are in microseconds.
    """
    lines = list(lines)
    # Monotonic clocks of processes are not comparable, so requests are placed by the time of day of their first event.
    origin = min((line.events[0].timestamp_ns for line in lines), default=0)
    events = [event for number, line in enumerate(lines, 1) for event in _trace_of(number, line, origin)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _trace_of(process: int, line: Timeline, origin: int) -> Iterator[dict[str, Any]]:
    def microseconds(when: int) -> float:
        return (line.events[0].timestamp_ns - origin + when - line.start) / 1000

    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": line.request_id}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    threads: dict[str, int] = {}
    stages = dict.fromkeys(event.stage for event in line.events)
    for number, stage in enumerate(stages):
        threads[stage] = number * _LANES
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": threads[stage], "args": {"name": stage}}
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
    """Assign intervals to threads, so that the slices of a thread are disjoint or nested."""
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
