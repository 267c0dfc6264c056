"""Streamed bodies of Mode A requests in their four forms: NDJSON, two length-prefixed framings, raw audio.

Each holds the parameters of the request, if any, followed by chunks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.json_values import check_values
from omni_ws.errors import InvalidFrame, InvalidValue, OmniError, UnknownType, UnsupportedFormat
from omni_ws.wire.binary import decode_input
from omni_ws.wire.body_stream import LengthPrefixedDecoder, NdjsonDecoder
from omni_ws.wire.chunk_fields import CHUNK_ONLY_FIELDS, ChunkFields
from omni_ws.wire.frames import (
    RefusedChunk,
    SequenceId,
    field_error,
    loads_object,
    max_frame_bytes,
    to_chunk,
)

CONTENT_TYPE: Final = "application/x-multipart-streaming"
NDJSON_TYPE: Final = "application/x-ndjson"
#: curl's default type for a body, accepted as NDJSON.
FORM_TYPE: Final = "application/x-www-form-urlencoded"
_NDJSON_TYPES: Final = frozenset({"", NDJSON_TYPE, "application/json", FORM_TYPE, CONTENT_TYPE})
#: Fields that identify the first object of a body as a chunk, rather than the parameters of the request.
CHUNK_MARKERS: Final = CHUNK_ONLY_FIELDS | {"modality", "payload", "text", "end_of_input", "sequence_id", "offset"}
#: The largest integer that all JSON parsers represent exactly.
MAX_OFFSET: Final = 2**53 - 1
#: Query parameters that are strings, even when they look like JSON.
_TEXTS: Final = frozenset({"model", "voice", "instructions", "request_id"})


class ChunkObject(ChunkFields, frozen=True, kw_only=True):
    """An input chunk as a JSON object in a body."""

    type: Literal["input_chunk"] | None = None
    sequence_id: SequenceId | None = None
    #: The position of the chunk in the input, as an alternative to its number.
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] | None = None


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request: the first object of a body, unless that is a chunk."""

    fields: dict[str, Any]


BodyItem: TypeAlias = Parameters | InputChunk


class BodyReader(Protocol):
    """Decodes a body incrementally: bytes in, items out. Errors name the place in the body."""

    @property
    def place(self) -> str:
        """The place of the last item yielded, such as ``line 3``; "" for forms without places."""
        ...

    @property
    def unfinished_bytes(self) -> int:
        """The bytes held of an incomplete item."""
        ...

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        """Yield the items that ``data`` completes. Raises an OmniError for the first invalid one."""
        ...

    def finish(self) -> Iterator[BodyItem]:
        """Yield the items that the end of the body completes. Raises as ``feed`` does."""
        ...


class NdjsonBody:
    """One JSON object on each line."""

    def __init__(self, *, max_chunk_bytes: int) -> None:
        self._lines = NdjsonDecoder(max_line_bytes=max_frame_bytes(max_chunk_bytes))
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
    """Frames that are either JSON objects, recognised by their ``{``, or binary frames."""

    def __init__(self, *, prefix_bytes: int, max_chunk_bytes: int) -> None:
        self._frames = LengthPrefixedDecoder(
            prefix_bytes=prefix_bytes, max_frame_bytes=max_frame_bytes(max_chunk_bytes)
        )
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
    """A body that is the audio itself. The items are chunks of at most ``max_chunk_bytes``."""

    place = ""
    unfinished_bytes = 0

    def __init__(self, *, media_type: str, max_chunk_bytes: int) -> None:
        self.media_type = media_type
        self._max_chunk_bytes = max_chunk_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        for start in range(0, len(data), self._max_chunk_bytes):
            yield InputChunk(Modality.AUDIO, data[start : start + self._max_chunk_bytes], continues=True)

    def finish(self) -> Iterator[BodyItem]:
        yield from ()


class _Objects:
    """Decodes objects. The first one may be the parameters, all others are chunks."""

    def __init__(self) -> None:
        self._first = True

    def read(self, data: bytes) -> BodyItem:
        first, self._first = self._first, False
        try:
            if first:
                fields = loads_object(data)
                if not CHUNK_MARKERS & fields.keys() and fields.get("type") != "input_chunk":
                    return Parameters(fields)
            str(data, "utf-8")  # the decoder does not validate the values of unknown fields
            check_values(data)
            line = _line_decoder.decode(data)
        except msgspec.DecodeError as error:
            kind = loads_object(data).get("type", "input_chunk")
            if isinstance(kind, str) and kind != "input_chunk":
                raise UnknownType("only input chunks may follow the parameters", param="type") from None
            raise field_error(error) from None
        except RecursionError:
            raise InvalidFrame("the line is nested too deeply") from None
        except UnicodeDecodeError:
            raise InvalidFrame("invalid UTF-8") from None
        return to_chunk(line, line.sequence_id, line.offset)

    def read_binary(self, data: bytes) -> BodyItem:
        self._first = False
        item = decode_input(data)
        if isinstance(item, RefusedChunk):
            raise item.error
        return item


_line_decoder: Final[msgspec.json.Decoder[ChunkObject]] = msgspec.json.Decoder(ChunkObject)


def body_reader(content_type: str, *, max_chunk_bytes: int) -> BodyReader:
    """Return the reader for a content type. Raises UnsupportedFormat or InvalidValue for an unsupported one."""
    media_type, _, attributes = content_type.partition(";")
    media_type = media_type.strip().lower()
    if media_type.startswith("audio/"):
        return RawAudioBody(media_type=content_type.strip(), max_chunk_bytes=max_chunk_bytes)
    if media_type not in _NDJSON_TYPES:
        raise UnsupportedFormat(
            f"unsupported streaming body {media_type[:64]!r}; supported: NDJSON, {CONTENT_TYPE}, audio/*",
            param="Content-Type",
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
                f"unknown framing {unknown[:32]!r}; supported: ndjson, length32, length64", param="framing"
            )


def query_parameters(query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the parameters in a query string. Values that parse as JSON are JSON, all others strings.

    ``modalities`` may be a comma-separated list; a dotted name sets a field of an object (``sampling.max_tokens=5``).
    Raises InvalidValue for a name that is both a value and an object.
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
                raise InvalidValue(f"{part} must be either a value or an object, not both", param=part)
            target = inner
        target[last] = value
    return fields


def placed(error: OmniError, place: str) -> OmniError:
    """Prefix an error's message with the place of the item that caused it."""
    if place:
        error.message = f"{place}: {error.message}"
    return error
