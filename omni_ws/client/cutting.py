"""Cuts what is a stream into pieces that a server takes, and that come through a slow network one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.file_heads import sniff_image

#: Each piece is acknowledged, so a connection that carries one in time has not died, however slow it is.
PIECE_BYTES: Final = 64 << 10


def pieces_of(chunk: InputChunk, most: int) -> Iterator[InputChunk]:
    """Yields the chunk in pieces of at most ``most`` bytes; the last one has its end.

    Audio, text and files of video are streams. A picture and the result of a tool are one chunk, however large.
    """
    payload = chunk.payload
    if len(payload) <= most or not _is_stream(chunk):
        yield chunk
        return
    size = most - most % 2 or most  # 16-bit samples stay whole
    for start in range(0, len(payload), size):
        is_last = start + size >= len(payload)
        piece = payload[start : start + size]
        yield replace(chunk, payload=piece, end_of_input=chunk.end_of_input and is_last)


def _is_stream(chunk: InputChunk) -> bool:
    if chunk.modality is Modality.IMAGE or chunk.tool_call_id is not None:
        return False
    return chunk.modality is not Modality.VIDEO or sniff_image(chunk.payload[:12]) is None
