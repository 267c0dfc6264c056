"""Frames as a client writes and reads them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidFrame, InvalidValue
from omni_ws.wire.frames import encode_input, loads_object
from omni_ws.wire.server_frames import SERVER_FRAMES, ServerFrame, decode_server_frame

_MAX_U32: Final = 2**32 - 1
_SERVER_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in SERVER_FRAMES)
_encode = msgspec.json.Encoder().encode

logger = logging.getLogger(__name__)


def read_frame(message: str) -> ServerFrame | None:
    """Decodes a text frame; returns None if its type is unknown to this version.

    Raises InvalidFrame if it is not a frame.
    """
    try:
        return decode_server_frame(message)
    except InvalidFrame:
        kind = loads_object(message.encode()).get("type")
        if isinstance(kind, str) and kind not in _SERVER_TYPES:
            logger.debug("ignoring a frame of the unknown type %s", kind)
            return None
        raise


def encode_config(fields: Mapping[str, Any]) -> bytes:
    """Encodes a ``session_config`` frame. Raises InvalidValue for a value that JSON cannot express."""
    try:
        return _encode({**fields, "type": "session_config"})
    except (TypeError, ValueError) as error:
        raise InvalidValue(f"the configuration cannot be written as JSON: {error}") from None


def chunk_encoder(*, binary: bool) -> Callable[[InputChunk], tuple[bytes, bool]]:
    """Returns a function that encodes a numbered chunk, and tells whether the frame is a text frame."""
    return _smallest_frame if binary else _text_frame


def _smallest_frame(chunk: InputChunk) -> tuple[bytes, bool]:
    """Encodes a binary frame, unless its header has no field for something that the chunk carries."""
    has_no_field = chunk.format is not None or chunk.tool_call_id is not None or chunk.ref is not None
    if has_no_field or (chunk.timestamp_ms or 0) > _MAX_U32:
        return _text_frame(chunk)
    return encode_input(chunk), False


def _text_frame(chunk: InputChunk) -> tuple[bytes, bool]:
    fields: dict[str, Any] = {"type": "input_chunk", "sequence_id": chunk.sequence_id, "modality": chunk.modality}
    if chunk.payload:
        text = _as_text(chunk)
        if text is None:
            fields["payload"] = chunk.payload
        else:
            fields["text"] = text
    if chunk.format is not None:
        fields["format"] = chunk.format
    if chunk.timestamp_ms is not None:
        fields["timestamp_ms"] = chunk.timestamp_ms
    if chunk.tool_call_id is not None:
        fields["role"], fields["tool_call_id"] = "tool", chunk.tool_call_id
    if chunk.end_of_input:
        fields["end_of_input"] = True
    if chunk.ref is not None:
        fields["ref"] = chunk.ref
    return _encode(fields), True


def _as_text(chunk: InputChunk) -> str | None:
    """Decodes a text payload; returns None for another modality, and for text cut within a character."""
    if chunk.modality is not Modality.TEXT:
        return None
    try:
        return chunk.payload.decode()
    except UnicodeDecodeError:
        return None
