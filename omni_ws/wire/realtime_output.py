"""The server events of OpenAI's Realtime API."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omni_ws.core.chunks import Usage
from omni_ws.errors import Busy, EngineError, InvalidRequest, OmniError

_encoder: Final = msgspec.json.Encoder()

#: The codes of OpenAI where they differ.
_CODES: Final = {
    "rate_limited": "rate_limit_exceeded",
    "invalid_frame": "invalid_event",
    "unknown_type": "invalid_event",
}


class RealtimeRefusal(InvalidRequest):
    """A refusal with a code of OpenAI's, which only its own API has. Never reaches another front end."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self._code = code

    @property
    def code(self) -> str:
        return self._code


def encode_event(event: dict[str, Any]) -> bytes:
    """The event as JSON, with bytes as base64."""
    return _encoder.encode(event)


def error_fields(error: OmniError, *, event_id: str | None = None) -> dict[str, Any]:
    """OpenAI's error object. ``event_id`` is that of the client's event that caused it."""
    kind = "invalid_request_error"
    if isinstance(error, EngineError):
        kind = "server_error"
    elif isinstance(error, Busy):
        kind = "rate_limit_error" if error.code == "rate_limited" else "server_error"
    return {
        "type": kind,
        "code": _CODES.get(error.code, error.code),
        "message": error.message,
        "param": error.param,
        "event_id": event_id,
    }


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The usage of a response. All its tokens are those of text: the engines do not count audio in tokens."""
    cached = usage.cached_tokens or 0
    return {
        "total_tokens": usage.total_tokens,
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "input_token_details": {
            "text_tokens": usage.input_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": cached,
            "cached_tokens_details": {"text_tokens": cached, "audio_tokens": 0, "image_tokens": 0},
        },
        "output_token_details": {"text_tokens": usage.output_tokens, "audio_tokens": 0},
    }
