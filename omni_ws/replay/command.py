"""The command ``omni-ws replay``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import orjson

from omni_ws.caller.answers import Answers, NativeReader, RealtimeReader
from omni_ws.caller.http import HttpCall
from omni_ws.caller.script import AT_ONCE, Pace, Target
from omni_ws.caller.websocket import WebSocketCall, recorded_answers
from omni_ws.replay.compare import Comparison, Result, as_json, as_text, differences
from omni_ws.replay.recording import RecordedSession, RecordingError, read_recording

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
    pace = Pace(speed=options.speed, patience=options.patience)
    try:
        results = asyncio.run(replay(recordings, target, pace, copies=options.copies, comparison=options.compare))
    except KeyboardInterrupt:
        return INTERRUPTED
    print(orjson.dumps(as_json(results)).decode() if options.format == "json" else as_text(results))
    return EQUAL if all(result.is_equal for result in results) else DIFFERENT


async def replay(
    recordings: Sequence[RecordedSession], target: Target, pace: Pace, *, copies: int = 1, comparison: Comparison
) -> list[Result]:
    """Replay all recordings concurrently, each ``copies`` times."""
    return await asyncio.gather(
        *(_one(recording, copy, target, pace, comparison) for copy in range(copies) for recording in recordings)
    )


async def _one(recording: RecordedSession, copy: int, target: Target, pace: Pace, comparison: Comparison) -> Result:
    now: Answers | None = None
    kind, script = recording.header.kind, recording.events
    if (reader := _READERS.get(kind)) is not None:
        then = recorded_answers(script, reader())
        work = WebSocketCall(script, target, pace, reader).run()
    else:
        requests = HttpCall(script, target, pace, is_session=kind == "session")
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
