"""What the body of a Mode A request says, in each of its four forms: parameters, then chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, UnknownType, UnsupportedFormat
from omni_ws.wire.binary import decode_input
from omni_ws.wire.body_stream import LengthPrefixedDecoder, NdjsonDecoder
from omni_ws.wire.frames import (
    ChunkFields,
    RefusedChunk,
    SequenceId,
    field_error,
    loads_object,
    to_chunk,
)
from omni_ws.wire.refused_fields import MARKS_OF_CHUNKS

CONTENT_TYPE: Final = "application/x-multipart-streaming"
NDJSON_TYPE: Final = "application/x-ndjson"
#: What curl says of a body when it is told nothing.
FORM_TYPE: Final = "application/x-www-form-urlencoded"
_NDJSON_TYPES: Final = frozenset({"", NDJSON_TYPE, "application/json", FORM_TYPE, CONTENT_TYPE})
#: Any of these makes the first object of a body a chunk instead of the request's parameters.
CHUNK_MARKS: Final = MARKS_OF_CHUNKS | {"modality", "payload", "text", "end_of_input", "sequence_id", "offset"}
#: The largest number that every JSON parser keeps exact.
MAX_OFFSET: Final = 2**53 - 1
#: Query parameters that are texts, whatever they look like.
_TEXTS: Final = frozenset({"model", "voice", "instructions", "request_id"})
#: Base64 and the JSON around it, for a chunk of the largest size.
_LINE_OVERHEAD_BYTES: Final = 64 * 1024


class ChunkObject(ChunkFields, frozen=True, kw_only=True):
    """An input chunk in a body, which says by itself what it is."""

    type: Literal["input_chunk"] | None = None
    sequence_id: SequenceId | None = None
    #: Where it begins in the input, in place of a number.
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """The first object of a body, where it is no chunk."""

    fields: dict[str, Any]


BodyItem: TypeAlias = Parameters | InputChunk


class BodyReader(Protocol):
    """Bytes in, items out. Raises errors that say where in the body they arose."""

    @property
    def place(self) -> str:
        """Where the item stands that was given out last; "" where a body has no places."""
        ...

    @property
    def unfinished_bytes(self) -> int:
        """What is kept of an item whose end has not come, once everything before it was given out."""
        ...

    def feed(self, data: bytes) -> Iterator[BodyItem]: ...

    def finish(self) -> Iterator[BodyItem]: ...


class NdjsonBody:
    """One JSON object a line."""

    def __init__(self, *, max_chunk_bytes: int) -> None:
        self._lines = NdjsonDecoder(max_line_bytes=max_line_bytes(max_chunk_bytes))
        self._objects = _Objects()

    @property
    def place(self) -> str:
        return f"line {self._lines.line_number}"

    @property
    def unfinished_bytes(self) -> int:
        return self._lines.unfinished_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        return self._items(self._lines.feed(data))

    def finish(self) -> Iterator[BodyItem]:
        return self._items(self._lines.finish())

    def _items(self, lines: Iterable[bytes]) -> Iterator[BodyItem]:
        for line in lines:
            try:
                item = self._objects.read(line)
            except OmniError as error:
                raise placed(error, self.place) from None
            yield item


class LengthPrefixedBody:
    """Each frame a JSON object or, where it does not begin with ``{``, a binary frame."""

    def __init__(self, *, prefix_bytes: int, max_chunk_bytes: int) -> None:
        self._frames = LengthPrefixedDecoder(prefix_bytes=prefix_bytes, max_frame_bytes=max_line_bytes(max_chunk_bytes))
        self._objects = _Objects()

    @property
    def place(self) -> str:
        return f"frame {self._frames.frame_number}"

    @property
    def unfinished_bytes(self) -> int:
        return self._frames.unfinished_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        return self._items(self._frames.feed(data))

    def finish(self) -> Iterator[BodyItem]:
        return self._items(self._frames.finish())

    def _items(self, frames: Iterable[bytes]) -> Iterator[BodyItem]:
        for frame in frames:
            try:
                item = self._objects.read(frame) if frame[:1] == b"{" else self._objects.read_binary(frame)
            except OmniError as error:
                raise placed(error, self.place) from None
            yield item


class RawAudioBody:
    """The bytes are the audio."""

    place = ""
    unfinished_bytes = 0

    def __init__(self, *, media_type: str, max_chunk_bytes: int) -> None:
        self.media_type = media_type
        self._max_chunk_bytes = max_chunk_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        for start in range(0, len(data), self._max_chunk_bytes):
            yield InputChunk(Modality.AUDIO, data[start : start + self._max_chunk_bytes])

    def finish(self) -> Iterator[BodyItem]:
        yield from ()


class _Objects:
    """The first object may be the parameters; every other is a chunk."""

    def __init__(self) -> None:
        self._first = True

    def read(self, data: bytes) -> BodyItem:
        first, self._first = self._first, False
        try:
            if first:
                fields = loads_object(data)
                if not CHUNK_MARKS & fields.keys() and fields.get("type") != "input_chunk":
                    return Parameters(fields)
            str(data, "utf-8")  # the parser skips fields that it does not know without looking at their bytes
            line = _line_decoder.decode(data)
        except msgspec.DecodeError as error:
            kind = loads_object(data).get("type", "input_chunk")
            if isinstance(kind, str) and kind != "input_chunk":
                raise UnknownType("after the parameters a body holds input chunks alone", param="type") from None
            raise field_error(error) from None
        except RecursionError:
            raise InvalidFrame("nested too deeply") from None
        except UnicodeDecodeError:
            raise InvalidFrame("not UTF-8") from None
        return to_chunk(line, line.sequence_id, line.offset)

    def read_binary(self, data: bytes) -> BodyItem:
        self._first = False
        item = decode_input(data)
        if isinstance(item, RefusedChunk):
            raise item.error
        return item


_line_decoder: Final[msgspec.json.Decoder[ChunkObject]] = msgspec.json.Decoder(ChunkObject)


def body_reader(content_type: str, *, max_chunk_bytes: int) -> BodyReader:
    """The reader for a content type. Raises UnsupportedFormat or InvalidValue for what is no streaming body."""
    media_type, _, attributes = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type.startswith("audio/"):
        return RawAudioBody(media_type=content_type.strip(), max_chunk_bytes=max_chunk_bytes)
    if media_type not in _NDJSON_TYPES:
        raise UnsupportedFormat(
            f"{media_type[:64]!r} is no streaming body; NDJSON, {CONTENT_TYPE} and audio/* are", param="Content-Type"
        )
    framing = re.search(r"(?:^|;)\s*framing\s*=\s*\"?([^;\"\s]*)", attributes, re.IGNORECASE)
    match framing[1].lower() if framing is not None and media_type == CONTENT_TYPE else "ndjson":
        case "ndjson":
            return NdjsonBody(max_chunk_bytes=max_chunk_bytes)
        case "length32":
            return LengthPrefixedBody(prefix_bytes=4, max_chunk_bytes=max_chunk_bytes)
        case "length64":
            return LengthPrefixedBody(prefix_bytes=8, max_chunk_bytes=max_chunk_bytes)
        case unknown:
            raise InvalidValue(
                f"unknown framing {unknown[:32]!r}; ndjson, length32 and length64 are known", param="framing"
            )


def query_parameters(query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Parameters from a query string: JSON where a value reads as such, otherwise a string.

    A comma-separated ``modalities`` is a list; dots reach into objects (``sampling.max_tokens=5``).
    """
    fields: dict[str, Any] = {}
    for name, text in query:
        *path, last = name.split(".")
        value: Any = text
        if last not in _TEXTS:
            try:
                value = orjson.loads(text)
            except orjson.JSONDecodeError:
                value = text.split(",") if name == "modalities" else text
        target = fields
        for part in path:
            inner = target.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InvalidValue("given both as a value and as an object", param=part)
            target = inner
        target[last] = value
    return fields


def max_line_bytes(max_chunk_bytes: int) -> int:
    """The longest line or frame that can hold a chunk of the largest size."""
    return max_chunk_bytes * 4 // 3 + _LINE_OVERHEAD_BYTES


def placed(error: OmniError, place: str) -> OmniError:
    """The error of the item at ``place``, which its message is made to name."""
    if place:
        error.message = f"{place}: {error.message}"
    return error
