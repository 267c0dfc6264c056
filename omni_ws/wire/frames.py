"""Frames of native clients: JSON and binary, and the input chunks in HTTP bodies."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeAlias, get_args

import msgspec
import orjson
from msgspec import Meta, Struct

from omni_ws.core.chunks import (
    MAX_FORMAT_CHARACTERS,
    MAX_ID_CHARACTERS,
    MAX_REF_CHARACTERS,
    InputChunk,
    Modality,
    Offset,
    OutputChunk,
)
from omni_ws.core.file_heads import sniff_image
from omni_ws.core.json_values import MAX_MESSAGE_VALUES, check_values
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, UnknownType, UnsupportedParameter
from omni_ws.wire.session_config import MAX_DEPTH, invalid_value

# The fields of an input chunk in JSON.

#: The largest integer that all JSON parsers represent exactly (RFC 8259, section 6).
MAX_TIMESTAMP_MS: Final = 2**53 - 1


class AcceptedFields(Struct, frozen=True, kw_only=True):
    """The fields that a chunk may have besides its number; at most one of ``payload`` and ``text``."""

    modality: Modality | None = None
    payload: bytes | None = None
    text: str | None = None
    format: Annotated[str, Meta(max_length=MAX_FORMAT_CHARACTERS)] | None = None
    timestamp_ms: (
        Annotated[int, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | Annotated[float, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | None
    ) = None
    end_of_input: bool | None = None
    role: str | None = None
    tool_call_id: Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)] | None = None


class ChunkFields(AcceptedFields, frozen=True, kw_only=True):
    """The fields of a chunk, and the names that other APIs use for its content, which must be absent or null.

    The names of other APIs are refused so that a client that is written for one of these does not silently lose its
    input; their type, None, makes the decoder refuse them. They come last, because the decoder looks for a name in the
    order of the fields.
    """

    url: None = None
    data: None = None
    content: None = None
    delta: None = None
    file: None = None
    image: None = None
    video: None = None
    image_url: None = None
    audio_url: None = None
    video_url: None = None
    base64: None = None
    b64: None = None
    b64_json: None = None
    bytes: None = None
    binary: None = None
    blob: None = None
    body: None = None
    buffer: None = None
    raw: None = None
    encoded: None = None
    payloads: None = None
    payload_base64: None = None
    chunk: None = None
    chunks: None = None
    contents: None = None
    texts: None = None
    text_delta: None = None
    input_text: None = None
    transcript: None = None
    message: None = None
    output: None = None
    result: None = None
    token_ids: None = None
    input_ids: None = None
    tokens: None = None
    files: None = None
    file_data: None = None
    file_id: None = None
    file_url: None = None
    file_path: None = None
    attachment: None = None
    attachments: None = None
    document: None = None
    parts: None = None
    media: None = None
    media_url: None = None
    uri: None = None
    src: None = None
    href: None = None
    inline_data: None = None
    inlineData: None = None
    imageUrl: None = None
    audio_data: None = None
    speech: None = None
    pcm: None = None
    wav: None = None
    mp3: None = None
    samples: None = None
    sample: None = None
    input_image: None = None
    image_data: None = None
    pixels: None = None
    input_video: None = None
    video_data: None = None
    frame: None = None
    frames: None = None
    # Names that are request parameters, too.
    audio: None = None
    input_audio: None = None
    images: None = None
    audios: None = None
    videos: None = None
    messages: None = None
    input: None = None
    prompt: None = None


REFUSED_CONTENT_FIELDS: Final = frozenset(ChunkFields.__struct_fields__) - frozenset(AcceptedFields.__struct_fields__)
#: The names that no request parameter has: an object that contains one is a chunk, not the parameters.
CHUNK_ONLY_FIELDS: Final = REFUSED_CONTENT_FIELDS - {
    *("audio", "input_audio", "images", "audios", "videos", "messages", "input", "prompt")
}


# JSON frames of native WebSocket clients.

SequenceId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_ID)]
Ref: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_REF_CHARACTERS)]
#: The allowance for the JSON around the base64 of a chunk.
_FRAME_OVERHEAD_BYTES: Final = 64 * 1024


class InputChunkFrame(ChunkFields, frozen=True, kw_only=True, tag_field="type", tag="input_chunk"):
    """A chunk of input."""

    sequence_id: SequenceId
    #: Refused, since offsets count within a request, and numbers here count over the whole connection.
    offset: None = None
    #: The client's name for the request. Chunks over HTTP have no ``ref``: there the field is unknown.
    ref: Ref | None = None


class SessionConfigFrame(Struct, frozen=True, tag_field="type", tag="session_config"):
    """Changes fields of the configuration; see ``wire.session_config``."""


class FinishFrame(Struct, frozen=True, tag_field="type", tag="finish"):
    """The end of the request's input."""


class CancelFrame(Struct, frozen=True, tag_field="type", tag="cancel"):
    """Cancels a request; without ``request_id`` the one being answered and the one whose input is open."""

    request_id: str | None = None


class HistoryTruncateFrame(Struct, frozen=True, tag_field="type", tag="history_truncate"):
    """Removes this request and all later ones from the history."""

    request_id: str


class HistoryGetFrame(Struct, frozen=True, tag_field="type", tag="history_get"):
    """Asks for the history: as requests see it or, with ``original``, all messages that the server keeps."""

    original: bool = False


class OutputAckFrame(Struct, frozen=True, tag_field="type", tag="output_ack"):
    """Acknowledges outputs up to ``sequence_id``; ``played_ms`` of the answer to ``request_id`` were heard.

    Without ``request_id`` it is about the answer that plays by the server's line, and ``sequence_id`` is required.
    """

    sequence_id: SequenceId | None = None
    played_ms: Annotated[float, Meta(ge=0)] | None = None
    request_id: str | None = None


class PingFrame(Struct, frozen=True, tag_field="type", tag="ping"):
    """Asks for a pong, which repeats ``t``."""

    t: Any = None


class ConfigPatch(Struct, frozen=True):
    """A decoded ``session_config`` frame; its ``fields`` are not validated."""

    fields: dict[str, Any]


class RefusedChunk(Struct, frozen=True):
    """An invalid input chunk with a valid number. The number counts as used: no gap is left."""

    sequence_id: int
    error: InvalidRequest


ClientFrame: TypeAlias = (
    InputChunk
    | RefusedChunk
    | ConfigPatch
    | FinishFrame
    | CancelFrame
    | HistoryTruncateFrame
    | HistoryGetFrame
    | OutputAckFrame
    | PingFrame
)
_TypedFrame: TypeAlias = (
    InputChunkFrame
    | SessionConfigFrame
    | FinishFrame
    | CancelFrame
    | HistoryTruncateFrame
    | HistoryGetFrame
    | OutputAckFrame
    | PingFrame
)
CLIENT_FRAMES: Final[tuple[type[Struct], ...]] = get_args(_TypedFrame)
CLIENT_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in CLIENT_FRAMES)

_NO_OFFSETS: Final = "offset is not supported over WebSocket; use sequence_id"

#: The fields of a chunk whose JSON type is part of the frame's syntax: for a wrong type the code is ``invalid_frame``.
_FORM_FIELDS: Final = frozenset({"payload", "text", "type"})

_decoder: Final[msgspec.json.Decoder[_TypedFrame]] = msgspec.json.Decoder(_TypedFrame)


def max_frame_bytes(max_chunk_bytes: int) -> int:
    """Return the size of the longest WebSocket message, line or frame that a chunk of ``max_chunk_bytes`` needs."""
    return max_chunk_bytes * 4 // 3 + _FRAME_OVERHEAD_BYTES


def decode_frame(data: bytes | bytearray | memoryview) -> ClientFrame:
    """Decode a client's text frame. An invalid chunk with a valid number is returned as a RefusedChunk.

    msgspec parses, validates and decodes base64 in one pass, in C. A frame that fails is parsed again to find the cause
    of the failure.

    Raises InvalidFrame, InvalidValue, UnsupportedParameter or UnknownType; and UnicodeDecodeError, which each transport
    reports in its own way.
    """
    str(data, "utf-8")  # the decoder does not validate the values of unknown fields
    try:
        check_values(data)
        frame = _decoder.decode(data)
    except msgspec.DecodeError as error:
        return _refuse(data, error)
    except RecursionError:
        raise InvalidFrame("the frame is nested too deeply") from None
    if isinstance(frame, InputChunkFrame):
        try:
            return to_chunk(frame, frame.sequence_id, ref=frame.ref)
        except InvalidRequest as refusal:
            return RefusedChunk(frame.sequence_id, refusal.about(ref=frame.ref))
    if isinstance(frame, SessionConfigFrame):
        fields = loads_object(data)  # the typed decoder skips fields whose values may be invalid, such as 1e999
        if nested_deeper(fields, MAX_DEPTH):
            raise InvalidFrame("the frame is nested too deeply")
        del fields["type"]
        return ConfigPatch(fields)
    if isinstance(frame, OutputAckFrame) and frame.sequence_id is None and frame.request_id is None:
        raise InvalidValue("output_ack requires sequence_id or request_id", param="sequence_id")
    if isinstance(frame, PingFrame) and nested_deeper(frame.t, MAX_DEPTH):
        raise InvalidFrame("the frame is nested too deeply")
    return frame


def to_chunk(
    fields: ChunkFields, sequence_id: int | None, offset: int | None = None, *, ref: str | None = None
) -> InputChunk:
    """Convert the fields to a chunk, with the position ``offset`` if it has no number. ``ref``: see InputChunk.

    Raises InvalidValue for contradictory fields.
    """
    payload, text, modality = fields.payload, fields.text, fields.modality
    if text is not None:
        if payload is not None:
            raise InvalidValue(
                "a chunk must have either payload or text, not both", param="text", sequence_id=sequence_id
            )
        if modality is None:
            modality = Modality.TEXT
        elif modality is not Modality.TEXT:
            raise InvalidValue(
                f"text requires modality text, got {modality}", param="modality", sequence_id=sequence_id
            )
        payload = text.encode()
    if fields.role is not None or fields.tool_call_id is not None:
        _check_tool_result(fields, modality, sequence_id)
    timestamp_ms = fields.timestamp_ms
    return InputChunk(
        modality or Modality.AUDIO,
        payload or b"",
        sequence_id,
        fields.format,
        None if timestamp_ms is None else int(timestamp_ms),
        fields.end_of_input is True,
        fields.tool_call_id,
        None if offset is None else _offset(offset, fields, modality, sequence_id),
        False,
        ref,
    )


def _offset(start: int, fields: ChunkFields, modality: Modality | None, sequence_id: int | None) -> Offset:
    """Return the chunk's offset. Raises InvalidValue for a chunk that also has a number, or that must not be split."""
    if sequence_id is not None:
        raise InvalidValue(
            "a chunk must have either sequence_id or offset, not both", param="offset", sequence_id=sequence_id
        )
    if modality is Modality.IMAGE or (start == 0 and modality is Modality.VIDEO and sniff_image(fields.payload or b"")):
        raise InvalidValue("an image must be sent in one chunk, without offset", param="offset")
    if fields.tool_call_id is not None:
        raise InvalidValue("a tool result must be sent in one chunk, without offset", param="offset")
    return Offset(start, in_characters=fields.text is not None)


def _check_tool_result(fields: ChunkFields, modality: Modality | None, sequence_id: int | None) -> None:
    """Raise InvalidValue unless the chunk is the text of a tool result: role ``tool``, and the ID of its call."""
    if fields.role not in (None, "user", "tool"):
        raise InvalidValue("role must be user or tool", param="role", sequence_id=sequence_id)
    if fields.role == "user" and fields.tool_call_id is None:
        return
    if fields.role != "tool":
        raise InvalidValue("tool_call_id requires role tool", param="role", sequence_id=sequence_id)
    if not fields.tool_call_id:
        raise InvalidValue("a tool result requires tool_call_id", param="tool_call_id", sequence_id=sequence_id)
    if modality is not Modality.TEXT:
        raise InvalidValue("a tool result must be text", param="modality", sequence_id=sequence_id)


def nested_deeper(value: Any, levels: int) -> bool:
    """Return whether arrays and objects are nested more than ``levels`` deep.

    Some values are sent back to the client, and encoding a nested value may exhaust the stack where decoding did not.
    """
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(nested_deeper(inner, levels - 1) for inner in value)


def loads_object(data: bytes | bytearray | memoryview, *, most: int = MAX_MESSAGE_VALUES) -> dict[str, Any]:
    """Parse a JSON object of at most ``most`` values. Raises InvalidFrame; UnicodeDecodeError for invalid UTF-8."""
    try:
        check_values(data, most)
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        bytes(data).decode("utf-8")
        is_comment = error.doc.startswith(("//", "/*", "#"), error.pos)
        hint = "; JSON has no comments, remove them" if is_comment else ""
        raise InvalidFrame(f"not JSON: {error}{hint}") from None
    if not isinstance(parsed, dict):
        raise InvalidFrame("a frame must be a JSON object")
    return parsed


def _refuse(data: bytes | bytearray | memoryview, cause: msgspec.DecodeError) -> RefusedChunk:
    """Find the error of a frame that did not decode: return a RefusedChunk, or raise the error."""
    parsed = loads_object(data)
    kind = parsed.get("type")
    if not isinstance(kind, str):
        raise InvalidFrame("a frame must have a type, a string", param="type")
    if kind not in CLIENT_TYPES:
        raise UnknownType(f"unknown frame type {kind[:64]!r}", param="type")
    error = field_error(cause)
    if error.param == "offset":
        error = UnsupportedParameter(_NO_OFFSETS, param="offset")
    sequence_id = parsed.get("sequence_id")
    if kind == "input_chunk" and sequence_id is None and parsed.get("offset") is not None:
        raise UnsupportedParameter(_NO_OFFSETS, param="offset")
    if kind == "input_chunk" and type(sequence_id) is int and 0 <= sequence_id <= MAX_SEQUENCE_ID:
        return RefusedChunk(sequence_id, error.about(sequence_id=sequence_id, ref=_ref(parsed)))
    raise error


def _ref(parsed: dict[str, Any]) -> str | None:
    """Return the ``ref`` of a parsed chunk; None if it has no valid one."""
    try:
        return msgspec.convert(parsed.get("ref"), Ref | None)
    except msgspec.ValidationError:
        return None


def field_error(cause: msgspec.DecodeError) -> InvalidRequest:
    """Return the error for a field that msgspec refused.

    It is InvalidFrame for invalid syntax, UnsupportedParameter for a name that other APIs use for content, and
    InvalidValue for other invalid values.
    """
    if not isinstance(cause, msgspec.ValidationError):
        return InvalidFrame(f"not JSON: {cause}")
    error = invalid_value(cause)
    if error.param in REFUSED_CONTENT_FIELDS:
        return UnsupportedParameter("the content of a chunk must be in payload or text", param=error.param)
    if error.param in _FORM_FIELDS:
        return InvalidFrame(error.message, param=error.param)
    return error


# Binary frames: a 12-byte header followed by the bare payload.
#
# The header is big-endian: u8 version (1), u8 kind (1 input_chunk, 2 output_chunk), u8 modality (1 text, 2 audio, 3
# video, 4 image), u8 flags (bit 0: end_of_input, bit 1: timestamp present), u32 sequence_id, u32 timestamp_ms.

HEADER: Final = struct.Struct(">BBBBII")
VERSION: Final = 1
KIND_INPUT: Final = 1
KIND_OUTPUT: Final = 2
FLAG_END: Final = 0b01
FLAG_TIMESTAMP: Final = 0b10
_KNOWN_FLAGS: Final = FLAG_END | FLAG_TIMESTAMP

MODALITY_BYTES: Final = {Modality.TEXT: 1, Modality.AUDIO: 2, Modality.VIDEO: 3, Modality.IMAGE: 4}
_MODALITIES: Final = {byte: modality for modality, byte in MODALITY_BYTES.items()}
#: The same header with version and kind read as one number, which takes one comparison to check.
_INPUT_HEADER: Final = struct.Struct(">HBBII")
_INPUT: Final = VERSION << 8 | KIND_INPUT
_HEADER_BYTES: Final = HEADER.size
_MAX_U32: Final = 2**32 - 1


def decode_input(data: bytes | bytearray | memoryview) -> InputChunk | RefusedChunk:
    """Decode an input frame.

    Returns a RefusedChunk when the frame is invalid but its sequence number is known. Raises InvalidFrame for a short
    header, or an unknown version or kind.
    """
    if len(data) < _HEADER_BYTES:
        raise InvalidFrame(f"a binary frame must begin with a header of {_HEADER_BYTES} bytes, got {len(data)}")
    version_and_kind, modality_byte, flags, sequence_id, timestamp_ms = _INPUT_HEADER.unpack_from(data)
    if version_and_kind != _INPUT:
        raise InvalidFrame(f"unknown binary header: version {data[0]}, kind {data[1]}")
    modality = _MODALITIES.get(modality_byte)
    if modality is None or flags > _KNOWN_FLAGS:
        what = f"modality {modality_byte}" if modality is None else f"flags {flags:#04x}"
        return RefusedChunk(sequence_id, InvalidFrame(f"unknown binary header: {what}", sequence_id=sequence_id))
    payload = data[_HEADER_BYTES:]
    return InputChunk(
        modality,
        payload if type(payload) is bytes else bytes(payload),
        sequence_id,
        None,
        timestamp_ms if flags & FLAG_TIMESTAMP else None,
        flags & FLAG_END != 0,
    )


def encode_input(chunk: InputChunk) -> bytes:
    """Encode a chunk that has a number and no ``format``, for clients. Raises ValueError for any other chunk.

    The frame has no place for ``tool_call_id``, ``offset`` and ``ref``: they are lost.
    """
    if chunk.sequence_id is None or chunk.format is not None:
        raise ValueError("a binary frame must have a sequence_id and no format")
    flags = FLAG_END if chunk.end_of_input else 0
    if chunk.timestamp_ms is not None:
        flags |= FLAG_TIMESTAMP
    header = HEADER.pack(
        VERSION, KIND_INPUT, MODALITY_BYTES[chunk.modality], flags, chunk.sequence_id, chunk.timestamp_ms or 0
    )
    return header + chunk.payload


def encode_output_audio(chunk: OutputChunk) -> bytes:
    """Encode audio of an answer; the frame's timestamp is ``start_ms``."""
    flags = 0 if chunk.start_ms is None else FLAG_TIMESTAMP
    start_ms = min(chunk.start_ms or 0, _MAX_U32)
    number = chunk.sequence_id & _MAX_U32
    return HEADER.pack(VERSION, KIND_OUTPUT, MODALITY_BYTES[Modality.AUDIO], flags, number, start_ms) + chunk.payload


@dataclass(frozen=True, slots=True)
class BinaryAudio:
    """An output frame, decoded by a client: audio in the session's output format. ``start_ms`` is None if absent."""

    sequence_id: int
    start_ms: int | None
    payload: bytes


def decode_output_audio(data: bytes) -> BinaryAudio:
    """Decode an output frame, for clients. Raises InvalidFrame."""
    if len(data) < HEADER.size:
        raise InvalidFrame("a binary frame is shorter than its header")
    version, kind, modality_byte, flags, sequence_id, start_ms = HEADER.unpack_from(data)
    if (version, kind, modality_byte) != (VERSION, KIND_OUTPUT, MODALITY_BYTES[Modality.AUDIO]):
        raise InvalidFrame("not an output audio frame")
    return BinaryAudio(sequence_id, start_ms if flags & FLAG_TIMESTAMP else None, data[HEADER.size :])
