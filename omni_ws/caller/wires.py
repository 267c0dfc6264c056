"""How a front end is spoken to, and what its messages mean: the native WebSocket and the Realtime API."""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlencode

from omni_ws.caller.answers import NativeReader, RealtimeReader, SessionReader, decoded, parsed
from omni_ws.caller.sounds import MIC_RATE, MicrophoneFormat


class Wire(ABC):
    """How a caller configures a session of a front end, speaks to it, and reads its messages."""

    path: str
    reader: ClassVar[type[SessionReader]]
    #: Whether what plays is reported all the time, and not only where it was stopped.
    reports: ClassVar[bool]
    #: Of a recording (docs/recording.md).
    kind: ClassVar[str]
    sound: MicrophoneFormat
    #: The settings of turn detection; None if the caller ends the turns.
    turns: dict[str, Any] | None

    @abstractmethod
    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        """Return the message that configures a session, of which ``created`` was the first message."""

    @abstractmethod
    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]: ...

    @abstractmethod
    def typed(self, number: int, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        """A picture that is part of the next request."""

    @abstractmethod
    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]: ...

    @abstractmethod
    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        """What a client says when speech has stopped its loudspeaker."""

    @abstractmethod
    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield what a message tells.

        Kind ``audio`` has ``name``, ``pcm`` and ``start_ms``; ``created``, ``acknowledged``, ``words``, ``times`` and
        ``kept`` have ``fields``. All others have fields of ``live_caller.Seen``.
        """

    def resuming(self, reader: SessionReader) -> str | None:
        """Return the path by which a lost session goes on; None where there is no such thing."""
        return None

    def asks_kept(self, answer: str) -> dict[str, Any] | None:
        """Return the message that asks what the history keeps of an answer; None where there is no such thing."""
        return None

    @property
    def is_interruptible(self) -> bool:
        """Whether speech over an answer stops it, and the loudspeaker with it."""
        return self.turns is not None and self.turns.get("interrupt_response", True) is not False

    cancel: ClassVar[dict[str, Any]]


@dataclass
class NativeWire(Wire):
    """The native WebSocket, with the settings of the page unless ``turns`` or ``config`` say otherwise."""

    turns: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sound: MicrophoneFormat = field(default_factory=lambda: MicrophoneFormat(MIC_RATE))
    path: str = "/v1/streaming_input"
    reader = NativeReader
    reports = True
    kind = "websocket"
    cancel: ClassVar[dict[str, Any]] = {"type": "cancel"}

    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        known = created.get("capabilities", {}).get("turn_detection_types", ("semantic_vad",))
        turns = {
            "type": "semantic_vad" if "semantic_vad" in known else "server_vad",
            "interrupt_response": True,
            "interrupt_resume": True,
            **self.turns,
        }
        if turns["type"] == "semantic_vad":
            turns.setdefault("eagerness", "auto")
        return {"type": "session_config", "turn_detection": turns, **self.config}

    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]:
        payload = base64.b64encode(sound).decode()
        return [{"type": "input_chunk", "sequence_id": number, "modality": "audio", "payload": payload}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        return [{"type": "input_chunk", "sequence_id": number, "text": text, "end_of_input": True}]

    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        chunk = {"type": "input_chunk", "sequence_id": number, "modality": "image", "format": media_type}
        return [{**chunk, "payload": base64.b64encode(data).decode()}]

    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]:
        chunk = {"type": "input_chunk", "sequence_id": number, "role": "tool", "tool_call_id": call_id, "text": text}
        return [{**chunk, "end_of_input": True}]

    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        return [{"type": "output_ack", "request_id": answer, "played_ms": int(played_ms)}]

    def resuming(self, reader: SessionReader) -> str | None:
        if reader.session_id is None or reader.resume_token is None:
            return None
        lost = {"session_id": reader.session_id, "resume_token": reader.resume_token, "last_output": reader.highest}
        return f"{self.path}?{urlencode(lost)}"

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        frame = parsed(message)
        turn, at = frame.get("turn_id") or "", frame.get("audio_ms")
        match frame.get("type"):
            case "session_created":
                yield "created", {"fields": frame}
            case "session_resumed" | "input_ack":
                yield "acknowledged", {"fields": frame}
            case "session_updated":
                yield "configured", {}
            case "speech_started":
                yield ("uncertain" if frame.get("certain") is False else "started"), {"name": turn, "audio_ms": at}
            case "speech_confirmed":
                yield "confirmed", {"name": turn, "audio_ms": at}
            case "speech_dismissed":
                yield "dismissed", {"name": turn, "audio_ms": at}
            case "speech_stopped":
                yield "stopped", {"name": turn, "audio_ms": at}
            case "response_started":
                yield "response", {"name": frame["request_id"], "text": frame.get("trigger") or ""}
            case "error":
                error = frame["error"]
                text = f"{error['code']} {error.get('param')}: {error['message']}"
                yield "refused", {"name": error.get("request_id") or "", "text": text}
            case "output_chunk":
                yield from self._output(frame)

    def _output(self, frame: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        name = frame["request_id"]
        if frame.get("final"):
            if isinstance(times := frame.get("times"), dict):
                yield "times", {"name": name, "fields": times}
            yield "final", {"name": name, "text": frame["finish_reason"]}
            return
        match frame.get("modality"):
            case "audio":
                start = frame.get("start_ms")
                yield "audio", {"name": name, "pcm": decoded(frame["payload"]), "start_ms": start}
                if words := frame.get("words"):
                    yield "words", {"name": name, "fields": words}
            case "transcript" if not frame.get("interim"):
                if language := frame.get("language"):
                    yield "language", {"name": name, "text": language}
                yield "transcript", {"name": name, "text": frame["text"]}
            case "text":
                yield "text", {"name": name, "text": frame["text"]}
            case "tool_call" if frame.get("id"):
                yield "call", {"name": frame["id"], "text": frame.get("name") or ""}


@dataclass
class RealtimeWire(Wire):
    """``/v1/realtime``, with transcription, and OpenAI's defaults or ``turns``.

    ``config`` and ``output`` are fields of the session, and of its ``audio.output``.
    """

    turns: dict[str, Any] | None = field(default_factory=lambda: {"type": "server_vad"})
    config: dict[str, Any] = field(default_factory=dict)
    output: dict[str, Any] = field(default_factory=dict)
    sound: MicrophoneFormat = field(default_factory=lambda: MicrophoneFormat(MIC_RATE))
    path: str = "/v1/realtime?model=gpt-realtime"
    reader = RealtimeReader
    reports = False
    kind = "realtime"
    cancel: ClassVar[dict[str, Any]] = {"type": "response.cancel"}
    _items: dict[str, str] = field(default_factory=dict)

    def opening(self, created: dict[str, Any]) -> dict[str, Any]:
        heard = {
            "format": {"type": "audio/pcmu"}
            if self.sound.is_mu_law
            else {"type": "audio/pcm", "rate": self.sound.rate},
            "transcription": {"model": "whisper-1"},
            "turn_detection": self.turns,
        }
        audio = {"input": heard, **({"output": self.output} if self.output else {})}
        return {"type": "session.update", "session": {"type": "realtime", "audio": audio, **self.config}}

    def audio(self, number: int, sound: bytes) -> list[dict[str, Any]]:
        return [{"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()}]

    def typed(self, number: int, text: str) -> list[dict[str, Any]]:
        content = [{"type": "input_text", "text": text}]
        return [self._item({"type": "message", "role": "user", "content": content}), {"type": "response.create"}]

    def picture(self, number: int, media_type: str, data: bytes) -> list[dict[str, Any]]:
        url = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
        content = [{"type": "input_image", "image_url": url}]
        return [self._item({"type": "message", "role": "user", "content": content})]

    def result(self, number: int, call_id: str, text: str) -> list[dict[str, Any]]:
        return [
            self._item({"type": "function_call_output", "call_id": call_id, "output": text}),
            {"type": "response.create"},
        ]

    @staticmethod
    def _item(item: dict[str, Any]) -> dict[str, Any]:
        return {"type": "conversation.item.create", "item": item}

    def cut(self, answer: str, played_ms: float) -> list[dict[str, Any]]:
        if answer not in self._items:
            return []
        place = {"item_id": self._items[answer], "content_index": 0, "audio_end_ms": int(played_ms)}
        return [{"type": "conversation.item.truncate", **place}]

    def asks_kept(self, answer: str) -> dict[str, Any] | None:
        item = self._items.get(answer)
        return None if item is None else {"type": "conversation.item.retrieve", "item_id": item}

    def read(self, message: bytes | str) -> Iterator[tuple[str, dict[str, Any]]]:
        event = parsed(message)
        match event.get("type"):
            case "session.created":
                yield "created", {"fields": event.get("session") or {}}
            case "session.updated":
                yield "configured", {}
            case "input_audio_buffer.speech_started":
                yield "started", {"name": event["item_id"], "audio_ms": event.get("audio_start_ms")}
            case "input_audio_buffer.speech_stopped":
                yield "stopped", {"name": event["item_id"], "audio_ms": event.get("audio_end_ms")}
            case "conversation.item.retrieved":
                yield "kept", {"name": event["item"]["id"], "fields": event["item"]}
            case "conversation.item.input_audio_transcription.completed":
                yield "transcript", {"name": event["item_id"], "text": event["transcript"]}
            case "error":
                yield "refused", {"text": str(event["error"].get("message"))}
            case _:
                yield from self._response(event)

    def _response(self, event: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        match event.get("type"):
            case "response.created":
                yield "response", {"name": event["response"]["id"]}
            case "response.output_audio.delta":
                self._items[event["response_id"]] = event["item_id"]
                yield "audio", {"name": event["response_id"], "pcm": decoded(event["delta"]), "start_ms": None}
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                yield "text", {"name": event["response_id"], "text": event["delta"]}
            case "response.done":
                if isinstance(times := event["response"].get("times"), dict):
                    yield "times", {"name": event["response"]["id"], "fields": times}
                yield "final", {"name": event["response"]["id"], "text": event["response"]["status"]}
            case "response.output_item.done" if event["item"]["type"] == "function_call":
                yield "call", {"name": event["item"]["call_id"], "text": event["item"]["name"]}
