"""What of a message may stand in a recording: never a credential, and, where payloads are left out, no content."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import orjson

from omni_ws.wire.binary import HEADER

_SECRET: Final = b'"resume_token"'
REDACTED: Final = "redacted"

#: Fields of frames that say how, when and how much, and nothing of what. All others are content.
_HARMLESS: Final = frozenset(
    {
        *("type", "sequence_id", "modality", "format", "timestamp_ms", "end_of_input", "request_id", "session_id"),
        *("next_sequence_id", "buffered_chunks", "received_bytes", "credit_bytes", "trigger", "input_mode", "final"),
        *("finish_reason", "usage", "start_ms", "sample_rate", "interim", "audio_ms", "played_ms", "replayed", "code"),
        *("reason", "retryable", "retry_after_ms", "time_left_ms", "server_time_ms", "expires_in", "channels"),
        *("input_tokens", "output_tokens", "total_tokens", "input_audio_ms", "output_audio_ms"),
        *("input_after_start_bytes", "limits", "capabilities", "turn_detection", "start_policy", "after_start"),
        *("input_audio", "output_audio", "modalities", "overlap", "task", "alignment", "out_of_order", "resume_token"),
    }
)
_OBJECTS: Final = frozenset({"error", "usage", "input_audio", "output_audio"})


def without_secrets(data: bytes) -> bytes:
    """The same, but for the token that would let its reader take the session over."""
    if _SECRET not in data:
        return data
    try:
        frame = orjson.loads(data)
    except orjson.JSONDecodeError:
        return data
    if not isinstance(frame, dict) or not isinstance(frame.get("resume_token"), str):
        return data
    return orjson.dumps(frame | {"resume_token": REDACTED})


def digest(data: bytes) -> tuple[int, str]:
    """Size and SHA-256."""
    return len(data), hashlib.sha256(data).hexdigest()


def without_content(data: bytes) -> bytes | None:
    """A JSON frame with a size and a hash in the place of all that was said; None for what is no such frame."""
    try:
        frame = orjson.loads(data)
        return orjson.dumps(_emptied(frame, is_inner=False)) if isinstance(frame, dict) else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # the latter for what is nested too deeply
        return None


def without_payload(data: bytes) -> tuple[bytes, int, str]:
    """The header of a binary frame, and what else there was."""
    return data[: HEADER.size], *digest(data[HEADER.size :])


def _emptied(fields: dict[str, Any], *, is_inner: bool) -> dict[str, Any]:
    emptied: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _OBJECTS and isinstance(value, dict) and not is_inner:
            emptied[name] = _emptied(value, is_inner=True)
        elif (name in _HARMLESS - _OBJECTS) or value is None or isinstance(value, bool):
            emptied[name] = value
        else:
            content = value.encode() if isinstance(value, str) else orjson.dumps(value)
            size, sha256 = digest(content)
            emptied[name] = {"size": size, "sha256": sha256}
    return emptied
