"""Removes from messages what a recording must not contain: credentials always, content unless it is recorded."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import orjson

from omni_ws.wire.binary import HEADER

_SECRET: Final = b'"resume_token"'
REDACTED: Final = "redacted"

#: Fields of frames that hold metadata. All others, unknown ones included, are treated as content.
_HARMLESS: Final = frozenset(
    {
        *("type", "sequence_id", "modality", "format", "timestamp_ms", "end_of_input", "request_id", "session_id"),
        *("next_sequence_id", "buffered_chunks", "received_bytes", "credit_bytes", "trigger", "input_mode", "final"),
        *("finish_reason", "usage", "start_ms", "sample_rate", "interim", "audio_ms", "played_ms", "replayed", "code"),
        *("reason", "retryable", "retry_after_ms", "time_left_ms", "server_time_ms", "expires_in", "channels"),
        *("input_tokens", "output_tokens", "total_tokens", "input_audio_ms", "output_audio_ms"),
        *("input_after_start_bytes", "limits", "capabilities", "turn_detection", "start_policy", "after_start"),
        *(
            "input_audio",
            "output_audio",
            "modalities",
            "overlap",
            "task",
            "alignment",
            "alignment_window_ms",
            "out_of_order",
            "resume_token",
        ),
        *("dropped_requests", "turn_id"),
    }
)
_OBJECTS: Final = frozenset({"error", "usage", "input_audio", "output_audio"})


def without_secrets(data: bytes) -> bytes:
    """Return a JSON frame with its resume token redacted, which would let a reader take over the session."""
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
    """Return the size of ``data`` and its SHA-256 in hexadecimal."""
    return len(data), hashlib.sha256(data).hexdigest()


def without_content(data: bytes) -> bytes | None:
    """Return a JSON frame with all content replaced by its size and hash; None for anything but a JSON object."""
    try:
        frame = orjson.loads(data)
        return orjson.dumps(_emptied(frame, is_inner=False)) if isinstance(frame, dict) else None
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):  # encoding fails where objects are nested too deeply
        return None


def without_payload(data: bytes) -> tuple[bytes, int, str]:
    """Return the header of a binary frame, and the size and hash of its payload."""
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
