"""Timeline of a request: its events in order, and the intervals and hops they delimit."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

from omni_ws.profiler.reading import ProfileEvent

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

    ``explains`` is False for an interval that accounts for no time: the stage is present, but not necessarily at
    work.
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


@dataclass(frozen=True)
class Timeline:
    """Events of one request.

    Times are monotonic if every event has a monotonic time, otherwise times of day.
    """

    request_id: str
    events: tuple[ProfileEvent, ...]

    @classmethod
    def of(cls, request_id: str, events: Sequence[ProfileEvent]) -> Timeline:
        """Sorts the events of a request."""
        clock = _monotonic if all(event.monotonic_ns is not None for event in events) else _wall
        return cls(request_id, tuple(sorted(events, key=clock)))

    @cached_property
    def _is_monotonic(self) -> bool:
        return all(event.monotonic_ns is not None for event in self.events)

    def at(self, event: ProfileEvent) -> int:
        """Time of an event, in nanoseconds."""
        return _monotonic(event) if self._is_monotonic else _wall(event)

    @property
    def start(self) -> int:
        """Time of the first event."""
        return self.at(self.events[0])

    @property
    def end(self) -> int:
        """End of the request; events of the engine may follow it."""
        ends = [self.at(event) for event in self.events if event.event_name in _ENDS]
        return max(ends, default=self.at(self.events[-1]))

    @property
    def whole(self) -> bool:
        """Whether the start and the end of the request were recorded."""
        names = {event.event_name for event in self.events}
        return "request_admission" in names and not names.isdisjoint(_ENDS)

    def first(self, name: str, **metadata: Any) -> ProfileEvent | None:
        """Returns the first event with this name and this metadata."""
        for event in self.events:
            if event.event_name == name and metadata.items() <= event.metadata.items():
                return event
        return None

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """Intervals in the order of their end. An end belongs to the earliest open start of its pair and stage."""
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
    """Groups events by request, ordered by their first event."""
    grouped: defaultdict[str, list[ProfileEvent]] = defaultdict(list)
    for event in events:
        if event.request_id:
            grouped[event.request_id].append(event)
    found = [Timeline.of(request_id, of_one) for request_id, of_one in grouped.items()]
    return {one.request_id: one for one in sorted(found, key=lambda one: one.events[0].timestamp_ns)}


def gaps(line: Timeline) -> list[tuple[int, int]]:
    """Returns the spans of a request that no interval and no hop accounts for."""
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


def _monotonic(event: ProfileEvent) -> int:
    assert event.monotonic_ns is not None
    return event.monotonic_ns


def _wall(event: ProfileEvent) -> int:
    return event.timestamp_ns


def _by(position: int) -> dict[str, list[tuple[str, str]]]:
    table: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair in PAIRS:
        table[pair[position]].append(pair)
    return dict(table)


_OPENS: Final = _by(0)
_CLOSES: Final = _by(1)
