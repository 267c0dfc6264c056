"""Reads event files, tolerating damaged ones."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

_PATTERN: Final = "events_*.jsonl"
#: Longer lines are invalid.
_MAX_LINE_BYTES: Final = 1 << 20


class NoEvents(Exception):
    """There are no events to report on; the message explains why."""


class ProfileEvent(msgspec.Struct, frozen=True):
    """An event as read back; optional fields depend on its writer."""

    request_id: str
    stage: str
    event_name: str
    timestamp_ns: int
    run_id: str | None = None
    pid: int | None = None
    metadata: dict[str, Any] = {}

    @property
    def monotonic_ns(self) -> int | None:
        """Monotonic time in nanoseconds; None if the writer recorded none."""
        value = self.metadata.get("monotonic_ns")
        return value if type(value) is int else None


@dataclass(slots=True)
class EventFiles:
    """Events of one or more files.

    ``broken`` lists the places of invalid lines: a writer may have been killed within one.
    """

    events: list[ProfileEvent] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

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
        """Returns the events of a run."""
        return [event for event in self.events if (event.run_id or "") == run_id]


def read(paths: Iterable[Path]) -> EventFiles:
    """Reads files, and all event files of folders. Raises NoEvents if there are none."""
    recording = EventFiles()
    paths = list(paths)
    for path in paths:
        if path.is_dir():
            recording.files += sorted(path.glob(_PATTERN))
        elif path.is_file():
            recording.files.append(path)
        else:
            raise NoEvents(f"{path}: no such file or folder")
    if not recording.files:
        raise NoEvents(f"{', '.join(map(str, paths))}: no file {_PATTERN}")
    for path in recording.files:
        _read_file(path, recording)
    if not recording.events:
        broken = f"; {len(recording.broken)} lines are invalid" if recording.broken else ""
        raise NoEvents(f"{', '.join(map(str, recording.files))}: no event{broken}")
    return recording


def _read_file(path: Path, recording: EventFiles) -> None:
    decoder = msgspec.json.Decoder(ProfileEvent)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file), 1):
                try:
                    if line.strip():
                        recording.events.append(decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    recording.broken.append(f"{path}:{number}")
    except OSError as error:
        raise NoEvents(f"{path}: {error.strerror}") from None


def _lines(file: Any) -> Iterator[bytes]:
    while line := file.readline(_MAX_LINE_BYTES):
        yield line
