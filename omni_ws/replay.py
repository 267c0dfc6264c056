"""The command ``omni-ws replay``: replays recordings against a server, and compares the answers."""

from __future__ import annotations

import argparse
import asyncio
import base64
import math
import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
import orjson
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.pcm import Samples
from omni_ws.caller.answers import Answers, NativeReader, RealtimeReader, TimedAnswer, parsed
from omni_ws.caller.script import (
    AT_ONCE,
    ORDERLY_CLOSE_CODES,
    PATIENCE_SEC,
    HttpCall,
    Target,
    WebSocketCall,
    above_zero,
    count,
    recorded_answers,
)
from omni_ws.calls.forking import ANSWER_RATE, SPOKEN_RATE, ForkPoint, fork_point, heard_text
from omni_ws.calls.lines import CallLines
from omni_ws.calls.reading import CallReading
from omni_ws.cli import INTERRUPTED, USAGE_ERROR
from omni_ws.client.audio import Pcm16, paced, pieces, write_wav
from omni_ws.core.chunks import AudioFormat
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.scenarios.servers import NoServer, own_server
from omni_ws.talk.display import printable
from omni_ws.wire.openai_requests import FIELD
from omni_ws.wire.recording import (
    BesideLine,
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

_PATH: Final = "/v1/streaming_input"
_PIECE_MS: Final = 100
_LEAST_COLUMN: Final = 20


class ForkFailed(Exception):
    """Raised if the server refuses the turn, or does not answer."""


def read_point(path: Path, number: int, changes: Mapping[str, Any]) -> ForkPoint:
    """Return turn ``number`` (from 1) of a recording, with ``changes`` merged into its configuration.

    Raises OSError, ValueError for a file that is no recording of a call, and InvalidRequest for a turn that cannot be
    forked.
    """
    return fork_point(CallReading(CallLines(path)), number, changes)


async def answered(
    point: ForkPoint, target: Target, serve: Sequence[str] | None, *, speed: float, patience: float
) -> TimedAnswer:
    """Return the answer of the server at ``target`` or, with ``serve``, of a server started with these arguments.

    The sound is sent at ``speed`` times the pace of speech. ``patience`` is the longest silence of the server in
    seconds. Raises ForkFailed, NoServer and OSError.
    """
    if serve is None:
        return await _ask(point, target, speed=speed, patience=patience)
    async with own_server({}, serve) as authority:
        started = Target.parse(f"ws://{authority}", api_key=target.api_key)
        return await _ask(point, started, speed=speed, patience=patience)


async def _ask(point: ForkPoint, target: Target, *, speed: float, patience: float) -> TimedAnswer:
    try:
        async with target.websocket(_PATH) as connection:
            return await _Asking(point, connection, speed=speed, patience=patience).run()
    except ConnectionClosed as error:
        raise ForkFailed(f"the server closed the session: {error}") from None
    except InvalidHandshake as error:
        raise ForkFailed(f"the server refuses the session: {error}") from None


class _Asking:
    """One turn of a call, sent to a connected server, up to its answer."""

    def __init__(self, point: ForkPoint, connection: ClientConnection, *, speed: float, patience: float) -> None:
        self._point = point
        self._connection = connection
        self._speed = speed
        self._patience = patience
        self._reader = NativeReader()
        self._acknowledged = -1

    async def run(self) -> TimedAnswer:
        await self._send({"type": "session_config", **self._point.config, FIELD: self._point.history})
        while not self._reader.configured:
            await self._hear()
        speaking = asyncio.create_task(self._speak(), name="a turn that is said again")
        try:
            while not (answers := self._reader.found.answers) or answers[0].finish_reason is None:
                # While the turn is being said the server has nothing to say.
                await self._hear(patience=None if not speaking.done() else self._patience)
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
        answer = answers[0]
        if answer.finish_reason == "error":
            raise ForkFailed(f"the answer failed: {', '.join(answer.error_codes)}")
        return answer

    async def _send(self, frame: dict[str, Any]) -> None:
        message = orjson.dumps(frame).decode()
        self._reader.asked(self._now, message)
        await self._connection.send(message)

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    async def _hear(self, patience: float | None = 0.0) -> None:
        """Receive one message, and acknowledge output.

        Raises ForkFailed for an error of the server, and for silence of more than ``patience`` seconds; None: any
        silence is accepted; 0: the patience of the constructor.
        """
        limit = self._patience if patience == 0.0 else patience
        try:
            async with asyncio.timeout(limit):
                message = await self._connection.recv()
        except TimeoutError:
            raise ForkFailed(f"the server said nothing for {limit:g} s") from None
        self._reader.heard(self._now, message)
        frame = {} if isinstance(message, bytes) else parsed(message)
        if frame.get("type") == "error" and isinstance(error := frame.get("error"), dict):
            place = f" ({error['param']})" if error.get("param") else ""
            raise ForkFailed(f"the server refuses it: {error.get('code')}{place}: {error.get('message')}")
        if self._reader.highest > self._acknowledged:
            self._acknowledged = self._reader.highest
            await self._send({"type": "output_ack", "sequence_id": self._acknowledged})

    async def _speak(self) -> None:
        """Send the turn: the text in one piece, then the sound at ``speed`` times the pace of speech."""
        point, number = self._point, 0
        if point.text:
            await self._send({"type": "input_chunk", "sequence_id": number, "text": point.text})
            number += 1
        spoken = pieces(Pcm16(point.sound, SPOKEN_RATE), piece_ms=_PIECE_MS)
        async with aclosing(paced(spoken, interval=_PIECE_MS / 1000 / self._speed)) as microphone:
            async for piece in microphone:
                payload = base64.b64encode(piece).decode()
                chunk = {"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}
                await self._send(chunk)
                number += 1
        await self._send({"type": "finish"})


def fork_as_json(point: ForkPoint, answer: TimedAnswer) -> str:
    """Return the recorded and the new answer as one line of JSON."""
    return orjson.dumps(
        {
            "user": {"text": point.turn["user"]["text"], "typed": point.text, "heard": answer.heard},
            "history_items": len(point.history),
            "recorded": {
                "text": heard_text(point.turn["answer"]),
                "tool_calls": _calls_recorded(point),
                "audio_ms": _sound_ms(point.answer),
            },
            "now": {"text": answer.text, "tool_calls": answer.tool_calls, "audio_ms": _sound_ms(answer.sound)},
        }
    ).decode()


def fork_as_text(point: ForkPoint, answer: TimedAnswer) -> str:
    """Return the recorded and the new answer in two columns, as wide as the terminal."""
    width = max(_LEAST_COLUMN, (shutil.get_terminal_size().columns - 3) // 2)
    user = point.turn["user"]
    columns = [
        [
            title,
            "-" * len(title),
            *textwrap.wrap(f"{text} {calls}".strip() or "(no words)", width),
            f"{ms / 1000:.1f} s",
        ]
        for title, text, calls, ms in (
            ("Recorded", heard_text(point.turn["answer"]), _calls_recorded(point), _sound_ms(point.answer)),
            ("Now", answer.text, answer.tool_calls, _sound_ms(answer.sound)),
        )
    ]
    lines = [f"{left:<{width}} | {right}".rstrip() for left, right in zip_longest(*columns, fillvalue="")]
    asked = " ".join(filter(None, (user.get("typed"), user["text"]))) or "(no words)"
    return printable("\n".join([*textwrap.wrap(f"User: {asked}", 2 * width + 3), "", *lines]))


def _calls_recorded(point: ForkPoint) -> str:
    return "".join(f"{call['name']}{call['arguments']}" for call in point.turn["tools"])


def _sound_ms(sound: bytes) -> float:
    return round(len(sound) * 1000 / (2 * ANSWER_RATE), 1)


def save(point: ForkPoint, answer: TimedAnswer, folder: Path, *, number: int) -> None:
    """Write the sound of both answers to ``folder`` as ``turn-N-recorded.wav`` and ``turn-N-now.wav``.

    The folder is made if needed. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, sound in (("recorded", point.answer), ("now", answer.sound)):
        write_wav(folder / f"turn-{number}-{name}.wav", Pcm16(sound, ANSWER_RATE))


EQUAL: Final = 0
DIFFERENT: Final = 1
DEFAULT_URL: Final = "ws://127.0.0.1:8080"
#: The options that go with --from-turn.
_OF_FORKS: Final = ("instructions", "voice", "llm", "serve_args", "save")
#: The readers of WebSocket sessions, by the kind of the recording.
_READERS: Final = {"websocket": NativeReader, "realtime": RealtimeReader}
#: What the recordings of other kinds are of.
_NOT_REPLAYED: Final = {
    "live": "a session of the Live API",
    "telephony": "a telephone call",
    "webrtc": "a call over WebRTC",
    "wyoming": "a session over Wyoming",
}


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command; return 0 if all answers are the same, 1 if not, 2 for a bad recording or command line.

    With ``--from-turn``, return 0 if there is a new answer, 1 if not. After ^C, return 130. Raises SystemExit for
    ``--help`` and for options that cannot be parsed.
    """
    options = _parser().parse_args(arguments)
    if options.from_turn is not None:
        return _fork(options, environ)
    if given := [f"--{name.replace('_', '-')}" for name in _OF_FORKS if getattr(options, name) is not None]:
        print(f"omni-ws replay: error: {given[0]} goes with --from-turn", file=sys.stderr)
        return USAGE_ERROR
    try:
        target = Target.parse(options.url or DEFAULT_URL, api_key=options.api_key or environ.get("OMNI_WS_API_KEY"))
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
    """Replay all recordings concurrently, each ``copies`` times; return a Result for each.

    ``speed`` and ``patience`` are those of Timetable. If a recording cannot be replayed, ``now`` of its Result is None.
    """
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
    parser.add_argument("--url", help=f"address of the server [{DEFAULT_URL}]")
    parser.add_argument(
        "--speed", type=_speed, default=1.0, help="factor of the recorded speed; max: without pauses [1]"
    )
    parser.add_argument(
        "--copies", type=count, default=1, metavar="N", help="replay each recording N times concurrently"
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
        "--patience", type=above_zero, default=15.0, metavar="SEC", help="time-out of each awaited answer [%(default)g]"
    )
    parser.add_argument("--incomplete", action="store_true", help="accept recordings that were cut")
    fork = parser.add_argument_group(
        "another answer", "Go on from one turn of one recorded call with something else, and print both answers."
    )
    fork.add_argument("--from-turn", type=count, metavar="N", help="the turn that is answered again, from 1")
    fork.add_argument("--instructions", metavar="TEXT", help="other instructions [those of the recording]")
    fork.add_argument("--voice", metavar="NAME", help="another voice [that of the recording]")
    fork.add_argument("--llm", metavar="NAME", help="start a server with this model, instead of --url")
    fork.add_argument("--serve-args", metavar="ARGS", help="start a server with these arguments, instead of --url")
    fork.add_argument("--save", type=Path, metavar="DIR", help="write the sound of both answers there, as WAV")
    return parser


def _fork(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    """Send one turn of a recorded call again, and print both answers.

    Return EQUAL, DIFFERENT if the turn failed, USAGE_ERROR, or INTERRUPTED.
    """
    serve = None
    try:
        if len(options.files) != 1:
            raise ValueError("--from-turn takes one recording")
        if options.llm is not None or options.serve_args is not None:
            if options.url is not None:
                raise ValueError("--url is a server that runs; --llm and --serve-args are for one that is started")
            serve = shlex.split(options.serve_args or "")
            serve = serve if options.llm is None else [f"--llm={options.llm}", *serve]
        key = options.api_key or environ.get("OMNI_WS_API_KEY")
        target = Target.parse(options.url or DEFAULT_URL, api_key=key)
        changes = {name: getattr(options, name) for name in ("instructions", "voice")}
        changes = {name: value for name, value in changes.items() if value is not None}
        point = read_point(options.files[0], options.from_turn, changes)
    except (ValueError, OSError, OmniError) as error:
        print(f"omni-ws replay: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    try:
        answer = asyncio.run(answered(point, target, serve, speed=options.speed, patience=options.patience))
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        print(f"omni-ws replay: {_reason(error, target)}", file=sys.stderr)
        return DIFFERENT
    except (ForkFailed, NoServer) as error:
        print(f"omni-ws replay: {error}", file=sys.stderr)
        return DIFFERENT
    print(fork_as_json(point, answer) if options.format == "json" else fork_as_text(point, answer))
    try:
        if options.save is not None:
            save(point, answer, options.save, number=options.from_turn)
    except OSError as error:
        print(f"omni-ws replay: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    return EQUAL


def _speed(text: str) -> float:
    return AT_ONCE if text == "max" else above_zero(text)


# Recordings


class RecordingError(Exception):
    """Raised if a recording is unusable; the message names the file and, if it can be read, the line."""

    def __init__(self, path: Path, line: int, problem: str) -> None:
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """A recording in memory, as the script of a replay."""

    path: Path
    header: HeaderLine
    events: tuple[RecordedLine, ...]


def read_recording(path: Path, *, incomplete: bool = False) -> RecordedSession:
    """Read a recording and check that it can be replayed.

    ``incomplete`` accepts a recording that was cut off. Raises RecordingError.
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
    if (what := _NOT_REPLAYED.get(header.kind)) is not None:
        raise RecordingError(path, 1, f"{what}, which cannot be replayed")
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
    return RecordedSession(
        path, header, tuple(event for event in events if not isinstance(event, CutLine | EndedLine | BesideLine))
    )


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
    if isinstance(event, CutLine | EndedLine | BesideLine):
        return connections
    if event.connection >= connections:
        raise RecordingError(path, number, f"no connection {event.connection}")
    return connections


# Comparison of the recorded with the replayed answers

#: The tolerances for synthesised audio of the same text.
LENGTH_TOLERANCE_MS: Final = 100.0
LENGTH_TOLERANCE: Final = 0.05
LEVEL_TOLERANCE_DB: Final = 1.5

#: The level of digital silence.
_SILENCE_DB: Final = -100.0
#: The characters of a text that a report shows.
_SHOWN: Final = 60


class Comparison(StrEnum):
    """The strictness with which answers are compared."""

    #: Compares audio byte by byte.
    EXACT = "exact"
    #: Compares audio by its length and level.
    FULL = "full"
    #: Ignores audio: for another voice or engine.
    TEXT = "text"
    NONE = "none"


def differences(then: Answers, now: Answers, comparison: Comparison) -> list[str]:
    """Describe the differences between the answers of two sessions; empty if they are the same.

    ``comparison`` sets what is compared; with NONE the result is empty.
    """
    if comparison is Comparison.NONE:
        return []
    found: list[str] = []
    if len(then.answers) != len(now.answers):
        found.append(f"answers: {len(then.answers)} recorded, {len(now.answers)} replayed")
    for place, (old, new) in enumerate(zip(then.answers, now.answers, strict=False)):
        found += [f"answer {place}: {difference}" for difference in _differences(old, new, comparison)]
    if then.errors != now.errors:
        found.append(f"errors: {_names(then.errors)} recorded, {_names(now.errors)} replayed")
    for number, (was, is_) in enumerate(zip(then.ends, now.ends, strict=False)):
        ended = {end for end in (was, is_) if end.startswith("server")}
        if was != is_ and ended and not any(int(end.split()[1]) in ORDERLY_CLOSE_CODES for end in ended):
            found.append(f"end of connection {number}: {was} recorded, {is_} replayed")
    return found


def _differences(old: TimedAnswer, new: TimedAnswer, comparison: Comparison) -> Iterator[str]:
    # The length of an answer that was cut short depends on timing.
    partial = old.is_partial and (new.is_partial or old.finish_reason is None)
    if old.finish_reason is not None and old.finish_reason != new.finish_reason:
        yield f"finish_reason: {old.finish_reason} recorded, {new.finish_reason} replayed"
    if old.error_codes != new.error_codes:
        yield f"errors: {_names(old.error_codes)} recorded, {_names(new.error_codes)} replayed"
    for name, was, is_ in (
        ("text", old.text, new.text),
        ("transcript", old.heard, new.heard),
        ("tool_calls", old.tool_calls, new.tool_calls),
    ):
        if not (_agree(was, is_) if partial else was == is_):
            yield f"{name}: {_shown(was)} recorded, {_shown(is_)} replayed"
    if comparison is not Comparison.TEXT and not same_audio(old, new, partial=partial):
        yield from _audio_differences(old, new, exact=comparison is Comparison.EXACT, partial=partial)


def same_audio(old: TimedAnswer, new: TimedAnswer, *, partial: bool = False) -> bool:
    """Return whether the audio is the same, byte by byte; if ``partial``, up to the end of the shorter one."""
    was, is_ = old.sound, new.sound
    size = min(len(was), len(is_)) if partial else None
    return old.format == new.format and was[:size] == is_[:size]


def _audio_differences(old: TimedAnswer, new: TimedAnswer, *, exact: bool, partial: bool) -> Iterator[str]:
    if exact:
        yield f"audio: {len(old.sound)} bytes recorded, {len(new.sound)} different bytes replayed"
        return
    if partial:
        return  # different lengths have different levels
    try:
        was, is_ = _samples(old), _samples(new)
    except OmniError as error:
        yield f"audio: cannot be decoded: {error.message}"
        return
    then_ms, now_ms = _length_ms(old, was), _length_ms(new, is_)
    if abs(then_ms - now_ms) > max(LENGTH_TOLERANCE_MS, LENGTH_TOLERANCE * then_ms):
        yield f"audio: {then_ms:.0f} ms recorded, {now_ms:.0f} ms replayed"
    elif abs(level_db(was) - level_db(is_)) > LEVEL_TOLERANCE_DB:
        yield f"audio level: {level_db(was):.1f} dB recorded, {level_db(is_):.1f} dB replayed"


def _samples(answer: TimedAnswer) -> Samples:
    """Decode the audio of an answer at its own rate. Raises OmniError."""
    source = answer.audio_format or AudioFormat()
    with AudioDecoder(source, sample_rate=source.sample_rate) as decoder:
        return np.concatenate([*decoder.pieces(answer.sound), decoder.flush()])


def _length_ms(answer: TimedAnswer, samples: Samples) -> float:
    return len(samples) * 1000 / (answer.audio_format or AudioFormat()).sample_rate


def level_db(samples: Samples) -> float:
    """Return the RMS level in dB relative to full scale, at least that of digital silence (-100)."""
    power = float(np.mean(np.square(samples, dtype=np.float64))) if len(samples) else 0.0
    return max(_SILENCE_DB, 10 * math.log10(power)) if power > 0 else _SILENCE_DB


def _agree(was: str, is_: str) -> bool:
    return was.startswith(is_) or is_.startswith(was)


def _names(errors: list[str]) -> str:
    return ", ".join(errors) or "none"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


# The report, as text and as JSON

_Moment: TypeAlias = Callable[[TimedAnswer], float | None]
_MOMENTS: Final[tuple[tuple[str, str, _Moment], ...]] = (
    ("first output", "first_output_ms", lambda answer: answer.first_output_at),
    ("first audio", "first_audio_ms", lambda answer: answer.first_audio_at),
    ("final", "final_ms", lambda answer: answer.final_at),
)
#: Up to so many sessions are all listed; of more, only those that differ.
_MAX_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one replayed session. ``now`` is None if the session could not be replayed."""

    path: Path
    copy: int
    then: Answers
    now: Answers | None
    differences: Sequence[str]

    @property
    def is_equal(self) -> bool:
        return self.now is not None and not self.differences

    def pairs(self) -> Iterator[tuple[TimedAnswer, TimedAnswer]]:
        """Yield each recorded answer with the replayed one, as long as both exist."""
        yield from zip(self.then.answers, self.now.answers if self.now else (), strict=False)


def as_text(results: Sequence[Result]) -> str:
    """Format the report for a terminal."""
    lines: list[str] = []
    for result in results:
        if len(results) <= _MAX_LISTED or not result.is_equal:
            lines += _session(result, in_detail=len(results) <= _MAX_LISTED)
    equal = sum(result.is_equal for result in results)
    lines.append(f"{len(results)} sessions replayed: {equal} equal, {len(results) - equal} different")
    lines += _summary(results)
    return "\n".join(lines)


def _session(result: Result, *, in_detail: bool) -> Iterator[str]:
    yield f"{result.path} (copy {result.copy}): {'equal' if result.is_equal else 'DIFFERENT'}"
    for difference in result.differences:
        yield f"  {difference}"
    if in_detail:
        for place, (then, now) in enumerate(result.pairs()):
            times = [
                f"{name} {_ms(then.latency(moment(then)))} → {_ms(now.latency(moment(now)))}"
                for name, _, moment in _MOMENTS
                if moment(then) is not None or moment(now) is not None
            ]
            same = ", the same audio bytes" if now.audio and same_audio(then, now) else ""
            yield f"  answer {place} ({now.finish_reason}{same}): {'; '.join(times)}"


def _summary(results: Sequence[Result]) -> Iterator[str]:
    pairs = [pair for result in results for pair in result.pairs()]
    for name, _, moment in _MOMENTS:
        then = _latencies([pair[0] for pair in pairs], moment)
        now = _latencies([pair[1] for pair in pairs], moment)
        if then and now:
            yield (
                f"{name:>12}: p50 {_ms(_at(then, 0.5))} → {_ms(_at(now, 0.5))}, "
                f"p95 {_ms(_at(then, 0.95))} → {_ms(_at(now, 0.95))} (recorded → replayed, {len(now)} answers)"
            )


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Build the report for programs."""
    return {
        "equal": all(result.is_equal for result in results),
        "sessions": [
            {
                "recording": str(result.path),
                "copy": result.copy,
                "equal": result.is_equal,
                "differences": list(result.differences),
                "answers": [
                    {
                        "finish_reason": now.finish_reason,
                        "same_audio_bytes": same_audio(then, now),
                        "recorded": _times(then),
                        "replayed": _times(now),
                    }
                    for then, now in result.pairs()
                ],
            }
            for result in results
        ],
    }


def _times(answer: TimedAnswer) -> dict[str, float | None]:
    return {key: _rounded(answer.latency(moment(answer))) for _, key, moment in _MOMENTS}


def _latencies(answers: Sequence[TimedAnswer], moment: _Moment) -> list[float]:
    found = (answer.latency(moment(answer)) for answer in answers)
    return sorted(latency for latency in found if latency is not None)


def _at(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"
