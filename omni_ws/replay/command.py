"""The command ``omni-ws replay``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import orjson

from omni_ws.caller.answers import Answers, NativeReader, RealtimeReader
from omni_ws.caller.http import HttpCall
from omni_ws.caller.script import AT_ONCE, PATIENCE_SEC, Target
from omni_ws.caller.websocket import WebSocketCall, recorded_answers
from omni_ws.errors import InvalidFrame
from omni_ws.replay.compare import Comparison, Result, as_json, as_text, differences
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

EQUAL: Final = 0
DIFFERENT: Final = 1
#: Also for an unreadable recording.
USAGE_ERROR: Final = 2
#: Of WebSockets, by the kind of the recording.
_READERS: Final = {"websocket": NativeReader, "realtime": RealtimeReader}
#: What shells report for a program that SIGINT ended.
INTERRUPTED: Final = 130


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; return 0 if all answers are the same, 1 if not, 2 for a bad recording or command line."""
    options = _parser().parse_args(arguments)
    try:
        target = Target.parse(options.url, api_key=options.api_key or environ.get("OMNI_WS_API_KEY"))
        recordings = [read_recording(path, incomplete=options.incomplete) for path in options.files]
    except (ValueError, RecordingError) as error:
        print(f"omni-ws replay: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    replaying = replay(
        recordings,
        target,
        options.compare,
        speed=options.speed,
        patience=options.patience,
        copies=options.copies,
    )
    try:
        results = asyncio.run(replaying)
    except KeyboardInterrupt:
        return INTERRUPTED
    print(orjson.dumps(as_json(results)).decode() if options.format == "json" else as_text(results))
    return EQUAL if all(result.is_equal for result in results) else DIFFERENT


async def replay(
    recordings: Sequence[RecordedSession],
    target: Target,
    comparison: Comparison,
    *,
    speed: float = 1.0,
    patience: float = PATIENCE_SEC,
    copies: int = 1,
) -> list[Result]:
    """Replay all recordings concurrently, each ``copies`` times."""
    return await asyncio.gather(
        *(
            _one(recording, copy, target, comparison, speed=speed, patience=patience)
            for copy in range(copies)
            for recording in recordings
        )
    )


async def _one(
    recording: RecordedSession, copy: int, target: Target, comparison: Comparison, *, speed: float, patience: float
) -> Result:
    now: Answers | None = None
    kind, script = recording.header.kind, recording.events
    if (reader := _READERS.get(kind)) is not None:
        then = recorded_answers(script, reader())
        work = WebSocketCall(script, target, reader, speed=speed, patience=patience).run()
    else:
        requests = HttpCall(script, target, is_session=kind == "session", speed=speed, patience=patience)
        then = requests.recorded()
        work = requests.run()
    try:
        now = await work
    except OSError as error:
        return Result(recording.path, copy, then, None, [f"could not be replayed: {_reason(error, target)}"])
    return Result(recording.path, copy, then, now, differences(then, now, comparison))


def _reason(error: OSError, target: Target) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"no server answers at {target.authority}; start one ('make serve'), or choose another with --url"
    return str(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws replay",
        description="Send recorded sessions to a server again, and compare the answers with the recorded ones. "
        "The exit status is 0 if they are the same, 1 if not, 2 if a recording cannot be read.",
        allow_abbrev=False,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recordings (omni-ws serve --record)")
    parser.add_argument("--url", default="ws://127.0.0.1:8080", help="address of the server [%(default)s]")
    parser.add_argument(
        "--speed", type=_speed, default=1.0, help="factor of the recorded speed; max: without pauses [1]"
    )
    parser.add_argument(
        "--copies", type=_count, default=1, metavar="N", help="replay each recording N times concurrently"
    )
    parser.add_argument("--api-key", help="API key [environment variable OMNI_WS_API_KEY]")
    parser.add_argument(
        "--compare",
        type=Comparison,
        choices=[*Comparison],
        default=Comparison.FULL,
        metavar="{" + ",".join(Comparison) + "}",
        help="exact: audio byte by byte; full: audio by length and level; text: no audio; none: nothing [%(default)s]",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="form of the report [%(default)s]")
    parser.add_argument(
        "--patience", type=_seconds, default=15.0, metavar="SEC", help="time-out of each awaited answer [%(default)g]"
    )
    parser.add_argument("--incomplete", action="store_true", help="accept recordings that were cut")
    return parser


def _speed(text: str) -> float:
    return AT_ONCE if text == "max" else _seconds(text)


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < AT_ONCE:
        raise argparse.ArgumentTypeError("must be a number above 0")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be a whole number above 0")
    return number


# A recording that is to be played again: a script for the caller


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
