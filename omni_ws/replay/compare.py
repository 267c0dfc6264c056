"""Answers, then and now: collected alike from a recording and from a replay, compared, reported."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import orjson

from omni_ws.audio.codec import AudioDecoder
from omni_ws.audio.pcm import Samples
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidFrame, OmniError
from omni_ws.wire.frames import decode_output_audio

# Collected


@dataclass(slots=True)
class ReplayedAnswer:
    """Answer to one request. Times are in milliseconds of the session."""

    request_id: str
    text: str = ""
    transcript: str = ""
    tool_calls: str = ""
    audio: bytearray = field(default_factory=bytearray)
    format: AudioFormat | None = None
    finish_reason: str | None = None
    errors: list[str] = field(default_factory=list)
    #: Outputs so far.
    outputs: int = 0
    #: Start of its latency: the end of its input, or the chunk that triggered it if the answer came first.
    asked_at: float | None = None
    first_output_at: float | None = None
    first_audio_at: float | None = None
    final_at: float | None = None

    def output(self, at: float, *, is_audio: bool = False) -> None:
        """Counts an output, and notes the time of the first."""
        self.outputs += 1
        if self.first_output_at is None:
            self.first_output_at = at
        if is_audio and self.first_audio_at is None:
            self.first_audio_at = at

    @property
    def is_partial(self) -> bool:
        """Whether the answer was cut short, so that its length is a matter of timing."""
        return self.finish_reason in (None, "cancelled", "error")

    def latency(self, moment: float | None) -> float | None:
        """Milliseconds from ``asked_at`` to ``moment``; None if either is missing."""
        return None if moment is None or self.asked_at is None else moment - self.asked_at


@dataclass(slots=True)
class Answers:
    """Answers of a session.

    ``errors`` are those that belong to no request; ``ends`` tell how each connection ended.
    """

    answers: list[ReplayedAnswer] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)


class NativeAnswers:
    """Follows both directions of a native session, message by message, in order."""

    def __init__(self) -> None:
        self.found = Answers()
        self.session_id: str | None = None
        self.resume_token: str | None = None
        #: Highest number of an output.
        self.highest = -1
        self.started = 0
        self.finals = 0
        self.configured = 0
        self.greetings = 0
        self._by_id: dict[str, ReplayedAnswer] = {}
        self._format = AudioFormat(AudioEncoding.PCM16, 24_000, 1)
        #: Current answer, to which binary audio belongs.
        self.running: ReplayedAnswer | None = None
        #: Times of the chunks by number, and of the ends of inputs.
        self._chunks: dict[int, float] = {}
        self._ends: list[float] = []

    def asked(self, at: float, message: bytes | str) -> None:
        """Handles a message of the client, sent at ``at``."""
        if isinstance(message, bytes):
            if len(message) >= 12:
                self._chunk(at, int.from_bytes(message[4:8]), ends=bool(message[3] & 1))
            return
        frame = parsed(message)
        match frame.get("type"):
            case "input_chunk" if isinstance(frame.get("sequence_id"), int):
                self._chunk(at, frame["sequence_id"], ends=frame.get("end_of_input") is True)
            case "finish":
                self._ends.append(at)

    def _chunk(self, at: float, number: int, *, ends: bool) -> None:
        if number not in self._chunks and ends:
            self._ends.append(at)
        self._chunks.setdefault(number, at)

    def heard(self, at: float, message: bytes | str) -> None:
        """Handles a message of the server, received at ``at``."""
        if isinstance(message, bytes):
            try:
                audio = decode_output_audio(message)
            except InvalidFrame:
                return
            if self._is_new(audio.sequence_id) and self.running is not None:
                self._hear_audio(at, self.running, audio.payload, self._format)
            return
        frame = parsed(message)
        match frame.get("type"):
            case "session_created" | "session_resumed":
                self.greetings += 1
                self.session_id = frame.get("session_id", self.session_id)
                self.resume_token = frame.get("resume_token")
                self._configure(frame)
            case "session_updated":
                self.configured += 1
                self._configure(frame)
            case "response_started" if frame["request_id"] not in self._by_id:
                self.started += 1
                self._start(at, frame)
            case "speech_stopped":
                self._ends.append(at)
            case "error":
                error = frame["error"]
                request_id = error.get("request_id")
                owner = self._answer(request_id).errors if request_id else self.found.errors
                owner.append(str(error.get("code")))
            case "output_chunk" if self._is_new(frame["sequence_id"]):
                self._output(at, self._answer(frame["request_id"]), frame)

    def finished(self) -> Answers:
        """All answers, once the session is over."""
        return self.found

    def _is_new(self, number: int) -> bool:
        """Returns whether an output is new; after a resume the server repeats some."""
        if number <= self.highest:
            return False
        self.highest = number
        return True

    def _configure(self, frame: dict[str, Any]) -> None:
        output = frame.get("output_audio")
        if isinstance(output, dict):
            self._format = AudioFormat(AudioEncoding(output["format"]), output["sample_rate"], 1)

    def _answer(self, request_id: str) -> ReplayedAnswer:
        if request_id not in self._by_id:
            self._by_id[request_id] = answer = ReplayedAnswer(request_id)
            self.found.answers.append(answer)
        return self._by_id[request_id]

    def _start(self, at: float, frame: dict[str, Any]) -> None:
        self.running = answer = self._answer(frame["request_id"])
        number = frame.get("sequence_id")
        answer.asked_at = self._chunks.get(number, at) if isinstance(number, int) else at

    def _output(self, at: float, answer: ReplayedAnswer, frame: dict[str, Any]) -> None:
        if frame.get("final"):
            self.finals += 1
            answer.finish_reason = frame.get("finish_reason")
            answer.final_at = at
            if answer is self.running:
                self.running = None
            return
        modality = frame.get("modality")
        if modality == "transcript":
            if not frame.get("interim"):
                answer.transcript += frame.get("text", "")
            return
        if modality == "audio":
            encoding = AudioEncoding(frame.get("format", self._format.encoding))
            source = AudioFormat(encoding, frame.get("sample_rate", self._format.sample_rate), 1)
            self._hear_audio(at, answer, decoded(frame.get("payload", "")), source)
            return
        self._first(at, answer)
        answer.output(at)
        if modality == "tool_call":
            answer.tool_calls += f"{frame.get('name') or ''}{frame.get('arguments') or ''}"
        else:
            answer.text += frame.get("text", "")

    def _hear_audio(self, at: float, answer: ReplayedAnswer, payload: bytes, source: AudioFormat) -> None:
        self._first(at, answer)
        answer.output(at, is_audio=True)
        answer.audio += payload
        answer.format = source

    def _first(self, at: float, answer: ReplayedAnswer) -> None:
        """At the first output, starts the latency at the end of the input if that was earlier."""
        if answer.first_output_at is None and answer.asked_at is not None:
            ends = [end for end in self._ends if answer.asked_at <= end <= at]
            answer.asked_at = ends[0] if ends else answer.asked_at

    def outputs_of(self, number: int) -> int:
        """Number of outputs of the answer at this place; practically infinite once it has its final."""
        if number >= len(self.found.answers):
            return 0
        answer = self.found.answers[number]
        return 1 << 30 if answer.final_at is not None else answer.outputs

    def sounds(self, number: int) -> bool:
        """Whether the answer at this place has begun to speak, or has its final."""
        answer = self.found.answers[number]
        return answer.first_audio_at is not None or answer.final_at is not None

    def place_of(self, request_id: str) -> int | None:
        """Place of an answer in the session, from 0; None if it does not exist."""
        ids = [answer.request_id for answer in self.found.answers]
        return ids.index(request_id) if request_id in ids else None


def parsed(message: bytes | str) -> dict[str, Any]:
    """Parses a JSON object; returns an empty one for anything else."""
    try:
        value = orjson.loads(message)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def decoded(payload: str) -> bytes:
    """Audio in base64; empty where it is not."""
    try:
        return base64.b64decode(payload)
    except binascii.Error:
        return b""


# Compared

#: Close codes of drain and time-outs, which depend on timing and are not compared.
ORDERLY_CLOSE_CODES: Final = frozenset({1001, 1012, 4408})

#: Tolerances for synthesised audio of the same text.
LENGTH_TOLERANCE_MS: Final = 100.0
LENGTH_TOLERANCE: Final = 0.05
LEVEL_TOLERANCE_DB: Final = 1.5

#: Level of digital silence.
_SILENCE_DB: Final = -100.0
#: Characters of a text that are shown.
_SHOWN: Final = 60


class Comparison(StrEnum):
    """How strictly answers are compared."""

    #: Audio byte by byte.
    EXACT = "exact"
    #: Audio by its length and level.
    FULL = "full"
    #: No audio: for another voice or engine.
    TEXT = "text"
    NONE = "none"


def differences(then: Answers, now: Answers, comparison: Comparison) -> list[str]:
    """Describes the differences between the answers of two sessions; empty if they are the same."""
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


def _differences(old: ReplayedAnswer, new: ReplayedAnswer, comparison: Comparison) -> Iterator[str]:
    # The length of an answer that was cut short depends on timing.
    partial = old.is_partial and (new.is_partial or old.finish_reason is None)
    if old.finish_reason is not None and old.finish_reason != new.finish_reason:
        yield f"finish_reason: {old.finish_reason} recorded, {new.finish_reason} replayed"
    if old.errors != new.errors:
        yield f"errors: {_names(old.errors)} recorded, {_names(new.errors)} replayed"
    for name in ("text", "transcript", "tool_calls"):
        was, is_ = getattr(old, name), getattr(new, name)
        if not (_agree(was, is_) if partial else was == is_):
            yield f"{name}: {_shown(was)} recorded, {_shown(is_)} replayed"
    if comparison is not Comparison.TEXT and not same_audio(old, new, partial=partial):
        yield from _audio_differences(old, new, exact=comparison is Comparison.EXACT, partial=partial)


def same_audio(old: ReplayedAnswer, new: ReplayedAnswer, *, partial: bool = False) -> bool:
    """Compares audio byte by byte; if ``partial``, up to the end of the shorter one."""
    size = min(len(old.audio), len(new.audio)) if partial else None
    return old.format == new.format and old.audio[:size] == new.audio[:size]


def _audio_differences(old: ReplayedAnswer, new: ReplayedAnswer, *, exact: bool, partial: bool) -> Iterator[str]:
    if exact:
        yield f"audio: {len(old.audio)} bytes recorded, {len(new.audio)} different bytes replayed"
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


def _samples(answer: ReplayedAnswer) -> Samples:
    """Decodes the audio at its own rate. Raises OmniError."""
    source = answer.format or AudioFormat()
    with AudioDecoder(source, sample_rate=source.sample_rate) as decoder:
        return np.concatenate([*decoder.pieces(bytes(answer.audio)), decoder.flush()])


def _length_ms(answer: ReplayedAnswer, samples: Samples) -> float:
    return len(samples) * 1000 / (answer.format or AudioFormat()).sample_rate


def level_db(samples: Samples) -> float:
    """RMS level in dB relative to full scale."""
    power = float(np.mean(np.square(samples, dtype=np.float64))) if len(samples) else 0.0
    return max(_SILENCE_DB, 10 * math.log10(power)) if power > 0 else _SILENCE_DB


def _agree(was: str, is_: str) -> bool:
    return was.startswith(is_) or is_.startswith(was)


def _names(errors: list[str]) -> str:
    return ", ".join(errors) or "none"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


# Reported, as text and as JSON

_Moment: TypeAlias = Callable[[ReplayedAnswer], float | None]
_MOMENTS: Final[tuple[tuple[str, str, _Moment], ...]] = (
    ("first output", "first_output_ms", lambda answer: answer.first_output_at),
    ("first audio", "first_audio_ms", lambda answer: answer.first_audio_at),
    ("final", "final_ms", lambda answer: answer.final_at),
)
#: Up to this many sessions are all listed; of more, only those that differ.
_MAX_LISTED: Final = 10


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one replayed session. ``now`` is None if it could not be replayed."""

    path: Path
    copy: int
    then: Answers
    now: Answers | None
    differences: Sequence[str]

    @property
    def is_equal(self) -> bool:
        return self.now is not None and not self.differences

    def pairs(self) -> Iterator[tuple[ReplayedAnswer, ReplayedAnswer]]:
        """Yields recorded and replayed answers by place, as far as both exist."""
        yield from zip(self.then.answers, self.now.answers if self.now else (), strict=False)


def as_text(results: Sequence[Result]) -> str:
    """Formats the report for a terminal."""
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
    """Builds the report for programs."""
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


def _times(answer: ReplayedAnswer) -> dict[str, float | None]:
    return {key: _rounded(answer.latency(moment(answer))) for _, key, moment in _MOMENTS}


def _latencies(answers: Sequence[ReplayedAnswer], moment: _Moment) -> list[float]:
    found = (answer.latency(moment(answer)) for answer in answers)
    return sorted(latency for latency in found if latency is not None)


def _at(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value:.0f} ms"
