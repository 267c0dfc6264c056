"""Parsers of the bodies of streamed requests (Mode A), in four forms, and of Mode B's create and append requests.

A streamed body has one of four forms: NDJSON, frames with a length of 4 or of 8 bytes before each, or raw audio. All
forms but raw audio have the parameters of the request, if any, followed by chunks. ``LoneObject`` distinguishes a body
that is one JSON object from NDJSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
import orjson
from msgspec import Meta

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.json_values import MAX_BODY_VALUES, check_values
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import (
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    PayloadTooLarge,
    UnknownType,
    UnsupportedFormat,
)
from omni_ws.wire.frames import (
    CHUNK_ONLY_FIELDS,
    ChunkFields,
    RefusedChunk,
    SequenceId,
    decode_input,
    field_error,
    loads_object,
    max_frame_bytes,
    to_chunk,
)

# Streamed bodies.

CONTENT_TYPE: Final = "application/x-multipart-streaming"
NDJSON_TYPE: Final = "application/x-ndjson"
#: The default type of curl for a body; accepted as NDJSON.
FORM_TYPE: Final = "application/x-www-form-urlencoded"
_NDJSON_TYPES: Final = frozenset({"", NDJSON_TYPE, "application/json", FORM_TYPE, CONTENT_TYPE})
#: The fields that show that the first object of a body is a chunk, and not the parameters of the request.
CHUNK_MARKERS: Final = CHUNK_ONLY_FIELDS | {"modality", "payload", "text", "end_of_input", "sequence_id", "offset"}
#: The largest integer that all JSON parsers represent exactly.
MAX_OFFSET: Final = 2**53 - 1
#: The query parameters that are strings even if they look like JSON.
_TEXTS: Final = frozenset({"model", "voice", "instructions", "prompt", "request_id"})


class ChunkObject(ChunkFields, frozen=True, kw_only=True):
    """An input chunk as a JSON object in a body."""

    type: Literal["input_chunk"] | None = None
    sequence_id: SequenceId | None = None
    #: The position of the chunk in the input, which may be given in place of a number.
    offset: Annotated[int, Meta(ge=0, le=MAX_OFFSET)] | None = None


#: An item of a body: the parameters of the request, which only the first object may be, or a chunk.
BodyItem: TypeAlias = dict[str, Any] | InputChunk


class ObjectBody:
    """Parses a body of JSON objects, each on a line or in a length-prefixed frame. Binary frames are chunks, too.

    The first object may be the parameters of the request; all others are chunks. ``prefix_bytes`` is the size of the
    length before each frame, 0 for lines. Errors name the line or the frame.
    """

    def __init__(self, *, max_chunk_bytes: int, prefix_bytes: int = 0) -> None:
        longest = max_frame_bytes(max_chunk_bytes)
        self._pieces: NdjsonDecoder | LengthPrefixedDecoder = (
            LengthPrefixedDecoder(prefix_bytes=prefix_bytes, max_frame_bytes=longest)
            if prefix_bytes
            else NdjsonDecoder(max_line_bytes=longest)
        )
        self.prefix_bytes = prefix_bytes
        self._first = True

    @property
    def place(self) -> str:
        """The place of the last item that was yielded, such as ``line 3``."""
        return self._pieces.place

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of an incomplete item that are buffered."""
        return self._pieces.unfinished_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        """Yield the items that ``data`` completes. Raises an OmniError for the first invalid one."""
        return self._items(self._pieces.feed(data))

    def finish(self) -> Iterator[BodyItem]:
        """Yield the items that the end of the body completes. Raises as ``feed`` does."""
        return self._items(self._pieces.finish())

    def _items(self, pieces: Iterable[bytes]) -> Iterator[BodyItem]:
        for piece in pieces:
            first, self._first = self._first, False
            try:
                item = _binary_chunk(piece) if self.prefix_bytes and piece[:1] != b"{" else _object(piece, first=first)
            except OmniError as error:
                raise placed(error, self.place) from None
            yield item


class RawAudioBody:
    """Parses a body of raw audio. Its items are chunks of at most ``max_chunk_bytes``; ``place`` is always empty."""

    place: Final = ""
    unfinished_bytes: Final = 0

    def __init__(self, *, media_type: str, max_chunk_bytes: int) -> None:
        self.media_type = media_type
        self._max_chunk_bytes = max_chunk_bytes

    def feed(self, data: bytes) -> Iterator[BodyItem]:
        for start in range(0, len(data), self._max_chunk_bytes):
            yield InputChunk(Modality.AUDIO, data[start : start + self._max_chunk_bytes], continues=True)

    def finish(self) -> Iterator[BodyItem]:
        yield from ()


#: A parser that takes a body in pieces of bytes, and yields items.
BodyReader: TypeAlias = ObjectBody | RawAudioBody


def _object(data: bytes, *, first: bool) -> BodyItem:
    """Decode an object of a body: parameters if it is the ``first`` and has no field of a chunk, else a chunk."""
    try:
        if first:
            fields = loads_object(data)
            if not CHUNK_MARKERS & fields.keys() and fields.get("type") != "input_chunk":
                return fields
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


def _binary_chunk(data: bytes) -> InputChunk:
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
            return ObjectBody(max_chunk_bytes=max_chunk_bytes)
        case "length32":
            return ObjectBody(max_chunk_bytes=max_chunk_bytes, prefix_bytes=4)
        case "length64":
            return ObjectBody(max_chunk_bytes=max_chunk_bytes, prefix_bytes=8)
        case unknown:
            raise InvalidValue(
                f"unknown framing {unknown[:32]!r}; supported: ndjson, length32, length64", param="framing"
            )


def query_parameters(query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return the parameters in a query string. Values that parse as JSON are JSON, all others are strings.

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
    """Prefix an error's message with the place of the item that caused it. Return the error."""
    if place:
        error.reword(f"{place}: {error.message}")
    return error


# The framings: incremental decoders of lines and of length-prefixed frames.


class NdjsonDecoder:
    """Splits a body into lines, whatever the boundaries of the pieces in which it arrives.

    Blank lines are skipped but counted. ``line_number`` is that of the last line yielded, from 1. A line of more than
    ``max_line_bytes``, white space included, raises PayloadTooLarge.
    """

    def __init__(self, *, max_line_bytes: int) -> None:
        self.max_line_bytes = max_line_bytes
        self.line_number = 0
        self._pending = bytearray()

    @property
    def place(self) -> str:
        """The place of the last line that was yielded: ``line 3``."""
        return f"line {self.line_number}"

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of an incomplete line that are buffered."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, stripped. Raises PayloadTooLarge."""
        first, *rest = data.split(b"\n")
        self._pending += first
        for following in rest:
            yield from self._end_line()
            self._pending += following
        if len(self._pending) > self.max_line_bytes:
            self.line_number += 1
            raise self._too_long()

    def finish(self) -> Iterator[bytes]:
        """Yield the last line if it has no newline. Raises PayloadTooLarge."""
        yield from self._end_line()

    def _end_line(self) -> Iterator[bytes]:
        self.line_number += 1
        # The limit includes white space, so the result does not depend on how the body was cut.
        if len(self._pending) > self.max_line_bytes:
            raise self._too_long()
        line = bytes(self._pending).strip(b" \t\r")
        self._pending.clear()
        if line:
            yield line

    def _too_long(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"line {self.line_number} is longer than {self.max_line_bytes} bytes")


class LengthPrefixedDecoder:
    """Splits a body into frames, each preceded by its length: a big-endian integer of ``prefix_bytes`` (4 or 8).

    Empty frames are skipped but counted. ``frame_number`` is that of the last frame yielded, from 1.
    """

    def __init__(self, *, prefix_bytes: int, max_frame_bytes: int) -> None:
        self.prefix_bytes = prefix_bytes
        self.max_frame_bytes = max_frame_bytes
        self.frame_number = 0
        self._pending = bytearray()

    @property
    def place(self) -> str:
        """The place of the last frame that was yielded: ``frame 3``."""
        return f"frame {self.frame_number}"

    @property
    def unfinished_bytes(self) -> int:
        """The bytes of an incomplete frame that are buffered, its prefix included."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that ``data`` completes. Raises PayloadTooLarge as soon as a prefix exceeds the limit."""
        self._pending += data
        start = 0
        while len(self._pending) - start >= self.prefix_bytes:
            length = int.from_bytes(self._pending[start : start + self.prefix_bytes], "big")
            if length > self.max_frame_bytes:
                self.frame_number += 1
                raise PayloadTooLarge(
                    f"frame {self.frame_number}: at most {self.max_frame_bytes} bytes per frame, got {length}"
                )
            end = start + self.prefix_bytes + length
            if end > len(self._pending):
                break
            frame = bytes(self._pending[start + self.prefix_bytes : end])
            start = end
            self.frame_number += 1
            if frame:
                yield frame
        del self._pending[:start]

    def finish(self) -> Iterator[bytes]:
        """Yield nothing. Raises InvalidFrame when the body ends within a frame."""
        if self._pending:
            raise InvalidFrame(f"the body ended inside frame {self.frame_number + 1}")
        yield from ()


# Bodies of one object

_NOT_BLANK: Final = re.compile(rb"[^ \t\r\n]")


class LoneObject:
    """Tests whether a body, which arrives in pieces, is a single JSON object, possibly on several lines, or NDJSON.

    The object must have one of the fields ``marks``, so that the parameters at the beginning of an NDJSON stream do not
    match; only white space may follow the object. ``max_line_bytes`` is the longest line that NDJSON allows.

    The test reads as little as possible. The first line decides most bodies: if it is complete JSON, the body is one
    object unless more than white space follows; if it is invalid JSON, the body is not one object. Only if the first
    line ends within a value, or exceeds the limit, does ``finish`` have to decide.
    """

    def __init__(self, marks: Set[str], *, max_line_bytes: int) -> None:
        self._marks = marks
        self._max_line_bytes = max_line_bytes
        #: The body received so far.
        self.data = bytearray()
        #: The index from which the search in ``data`` continues: for the first character, then for the end of the first
        #: line, then for anything but white space after that.
        self._searched = 0
        self._first_line_at: int | None = None
        #: Whether the first line is a complete object with a mark.
        self._first_line_matches = False
        #: Whether the first line cannot be a line of NDJSON, so that an object would have to span several lines.
        self._spans_lines = False

    def feed(self, data: bytes) -> bool | None:
        """Add a piece. Return False once the body cannot be one object; None while it may be.

        Raises InvalidFrame for a first line with more than MAX_BODY_VALUES values.
        """
        self.data += data
        if self._first_line_at is None:
            self._searched = self._skip_blanks(self._searched)
            if self._searched == len(self.data):
                return None
            if self.data[self._searched] != ord("{"):
                return False
            self._first_line_at = self._searched
        if not self._first_line_matches and not self._spans_lines:
            end = self.data.find(b"\n", self._searched)
            self._searched = len(self.data) if end < 0 else end + 1
            if self._searched - self._first_line_at > self._max_line_bytes:
                self._spans_lines = True
            elif end >= 0 and not self._read_first_line(bytes(self.data[self._first_line_at : end])):
                return False
        if not self._first_line_matches:
            return None
        self._searched = self._skip_blanks(self._searched)
        return None if self._searched == len(self.data) else False

    def finish(self) -> bool:
        """Return whether the body, which is complete now, is one object. Raises InvalidFrame, as ``feed`` does."""
        if self._first_line_matches or self._first_line_at is None:
            return self._first_line_matches
        try:
            return self._is_marked(self._parsed(self.data))
        except orjson.JSONDecodeError:
            return False

    def _read_first_line(self, line: bytes) -> bool:
        """Return whether the body may still be a single object, by its complete first line."""
        try:
            self._first_line_matches = self._is_marked(self._parsed(line))
        except orjson.JSONDecodeError as error:
            self._spans_lines = 0 < len(error.doc) <= error.pos  # an error at the end: incomplete
        return self._first_line_matches or self._spans_lines

    @staticmethod
    def _parsed(data: bytes | bytearray) -> Any:
        check_values(data, MAX_BODY_VALUES)
        return orjson.loads(data)

    def _is_marked(self, value: Any) -> bool:
        return isinstance(value, dict) and not self._marks.isdisjoint(value)

    def _skip_blanks(self, start: int) -> int:
        found = _NOT_BLANK.search(self.data, start)
        return len(self.data) if found is None else found.start()


# Bodies of Mode B: one input chunk, or ``{"chunks": […]}``.

#: The most chunks of a body: an empty chunk has few bytes on the wire but takes a whole object in memory.
MAX_CHUNKS: Final = 1 << 16

#: The fields that show that a body is a chunk, unless it has ``chunk`` or ``chunks``, which contain chunks.
_LONE_CHUNK_MARKERS: Final = CHUNK_MARKERS - {"chunk", "chunks"}
#: A chunk, or the error that makes it invalid, with its sequence number where that is valid.
ChunkOrRefusal: TypeAlias = InputChunk | RefusedChunk | InvalidRequest


@dataclass(frozen=True, slots=True)
class BodyChunk:
    """A chunk of a body, and its JSON path in the body: ``chunks[2]``, or "" if the body itself is the chunk."""

    place: str
    content: ChunkOrRefusal

    def name(self, param: str | None) -> str | None:
        """Return the JSON path of the chunk's field ``param`` within the body."""
        return ".".join(filter(None, [self.place, param])) or None


def read_append(body: Mapping[str, Any]) -> list[BodyChunk]:
    """Return the chunks of an append request, invalid ones included: each chunk is accepted or refused by itself.

    Raises InvalidFrame or InvalidValue for a body without a chunk or a list of chunks, with both, or with more than
    MAX_CHUNKS chunks.
    """
    if "chunks" not in body:
        if not CHUNK_MARKERS & body.keys() and body.get("type") != "input_chunk":
            raise InvalidFrame("the body must be an input chunk, or have a list of them in chunks", param="chunks")
        return [BodyChunk("", _read_chunk(body))]
    if twice := sorted(_LONE_CHUNK_MARKERS & body.keys()):
        raise InvalidValue("a body must be either one chunk or have chunks, not both", param=twice[0])
    return _read_chunks(body["chunks"])


def read_create(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[BodyChunk]]:
    """Return the parameters of a new session, and its first chunks, from ``chunk`` or ``chunks``.

    Raises as ``read_append`` does.
    """
    parameters = {name: value for name, value in body.items() if name not in ("chunk", "chunks")}
    if misplaced := sorted((_LONE_CHUNK_MARKERS - {"modality"}) & body.keys()):
        raise InvalidValue("the first chunk must be in the field chunk", param=misplaced[0])
    chunk, chunks = body.get("chunk"), body.get("chunks")
    if chunk is not None and chunks is not None:
        raise InvalidValue("the first input must be either in chunk or in chunks, not both", param="chunk")
    if chunks is not None:
        return parameters, _read_chunks(chunks)
    return parameters, [] if chunk is None else [BodyChunk("chunk", _read_chunk(chunk))]


def _read_chunks(chunks: Any) -> list[BodyChunk]:
    if not isinstance(chunks, list):
        raise InvalidValue("chunks must be a list of input chunks", param="chunks")
    if len(chunks) > MAX_CHUNKS:
        raise InvalidValue(f"at most {MAX_CHUNKS} chunks per body, got {len(chunks)}", param="chunks")
    return [BodyChunk(f"chunks[{index}]", _read_chunk(chunk)) for index, chunk in enumerate(chunks)]


def _read_chunk(value: Any) -> ChunkOrRefusal:
    if not isinstance(value, dict):
        return InvalidFrame("a chunk must be a JSON object")
    number = value.get("sequence_id")
    try:
        return _converted(value)
    except InvalidRequest as error:
        if type(number) is not int or not 0 <= number <= MAX_SEQUENCE_ID:
            return error
        return RefusedChunk(number, error.about(sequence_id=number))


def _converted(value: dict[str, Any]) -> InputChunk:
    kind = value.get("type")
    if isinstance(kind, str) and kind != "input_chunk":
        raise UnknownType("this body accepts only input chunks", param="type")
    try:
        fields = msgspec.convert(value, ChunkObject)
    except msgspec.ValidationError as error:
        raise field_error(error) from None
    return to_chunk(fields, fields.sequence_id, fields.offset)
