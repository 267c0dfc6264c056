"""Collects the answer from an HTTP response while it arrives."""

from __future__ import annotations

import base64
from typing import Any

import orjson

from omni_ws.audio.container import parse_audio_mime
from omni_ws.core.chunks import AudioFormat
from omni_ws.errors import OmniError
from omni_ws.replay.answers import ReplayedAnswer


class HttpAnswer:
    """Reads the response formats of all routes."""

    def __init__(self) -> None:
        self.answer = ReplayedAnswer("")
        self.status = 0
        #: Session that the request opened.
        self.session_id: str | None = None
        self._content_type = ""
        self._body = bytearray()

    def begin(self, status: int, content_type: str) -> None:
        """Handles the head of the response."""
        self.status = status
        self._content_type = content_type

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer, and not only the state of one in progress."""
        answer = self.answer
        return bool(answer.outputs or answer.transcript or answer.errors or answer.finish_reason)

    def feed(self, at: float, data: bytes) -> None:
        """Handles a piece of the body."""
        if self._content_type.startswith("audio/"):
            self.answer.audio += data
            self.answer.output(at, is_audio=True)
            return
        self._body += data
        if self._content_type.startswith("text/event-stream"):
            *events, rest = self._body.split(b"\n\n")
            self._body = bytearray(rest)
            for event in events:
                self._event(at, bytes(event))

    def finish(self, at: float) -> None:
        """Handles the end of the response."""
        self.answer.final_at = at
        if self._content_type.startswith("audio/"):
            self.answer.format = _audio_format(self._content_type)
        elif self._content_type.startswith("application/json"):
            self._read(at, _json(bytes(self._body)))
        elif self._content_type.startswith("text/") and not self._content_type.startswith("text/event-stream"):
            self._add_text(at, self._body.decode("utf-8", "replace"))
        if self.answer.finish_reason is None and self.status == 200 and self.has_answer:
            self.answer.finish_reason = "stop"

    def _event(self, at: float, event: bytes) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                self._read(at, _json(line[5:]))

    def _read(self, at: float, fields: dict[str, Any]) -> None:
        self.session_id = fields.get("session_id")
        error = fields.get("error")
        if isinstance(error, dict):
            self.answer.errors.append(str(error.get("code")))
        transcript = fields.get("input_transcript")
        if isinstance(transcript, dict) and not transcript.get("interim"):
            self.answer.transcript += str(transcript.get("text", ""))
        match fields.get("type"):
            case "speech.audio.delta":
                self._add_audio(at, fields.get("audio"))
            case "transcript.text.delta":
                self._add_text(at, fields.get("delta"))
        if "type" not in fields:
            self._add_text(at, fields.get("text"))
        for choice in fields.get("choices") or ():
            self._choice(at, choice)

    def _choice(self, at: float, choice: dict[str, Any]) -> None:
        message = choice.get("delta") or choice.get("message") or choice
        self._add_text(at, message.get("content") or message.get("text"))
        audio = message.get("audio")
        if isinstance(audio, dict):
            self._add_audio(at, audio.get("data"))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            self.answer.tool_calls += f"{function.get('name') or ''}{function.get('arguments') or ''}"
        if choice.get("finish_reason"):
            self.answer.finish_reason = choice["finish_reason"]

    def _add_text(self, at: float, text: object) -> None:
        if isinstance(text, str) and text:
            self.answer.text += text
            self.answer.output(at)

    def _add_audio(self, at: float, data: object) -> None:
        if isinstance(data, str) and data:
            self.answer.audio += base64.b64decode(data)
            self.answer.format = AudioFormat(sample_rate=24_000)
            self.answer.output(at, is_audio=True)


def _audio_format(content_type: str) -> AudioFormat | None:
    try:
        return parse_audio_mime(content_type)
    except OmniError:
        return None


def _json(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:  # [DONE]
        return {}
    return value if isinstance(value, dict) else {}
