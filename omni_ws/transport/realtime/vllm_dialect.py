"""vLLM's dialect of ``/v1/realtime``, whose clients have utterances transcribed, one after the other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

from omni_ws.core.chunks import FinalChunk, FinishReason, InputChunk, Modality, OutputChunk, OutputModality
from omni_ws.errors import OmniError, UnknownType
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.messages import ServerMessage
from omni_ws.transport.realtime.items import Event, SessionDialect
from omni_ws.wire.realtime_events import read

_VLLM_CONFIGURATION: Final = {
    "task": "transcribe",
    "modalities": ["text"],
    "input_audio": {"format": "pcm16", "sample_rate": 16_000},  # its one format
    "turn_detection": None,
    "history": False,
}
#: vLLM's error codes, by our own, if they differ.
_VLLM_CODES: Final = {
    "unknown_type": "unknown_event",
    "invalid_frame": "invalid_json",
    "invalid_value": "invalid_event",
}


def begins_vllm_dialect(event: Mapping[str, Any]) -> bool:
    """Return whether ``event``, a client's first, is in vLLM's dialect: one that OpenAI's API refuses."""
    if event["type"] == "session.update":
        return "session" not in event and "model" in event
    return event["type"] == "input_audio_buffer.commit" and ("final" in event or event.keys() == {"type"})


def created_fields(session_id: str) -> dict[str, Any]:
    """Return the fields of ``session.created`` that vLLM's clients read; they are sent to all clients."""
    return {"id": session_id, "created": int(time.time())}


class VllmDialect(SessionDialect):
    """The SessionDialect of clients of vLLM's ``/v1/realtime``. A RealtimeDialect has sent them ``session.created``.

    An utterance begins with its first audio and ends with a commit that is ``final``. Any other commit changes nothing,
    because audio is transcribed as it arrives.
    """

    def __init__(self, conversation: Conversation) -> None:
        super().__init__()
        self._conversation = conversation
        self._transcribes = False
        self._hears = False
        self._text: list[str] = []

    def receive(self, fields: Mapping[str, Any], *, now: float) -> None:
        if not self._transcribes:  # an engine that cannot refuses each event
            self._conversation.configure(_VLLM_CONFIGURATION)
            self._transcribes = True
        match fields["type"]:
            case "session.update":
                self._conversation.configure({"model": read(fields.get("model"), str, "model")})
            case "input_audio_buffer.append":
                chunk = InputChunk(Modality.AUDIO, read(fields.get("audio"), bytes, "audio"))
                self._conversation.receive_chunk(chunk, now=now)
                self._hears = True
            case "input_audio_buffer.commit":
                if fields.get("final") is True:
                    self._end_utterance(now)
            case unknown:
                raise UnknownType(f"unknown event type {str(unknown)[:64]!r}", param="type")

    def _end_utterance(self, now: float) -> None:
        if not self._hears:
            self._send([_transcription_done("", 0, 0)])
            return
        self._hears = False
        self._conversation.receive_chunk(InputChunk(Modality.AUDIO, b"", end_of_input=True), now=now)

    def render(self, message: ServerMessage) -> Iterator[Event]:
        match message:
            case OutputChunk(modality=OutputModality.TEXT, text=text):
                self._text.append(text)
                yield {"type": "transcription.delta", "delta": text}
            case FinalChunk(finish_reason=reason, usage=usage):
                text, self._text = "".join(self._text), []
                if reason is not FinishReason.ERROR:
                    yield _transcription_done(text, usage.input_tokens, usage.output_tokens)
            case OmniError():
                self._reported = message
                yield self.error(message)

    def error(self, error: OmniError, *, event_id: str | None = None) -> Event:
        """Return an error as an event of vLLM's, whose ``error`` is a text. It has no id."""
        code = "invalid_audio" if error.param == "audio" else _VLLM_CODES.get(error.code, error.code)
        return {"type": "error", "error": error.message, "code": code}

    def close(self) -> None:
        pass  # it holds nothing that is charged


def _transcription_done(text: str, prompt_tokens: int, completion_tokens: int) -> Event:
    usage = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return {"type": "transcription.done", "text": text, "usage": usage}
