"""JSON frames that clients of the native WebSocket send (and, line by line, HTTP bodies): typed.

One pass in C: msgspec parses, validates and decodes base64 together. Only a frame that fails is looked at again, to
say what is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson
from msgspec import Meta, Struct

from omni_ws.core.chunks import InputChunk, Modality, Offset
from omni_ws.core.image_type import sniff_image
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, UnknownType, UnsupportedParameter
from omni_ws.wire.refused_fields import REFUSED_CONTENT_FIELDS, RefusedContentFields
from omni_ws.wire.session_config import (
    MAX_DEPTH,
    invalid_value,
)

SequenceId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_ID)]
#: The largest number that every JSON parser keeps exact (RFC 8259, 6): room for milliseconds since any epoch.
MAX_TIMESTAMP_MS: Final = 2**53 - 1


class ChunkFields(RefusedContentFields, frozen=True, kw_only=True):
    """What an input chunk may say, wherever it comes from. Exactly one of ``payload`` and ``text``, or neither."""

    modality: Modality | None = None
    payload: bytes | None = None
    text: str | None = None
    format: str | None = None
    timestamp_ms: (
        Annotated[int, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | Annotated[float, Meta(ge=0, le=MAX_TIMESTAMP_MS)] | None
    ) = None
    end_of_input: bool | None = None
    role: str | None = None
    tool_call_id: str | None = None


class InputChunkFrame(ChunkFields, frozen=True, kw_only=True, tag_field="type", tag="input_chunk"):
    sequence_id: SequenceId
    #: Numbers run over all requests of a connection, offsets over one: known here only to be refused by its name.
    offset: None = None


class SessionConfigFrame(Struct, frozen=True, tag_field="type", tag="session_config"):
    """The fields are merged as they came; see ``wire.session_config``."""


class FinishFrame(Struct, frozen=True, tag_field="type", tag="finish"):
    pass


class CancelFrame(Struct, frozen=True, tag_field="type", tag="cancel"):
    request_id: str | None = None


class HistoryTruncateFrame(Struct, frozen=True, tag_field="type", tag="history_truncate"):
    """This request and all later ones are dropped from the history."""

    request_id: str


class OutputAckFrame(Struct, frozen=True, tag_field="type", tag="output_ack"):
    sequence_id: SequenceId
    played_ms: Annotated[float, Meta(ge=0)] | None = None


class PingFrame(Struct, frozen=True, tag_field="type", tag="ping"):
    t: Any = None


class ConfigPatch(Struct, frozen=True):
    """A ``session_config`` frame: the fields that it wants changed, as they came."""

    fields: dict[str, Any]


class RefusedChunk(Struct, frozen=True):
    """An input chunk that cannot be accepted, whose number could be read and is used up by it."""

    sequence_id: int
    error: InvalidRequest


ClientFrame: TypeAlias = (
    InputChunk
    | RefusedChunk
    | ConfigPatch
    | FinishFrame
    | CancelFrame
    | HistoryTruncateFrame
    | OutputAckFrame
    | PingFrame
)
_TypedFrame: TypeAlias = (
    InputChunkFrame | SessionConfigFrame | FinishFrame | CancelFrame | HistoryTruncateFrame | OutputAckFrame | PingFrame
)
CLIENT_FRAMES: Final = (
    InputChunkFrame,
    SessionConfigFrame,
    FinishFrame,
    CancelFrame,
    HistoryTruncateFrame,
    OutputAckFrame,
    PingFrame,
)
CLIENT_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in CLIENT_FRAMES)

_NO_OFFSETS: Final = "chunks of a WebSocket are numbered by sequence_id"

#: Known fields of a chunk whose JSON type is part of the frame's form: getting it wrong is ``invalid_frame``.
_FORM_FIELDS: Final = frozenset({"payload", "text", "type"})

_decoder: Final[msgspec.json.Decoder[_TypedFrame]] = msgspec.json.Decoder(_TypedFrame)


def decode_frame(data: bytes | bytearray | memoryview) -> ClientFrame:
    """One JSON text frame of a client.

    Raises InvalidFrame, InvalidValue, UnsupportedParameter or UnknownType; UnicodeDecodeError for what is not UTF-8,
    which each transport answers in its own way.
    """
    str(data, "utf-8")  # the parser skips fields that it does not know without looking at their bytes
    try:
        frame = _decoder.decode(data)
    except msgspec.DecodeError as error:
        return _refuse(data, error)
    except RecursionError:
        raise InvalidFrame("the frame is nested too deeply") from None
    if isinstance(frame, InputChunkFrame):
        try:
            return to_chunk(frame, frame.sequence_id)
        except InvalidRequest as refusal:
            return RefusedChunk(frame.sequence_id, refusal)
    if isinstance(frame, SessionConfigFrame):
        fields = loads_object(data)  # the typed decoder has skipped what may still be no JSON, such as 1e999
        if nested_deeper(fields, MAX_DEPTH):
            raise InvalidFrame("the frame is nested too deeply")
        del fields["type"]
        return ConfigPatch(fields)
    if isinstance(frame, PingFrame) and nested_deeper(frame.t, MAX_DEPTH):
        raise InvalidFrame("the frame is nested too deeply")
    return frame


def to_chunk(fields: ChunkFields, sequence_id: int | None, offset: int | None = None) -> InputChunk:
    """Raises InvalidValue for fields that contradict each other, UnsupportedParameter for those refused by name."""
    payload, text, modality = fields.payload, fields.text, fields.modality
    if text is not None:
        if payload is not None:
            raise InvalidValue("a chunk has a payload or a text, not both", param="text", sequence_id=sequence_id)
        if modality is None:
            modality = Modality.TEXT
        elif modality is not Modality.TEXT:
            raise InvalidValue(
                f"text goes with modality text, not {modality}", param="modality", sequence_id=sequence_id
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
    )


def _offset(start: int, fields: ChunkFields, modality: Modality | None, sequence_id: int | None) -> Offset:
    """Raises InvalidValue for a chunk that is numbered besides, or that is no piece of anything longer."""
    if sequence_id is not None:
        raise InvalidValue("a chunk has a sequence_id or an offset, not both", param="offset", sequence_id=sequence_id)
    if modality is Modality.IMAGE or (start == 0 and modality is Modality.VIDEO and sniff_image(fields.payload or b"")):
        raise InvalidValue("an image comes whole, and has no offset", param="offset")
    if fields.tool_call_id is not None:
        raise InvalidValue("the result of a tool comes whole, and has no offset", param="offset")
    return Offset(start, in_characters=fields.text is not None)


def _check_tool_result(fields: ChunkFields, modality: Modality | None, sequence_id: int | None) -> None:
    """Raises InvalidValue unless it is text of the role ``tool`` that names its call."""
    if fields.role not in (None, "user", "tool"):
        raise InvalidValue("role is user or tool", param="role", sequence_id=sequence_id)
    if fields.role == "user" and fields.tool_call_id is None:
        return
    if fields.role != "tool":
        raise InvalidValue("a tool_call_id goes with the role tool", param="role", sequence_id=sequence_id)
    if not fields.tool_call_id:
        raise InvalidValue("the result of a tool names its call", param="tool_call_id", sequence_id=sequence_id)
    if modality is not Modality.TEXT:
        raise InvalidValue("the result of a tool is text", param="modality", sequence_id=sequence_id)


def nested_deeper(value: Any, levels: int) -> bool:
    """Whether arrays and objects stand inside one another more than ``levels`` times.

    What a client nests is sent back to it, and an encoder may run out of stack where the decoder did not.
    """
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list):
        return False
    return levels == 0 or any(nested_deeper(inner, levels - 1) for inner in value)


def loads_object(data: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Any JSON object. Raises InvalidFrame, or UnicodeDecodeError for what is not UTF-8."""
    try:
        parsed = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        bytes(data).decode("utf-8")
        raise InvalidFrame(f"not JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise InvalidFrame("a frame is a JSON object")
    return parsed


def _refuse(data: bytes | bytearray | memoryview, cause: msgspec.DecodeError) -> RefusedChunk:
    """Say what is wrong with a frame that did not decode."""
    parsed = loads_object(data)
    kind = parsed.get("type")
    if not isinstance(kind, str):
        raise InvalidFrame("a frame has a type, which is a string", param="type")
    if kind not in CLIENT_TYPES:
        raise UnknownType(f"unknown frame type {kind[:64]!r}", param="type")
    error = field_error(cause)
    if error.param == "offset":
        error = UnsupportedParameter(_NO_OFFSETS, param="offset")
    sequence_id = parsed.get("sequence_id")
    if kind == "input_chunk" and sequence_id is None and parsed.get("offset") is not None:
        raise UnsupportedParameter(_NO_OFFSETS, param="offset")
    if kind == "input_chunk" and type(sequence_id) is int and 0 <= sequence_id <= MAX_SEQUENCE_ID:
        error.sequence_id = sequence_id
        return RefusedChunk(sequence_id, error)
    raise error


def field_error(cause: msgspec.DecodeError) -> InvalidRequest:
    """The error of one field: ``invalid_frame`` where the form is wrong, ``invalid_value`` where the value is,
    ``unsupported_parameter`` where it is one that content does not come in."""
    if not isinstance(cause, msgspec.ValidationError):
        return InvalidFrame(f"not JSON: {cause}")
    error = invalid_value(cause)
    if error.param in REFUSED_CONTENT_FIELDS:
        return UnsupportedParameter("the content of a chunk is its payload or its text", param=error.param)
    if error.param in _FORM_FIELDS:
        return InvalidFrame(error.message, param=error.param)
    return error
