"""Bodies of Mode B's create and append requests: one input chunk, or ``{"chunks": […]}``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgspec

from omni_ws.core.chunks import InputChunk
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, UnknownType
from omni_ws.wire.frames import RefusedChunk, field_error, to_chunk
from omni_ws.wire.streaming_body import CHUNK_MARKERS, ChunkObject

#: Limits the chunks of a body: an empty chunk has few bytes on the wire but costs a whole object in memory.
MAX_CHUNKS: Final = 1 << 16

#: What marks a body as a chunk; where these two stand, they have the chunks.
_MARKERS: Final = CHUNK_MARKERS - {"chunk", "chunks"}
#: A chunk, or the error that makes it invalid, with its sequence number where that is valid.
ChunkOrRefusal: TypeAlias = InputChunk | RefusedChunk | InvalidRequest


@dataclass(frozen=True, slots=True)
class BodyChunk:
    """A chunk of a body and its JSON path there: ``chunks[2]``, or "" where the body itself is the chunk."""

    place: str
    content: ChunkOrRefusal

    def name(self, param: str | None) -> str | None:
        """Return the JSON path of the chunk's field ``param`` within the body."""
        return ".".join(filter(None, [self.place, param])) or None


def read_append(body: Mapping[str, Any]) -> list[BodyChunk]:
    """Return the chunks of an append request, invalid ones included: each is accepted or refused by itself.

    Raises InvalidFrame or InvalidValue for a body without a chunk or a list of chunks.
    """
    if "chunks" not in body:
        if not CHUNK_MARKERS & body.keys() and body.get("type") != "input_chunk":
            raise InvalidFrame("the body must be an input chunk, or have a list of them in chunks", param="chunks")
        return [BodyChunk("", _read(body))]
    if twice := sorted(_MARKERS & body.keys()):
        raise InvalidValue("a body must be either one chunk or have chunks, not both", param=twice[0])
    return _read_list(body["chunks"])


def read_create(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[BodyChunk]]:
    """Return a new session's parameters, and its first chunks from ``chunk`` or ``chunks``.

    Raises as ``read_append`` does.
    """
    parameters = {name: value for name, value in body.items() if name not in ("chunk", "chunks")}
    if misplaced := sorted((_MARKERS - {"modality"}) & body.keys()):
        raise InvalidValue("the first chunk must be in the field chunk", param=misplaced[0])
    chunk, chunks = body.get("chunk"), body.get("chunks")
    if chunk is not None and chunks is not None:
        raise InvalidValue("the first input must be either in chunk or in chunks, not both", param="chunk")
    if chunks is not None:
        return parameters, _read_list(chunks)
    return parameters, [] if chunk is None else [BodyChunk("chunk", _read(chunk))]


def _read_list(chunks: Any) -> list[BodyChunk]:
    if not isinstance(chunks, list):
        raise InvalidValue("chunks must be a list of input chunks", param="chunks")
    if len(chunks) > MAX_CHUNKS:
        raise InvalidValue(f"at most {MAX_CHUNKS} chunks per body, got {len(chunks)}", param="chunks")
    return [BodyChunk(f"chunks[{index}]", _read(chunk)) for index, chunk in enumerate(chunks)]


def _read(value: Any) -> ChunkOrRefusal:
    if not isinstance(value, dict):
        return InvalidFrame("a chunk must be a JSON object")
    number = value.get("sequence_id")
    try:
        return _convert(value)
    except InvalidRequest as error:
        if type(number) is not int or not 0 <= number <= MAX_SEQUENCE_ID:
            return error
        error.sequence_id = number
        return RefusedChunk(number, error)


def _convert(value: dict[str, Any]) -> InputChunk:
    kind = value.get("type")
    if isinstance(kind, str) and kind != "input_chunk":
        raise UnknownType("this body accepts only input chunks", param="type")
    try:
        fields = msgspec.convert(value, ChunkObject)
    except msgspec.ValidationError as error:
        raise field_error(error) from None
    return to_chunk(fields, fields.sequence_id, fields.offset)
