"""The command ``omni-ws bench``, and the report that it prints."""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import orjson

from omni_ws.bench.talker import (
    Load,
    MeasuredValues,
    Question,
    SpokenQuestion,
    Tally,
    TypedQuestion,
    bench,
)
from omni_ws.caller.script import certificates, count
from omni_ws.cli import INTERRUPTED, USAGE_ERROR
from omni_ws.client import DEFAULT_URL, ConnectionFailed
from omni_ws.client.audio import read_wav
from omni_ws.client.routes import websocket_url
from omni_ws.errors import OmniError

ALL_ANSWERED: Final = 0
FAILED: Final = 1
#: A question that the rules of the default engine can answer, too.
DEFAULT_TEXT: Final = "What is three plus four?"
DEFAULT_TURNS: Final = 5
_MODALITIES: Final = ("text", "audio")


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Run the command and return its exit status; ``--help`` and wrong usage raise SystemExit."""
    options = _parser().parse_args(arguments)
    try:
        load = _load(options, environ)
    except (ValueError, OmniError) as error:
        return _complain(error)
    tally, interrupted = Tally(), False
    try:
        asyncio.run(bench(load, tally))
    except KeyboardInterrupt:
        interrupted = True
    except ConnectionFailed as error:
        return _complain(f"{error}; start a server (omni-ws serve), or choose another with --url")
    if options.json:
        print(orjson.dumps(as_json(load, tally, interrupted=interrupted)).decode())
    else:
        print(as_text(load, tally, interrupted=interrupted))
    if "unauthenticated" in tally.refused:
        print("omni-ws bench: give a key with --api-key or OMNI_WS_API_KEY", file=sys.stderr)
    if interrupted:
        return INTERRUPTED
    return FAILED if tally.failed or tally.refused else ALL_ANSWERED


def _complain(problem: object) -> int:
    print(f"omni-ws bench: error: {problem}", file=sys.stderr)
    return USAGE_ERROR


def _load(options: argparse.Namespace, environ: Mapping[str, str]) -> Load:
    """Return the load that the options ask for. Raises ValueError or OmniError for options that do not fit together."""
    return Load(
        url=websocket_url(options.url),
        question=_question(options),
        api_key=options.api_key or environ.get("OMNI_WS_API_KEY"),
        tls=options.ca_file,
        sessions=options.sessions,
        turns=None if options.seconds is not None else options.turns or DEFAULT_TURNS,
        run_sec=options.seconds,
        stagger_sec=options.stagger,
        pause_sec=options.pause,
        patience_sec=options.patience,
        modalities=options.modalities,
    )


def _question(options: argparse.Namespace) -> Question:
    if options.file is None:
        if options.open_mic is not None:
            raise ValueError("--open-mic goes with --file")
        return TypedQuestion(DEFAULT_TEXT if options.text is None else options.text)
    try:
        return SpokenQuestion.of(options.file, read_wav(options.file), turn_detection=options.open_mic)
    except OSError as error:
        raise ValueError(f"cannot read {options.file}: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"cannot use {options.file}: {error}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omni-ws bench",
        description="Load a running server with talkers who ask and wait for their answers, and print how long those "
        "took. The exit status is 0 if all turns were answered, 1 if one failed or a session was refused, 2 for wrong "
        "usage or a server that cannot be reached, 130 after ^C, which prints what was measured so far.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", default=DEFAULT_URL, help="address of the server [%(default)s]")
    add("--api-key", metavar="KEY", help="API key [environment variable OMNI_WS_API_KEY]")
    add("--ca-file", type=certificates, metavar="X.pem", help="certificates to trust for wss:// [the system's]")
    add("--sessions", type=count, default=4, metavar="N", help="talkers, each on its own connection [%(default)s]")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--turns", type=count, metavar="N", help=f"questions of each talker [{DEFAULT_TURNS}]")
    length.add_argument("--seconds", type=_above_zero, metavar="SEC", help="instead: begin turns for so long")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--file", metavar="X.wav", help="say this recording, in real time, in pieces of 20 ms")
    what.add_argument("--text", type=_text, help=f"type this question [{DEFAULT_TEXT}]")
    add(
        "--open-mic",
        nargs="?",
        const="server_vad",
        choices=["server_vad", "semantic_vad"],
        help="let the server detect the end of the recording, with silence behind it [server_vad]",
    )
    add("--modalities", type=_modalities, metavar="text,audio", help="what answers are made of [as the server has it]")
    add("--stagger", type=_seconds, default=0.2, metavar="SEC", help="between the starts of talkers [%(default)g]")
    add("--pause", type=_seconds, default=0.0, metavar="SEC", help="between answer and next question [%(default)g]")
    add("--patience", type=_above_zero, default=30.0, metavar="SEC", help="how long an answer may take [%(default)g]")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError("must be a number, 0 or above")
    return number


def _above_zero(text: str) -> float:
    if (number := _seconds(text)) == 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _modalities(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not set(names) <= set(_MODALITIES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError("must be text, audio, or both with a comma")
    return names


# The report, as JSON and as text

_COLUMNS: Final = ("n", "median", "p90", "p99", "max")
_LABEL_WIDTH: Final = 34
#: The counts of turns that are reported besides those asked, answered and failed.
_REMARKS: Final = {
    "unfinished": "unfinished",
    "empty_answers": "answered without text and audio",
    "partial_answers": "answers before the speech had ended",
}
_LABELS: Final = {
    "session_opened": "opening a session",
    "first_text": "{start} → first text",
    "first_audio": "{start} → first audio",
    "final": "{start} → final",
    "acknowledgement": "acknowledgement of a piece",
    "gap_in_playback": "gap in playback",
    "client_lag": "lag of this program itself",
}


def as_json(load: Load, tally: Tally, *, interrupted: bool) -> dict[str, Any]:
    """Build the report for programs. Times are in milliseconds if their names say so, otherwise in seconds.

    A value that was not observed is absent, or null.
    """
    elapsed = tally.last_at - tally.began_at
    return {
        "url": _shown_url(load.url),
        "question": _asked(load),
        "interrupted": interrupted,
        "seconds": round(elapsed, 3),
        "sessions": {"wanted": load.sessions, "opened": tally.opened, "refused": dict(tally.refused)},
        "turns": {
            "asked": tally.asked,
            "answered": tally.answered,
            "failed": dict(tally.failed),
            "unfinished": tally.unfinished,
            "empty_answers": tally.empty,
            "partial_answers": tally.partial_answers,
        },
        "measured_from": "end_of_speech" if load.question.is_open else "end_of_input",
        "ms": {name: _milliseconds(values) for name, values in tally.times.items()},
        "playback": {"answers_with_audio": tally.audible, "with_underruns": tally.with_underruns},
        "output": {
            "tokens": tally.output_tokens,
            "tokens_per_second": _rate(tally.output_tokens, elapsed),
            "characters": tally.characters,
            "characters_per_second": _rate(tally.characters, elapsed),
            "audio_seconds": round(tally.audio_sec, 3),
            "audio_seconds_per_second": _rate(tally.audio_sec, elapsed),
        },
    }


def as_text(load: Load, tally: Tally, *, interrupted: bool) -> str:
    """Format the report for a terminal."""
    return "\n".join(_lines(load, as_json(load, tally, interrupted=interrupted), tally.refusals))


def _lines(load: Load, report: Mapping[str, Any], refusals: Mapping[str, str]) -> Iterator[str]:
    if report["interrupted"]:
        yield "interrupted; measured until then:"
    yield f"{report['url']}, {_described(load)}"
    sessions, turns, times = report["sessions"], report["turns"], report["ms"]
    refused = [f"{count} refused: {code}" for code, count in sessions["refused"].items()]
    yield ", ".join([f"sessions: {sessions['opened']} opened by {sessions['wanted']} talkers", *refused])
    yield from (f"  {code}: {message}" for code, message in refusals.items())
    counts = [f"turns: {turns['asked']} asked in {report['seconds']:.1f} s", f"{turns['answered']} answered"]
    counts += [f"{count} failed: {code}" for code, count in turns["failed"].items()]
    counts += [f"{turns[kind]} {words}" for kind, words in _REMARKS.items() if turns[kind]]
    yield ", ".join(counts)
    start = report["measured_from"].replace("_", " ")
    labels = {name: label.format(start=start) for name, label in _LABELS.items() if times[name] is not None}
    if not sessions["opened"]:
        return
    if labels:
        yield f"{'milliseconds':<{_LABEL_WIDTH}}" + "".join(f"{name:>9}" for name in _COLUMNS)
    for name, label in labels.items():
        cells = [f"{times[name]['n']:>9}", *(f"{times[name][column]:>9.1f}" for column in _COLUMNS[1:])]
        yield f"{label:<{_LABEL_WIDTH}}" + "".join(cells)
    if turns["answered"]:
        yield from _output_lines(report)


def _output_lines(report: Mapping[str, Any]) -> Iterator[str]:
    playback, output = report["playback"], report["output"]
    if playback["answers_with_audio"]:
        yield f"playback: {playback['with_underruns']} of {playback['answers_with_audio']} answers had gaps"
    amounts = [
        f"{output[name]:,.{digits}f} {words} ({output[f'{name}_per_second']:,.1f}/s)"
        for name, words, digits in (
            ("tokens", "tokens", 0),
            ("characters", "characters", 0),
            ("audio_seconds", "s of audio", 1),
        )
        if output[name]
    ]
    if amounts:
        yield "output: " + ", ".join(amounts)


def _milliseconds(values: MeasuredValues) -> dict[str, float] | None:
    found = values.distribution()
    return found and {name: value if name == "n" else round(value * 1000, 1) for name, value in found.items()}


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else round(amount / seconds, 2)


def _asked(load: Load) -> dict[str, Any]:
    match load.question:
        case TypedQuestion(text=text):
            return {"text": text}
        case SpokenQuestion(file=file, audio=audio, turn_detection=turn_detection):
            seconds = round(audio.duration_ms / 1000, 3)
            return {"file": file, "seconds": seconds, "turn_detection": turn_detection}


def _described(load: Load) -> str:
    match load.question:
        case TypedQuestion(text=text):
            return f"typed: {text if len(text) <= 60 else text[:59] + '…'}"
        case SpokenQuestion(file=file, audio=audio, turn_detection=turn_detection):
            how = f"open microphone, {turn_detection}" if turn_detection else "the client ends its input"
            return f"spoken: {file} ({audio.duration_ms / 1000:.1f} s; {how})"


def _shown_url(url: str) -> str:
    """Return the URL without parts that may be secret: a user, a password and a query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
