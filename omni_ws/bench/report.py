"""Reports what a load test measured, as text or JSON. What was not observed is absent, or null."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from omni_ws.bench.load import Load, SpokenQuestion, TypedQuestion
from omni_ws.bench.tally import Distribution, MeasuredValues, Tally

_COLUMNS: Final = ("n", "median", "p90", "p99", "max")
_LABEL_WIDTH: Final = 34


def as_json(load: Load, tally: Tally, *, interrupted: bool) -> dict[str, Any]:
    """Builds the report for programs. Times are in milliseconds where their name says so, else in seconds."""
    elapsed = tally.last_at - tally.began_at
    return {
        "url": _shown_url(load.url),
        "question": _question(load),
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
        "measured_from": "end_of_speech" if _is_open(load) else "end_of_input",
        "ms": {
            "session_opened": _milliseconds(tally.opening),
            "first_text": _milliseconds(tally.first_text),
            "first_audio": _milliseconds(tally.first_audio),
            "final": _milliseconds(tally.final),
            "acknowledgement": _milliseconds(tally.acknowledgement),
            "gap_in_playback": _milliseconds(tally.gap),
            "client_lag": _milliseconds(tally.client_lag),
        },
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
    """Formats the report for a terminal."""
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


#: Of turns, beside what was asked, answered and failed.
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
    distribution: Distribution | None = values.distribution()
    if distribution is None:
        return None
    times = {name: round(getattr(distribution, name) * 1000, 1) for name in _COLUMNS[1:]}
    return {"n": distribution.n, **times}


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None or seconds <= 0 else round(amount / seconds, 2)


def _is_open(load: Load) -> bool:
    return isinstance(load.question, SpokenQuestion) and load.question.turn_detection is not None


def _question(load: Load) -> dict[str, Any]:
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
    """The URL without what may be secret: a user, a password and a query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
