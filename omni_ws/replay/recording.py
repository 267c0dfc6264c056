"""A recording that is to be played again: a script for the caller."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from omni_ws.errors import InvalidFrame
from omni_ws.wire.recording import (
    CutLine,
    EndedLine,
    HeaderLine,
    OpenedLine,
    RecordedLine,
    RequestedLine,
    SentLine,
    decode_event,
    decode_header,
)
from omni_ws.wire.server_frames import ServerFrame, decode_server_frame


class RecordingError(Exception):
    """The recording is unusable; the message names file and line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A recording in memory."""

    path: Path
    header: HeaderLine
    events: tuple[RecordedLine, ...]


def read_recording(path: Path, *, incomplete: bool = False) -> RecordedSession:
    """Read and check a recording.

    ``incomplete`` accepts one that was cut. Raises RecordingError.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordingError(path, 0, error.strerror or "cannot be read") from None
    unfinished = lines.pop()  # empty if the last line is complete
    if not lines:
        raise RecordingError(path, 1, "empty, or not a recording")
    header = _decoded(decode_header, path, 1, lines[0])
    if not header.payloads:
        raise RecordingError(path, 1, "recorded without payloads (record_payloads = false), so it cannot be replayed")
    if header.kind == "telephony":
        raise RecordingError(path, 1, "a telephone call, which cannot be replayed")
    events: list[RecordedLine] = []
    connections = 0
    for number, line in enumerate(lines[1:], start=2):
        if events and isinstance(events[-1], EndedLine | CutLine):
            raise RecordingError(path, number, "a line after the end")
        event = _decoded(decode_event, path, number, line)
        connections = _checked(event, connections, path, number)
        if isinstance(event, SentLine) and event.text is not None and header.kind == "websocket":
            _decoded(_server_frame, path, number, event.text.encode())
        events.append(event)
    end = len(lines) + 1
    if unfinished and not incomplete:
        raise RecordingError(path, end, "the recording breaks off within this line")
    if events and isinstance(events[-1], CutLine) and not incomplete:
        raise RecordingError(path, end - 1, f"the recording was cut here: {events[-1].reason} (see --incomplete)")
    if (not events or not isinstance(events[-1], EndedLine | CutLine)) and not incomplete:
        raise RecordingError(path, end, "the recording has no end: it was interrupted, or is still being written")
    if not any(isinstance(event, OpenedLine | RequestedLine) for event in events):
        raise RecordingError(path, end, "the recording has no connection")
    return RecordedSession(path, header, tuple(event for event in events if not isinstance(event, CutLine | EndedLine)))


_Decoded = TypeVar("_Decoded")


def _decoded(decode: Callable[[bytes], _Decoded], path: Path, number: int, line: bytes) -> _Decoded:
    try:
        return decode(line)
    except ValueError as error:
        raise RecordingError(path, number, str(error)) from None


def _server_frame(data: bytes) -> ServerFrame:
    try:
        return decode_server_frame(data)
    except InvalidFrame as error:
        raise ValueError(f"not a frame of a server: {error.message}") from None


def _checked(event: RecordedLine, connections: int, path: Path, number: int) -> int:
    """Check the connection number of an event; return the number of connections so far."""
    if isinstance(event, OpenedLine | RequestedLine):
        if event.connection != connections:
            raise RecordingError(path, number, f"connection {event.connection} where {connections} is next")
        return connections + 1
    if not isinstance(event, CutLine | EndedLine) and event.connection >= connections:
        raise RecordingError(path, number, f"no connection {event.connection}")
    return connections
