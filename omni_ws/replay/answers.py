"""Answers and their latencies, gathered alike from a recording and from a replay."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Any

import orjson

from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.errors import InvalidFrame
from omni_ws.wire.frames import decode_output_audio


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
