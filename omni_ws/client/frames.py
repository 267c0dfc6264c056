"""Chunks as frames, the way a client writes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.wire.binary import encode_input

_MAX_U32 = 2**32 - 1
_encode = msgspec.json.Encoder().encode


def chunk_encoder(*, binary: bool) -> Callable[[InputChunk], tuple[bytes, bool]]:
    """A function that makes a frame of a numbered chunk, and says whether it is a text frame."""
    return _smallest_frame if binary else _text_frame


def _smallest_frame(chunk: InputChunk) -> tuple[bytes, bool]:
    """A binary frame where its header can say it all."""
    if chunk.format is not None or chunk.tool_call_id is not None or (chunk.timestamp_ms or 0) > _MAX_U32:
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
    return _encode(fields), True


def _as_text(chunk: InputChunk) -> str | None:
    """None for what is no text, and for a piece of text that ends inside a character."""
    if chunk.modality is not Modality.TEXT:
        return None
    try:
        return chunk.payload.decode()
    except UnicodeDecodeError:
        return None
