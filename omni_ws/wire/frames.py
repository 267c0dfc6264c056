"""JSON frames of the native WebSocket (and, line by line, of the HTTP bodies): typed, both ways.

One pass in C: msgspec parses, validates and decodes base64 together. Only a frame that fails is looked at again, to
say what is wrong with it.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

import msgspec
import orjson
from msgspec import UNSET, Meta, Struct, UnsetType

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, OmniError, UnknownType, UnsupportedParameter
from omni_ws.wire.session_config import (
    MAX_DEPTH,
    InputAudioConfig,
    OutputAudioConfig,
    SessionConfig,
    StartPolicyConfig,
    StartPolicyName,
    invalid_value,
)

SequenceId: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_SEQUENCE_ID)]
#: The largest number that every JSON parser keeps exact (RFC 8259, 6): room for milliseconds since any epoch.
MAX_TIMESTAMP_MS: Final = 2**53 - 1

# --- client frames


class ChunkFields(Struct, frozen=True, kw_only=True):
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
    #: Another way to number chunks, which this protocol does not have: known only to be refused by its name.
    offset: Any = None


class InputChunkFrame(ChunkFields, frozen=True, kw_only=True, tag_field="type", tag="input_chunk"):
    sequence_id: SequenceId


class SessionConfigFrame(Struct, frozen=True, tag_field="type", tag="session_config"):
    """The fields are merged as they came; see ``wire.session_config``."""


class FinishFrame(Struct, frozen=True, tag_field="type", tag="finish"):
    pass


class CancelFrame(Struct, frozen=True, tag_field="type", tag="cancel"):
    request_id: str | None = None


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
    InputChunk | RefusedChunk | ConfigPatch | FinishFrame | CancelFrame | OutputAckFrame | PingFrame
)
_TypedFrame: TypeAlias = InputChunkFrame | SessionConfigFrame | FinishFrame | CancelFrame | OutputAckFrame | PingFrame
CLIENT_FRAMES: Final = (InputChunkFrame, SessionConfigFrame, FinishFrame, CancelFrame, OutputAckFrame, PingFrame)
CLIENT_TYPES: Final = frozenset(str(frame.__struct_config__.tag) for frame in CLIENT_FRAMES)

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


def to_chunk(fields: ChunkFields, sequence_id: int | None) -> InputChunk:
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
    if fields.offset is not None or fields.role is not None or fields.tool_call_id is not None:
        raise _unsupported(fields, sequence_id)
    timestamp_ms = fields.timestamp_ms
    return InputChunk(
        modality or Modality.AUDIO,
        payload or b"",
        sequence_id,
        fields.format,
        None if timestamp_ms is None else int(timestamp_ms),
        fields.end_of_input is True,
    )


def _unsupported(fields: ChunkFields, sequence_id: int | None) -> UnsupportedParameter:
    if fields.offset is not None:
        return UnsupportedParameter("chunks are numbered by sequence_id", param="offset", sequence_id=sequence_id)
    # Tool results need an engine that has tools, and none has.
    param = "tool_call_id" if fields.role is None else "role"
    return UnsupportedParameter("no engine here takes tool results", param=param, sequence_id=sequence_id)


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
    sequence_id = parsed.get("sequence_id")
    if kind == "input_chunk" and sequence_id is None and parsed.get("offset") is not None:
        raise UnsupportedParameter("chunks are numbered by sequence_id", param="offset")
    if kind == "input_chunk" and type(sequence_id) is int and 0 <= sequence_id <= MAX_SEQUENCE_ID:
        error.sequence_id = sequence_id
        return RefusedChunk(sequence_id, error)
    raise error


def field_error(cause: msgspec.DecodeError) -> InvalidRequest:
    """The error of one field: ``invalid_frame`` where the form is wrong, ``invalid_value`` where the value is."""
    if not isinstance(cause, msgspec.ValidationError):
        return InvalidFrame(f"not JSON: {cause}")
    error = invalid_value(cause)
    if error.param in _FORM_FIELDS:
        return InvalidFrame(error.message, param=error.param)
    return error


# --- server frames: only fields that are set go out


class _ServerFrame(Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Capabilities(Struct, frozen=True, kw_only=True):
    """What the engine, and this server with it, can do."""

    input_modalities: list[str]
    output_modalities: list[str]
    tasks: list[str]
    voices: list[str]
    sampling: list[str]
    sampling_no_ops: list[str]
    extend: bool
    tools: bool
    logprobs: bool
    structured_output: bool
    turn_detection: bool
    resume: bool


class SessionLimits(Struct, frozen=True, kw_only=True):
    max_chunk_bytes: int
    max_payload_per_session: int
    reorder_window_chunks: int
    reorder_timeout_sec: float
    max_pending_requests: int


class SessionCreated(_ServerFrame, frozen=True, kw_only=True, tag="session_created"):
    """``resume_token`` is null where a dropped connection cannot be resumed."""

    session_id: str
    resume_token: str | None
    expires_in: float
    model: str
    input_audio: InputAudioConfig
    output_audio: OutputAudioConfig
    start_policy: StartPolicyName | StartPolicyConfig
    after_start: str
    capabilities: Capabilities
    limits: SessionLimits


class SessionUpdated(SessionConfig, frozen=True, kw_only=True, tag_field="type", tag="session_updated"):
    """The effective configuration, from the next request on."""


class InputAckFrame(_ServerFrame, frozen=True, kw_only=True, tag="input_ack"):
    next_sequence_id: int
    buffered_chunks: int
    received_bytes: int
    credit_bytes: int


class ResponseStarted(_ServerFrame, frozen=True, kw_only=True, tag="response_started"):
    request_id: str
    trigger: str
    sequence_id: int | None
    input_mode: str


class WordTime(Struct, frozen=True):
    text: str
    start_ms: int
    end_ms: int


class UsageFields(Struct, frozen=True, kw_only=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_audio_ms: int
    output_audio_ms: int
    input_after_start_bytes: int


class OutputChunkFrame(_ServerFrame, frozen=True, kw_only=True, tag="output_chunk"):
    """Content has a modality; the last chunk of a request has ``final`` and no content."""

    request_id: str
    sequence_id: int
    modality: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    payload: bytes | UnsetType = UNSET
    format: str | UnsetType = UNSET
    sample_rate: int | UnsetType = UNSET
    start_ms: int | UnsetType = UNSET
    interim: bool | UnsetType = UNSET
    words: list[WordTime] | UnsetType = UNSET
    final: bool | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: UsageFields | UnsetType = UNSET


class ErrorFields(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    param: str | None = None
    sequence_id: int | None = None
    request_id: str | None = None
    retryable: bool = False
    retry_after_ms: int | None = None


class ErrorFrame(_ServerFrame, frozen=True, kw_only=True, tag="error"):
    error: ErrorFields


class SessionClosing(_ServerFrame, frozen=True, kw_only=True, tag="session_closing"):
    reason: str
    retryable: bool
    time_left_ms: int


class PongFrame(_ServerFrame, frozen=True, kw_only=True, tag="pong"):
    t: Any
    server_time_ms: int


ServerFrame: TypeAlias = (
    SessionCreated
    | SessionUpdated
    | InputAckFrame
    | ResponseStarted
    | OutputChunkFrame
    | ErrorFrame
    | SessionClosing
    | PongFrame
)
SERVER_FRAMES: Final = (
    SessionCreated,
    SessionUpdated,
    InputAckFrame,
    ResponseStarted,
    OutputChunkFrame,
    ErrorFrame,
    SessionClosing,
    PongFrame,
)

_encoder: Final = msgspec.json.Encoder()
_server_decoder: Final[msgspec.json.Decoder[ServerFrame]] = msgspec.json.Decoder(ServerFrame)


def encode_frame(frame: ServerFrame) -> bytes:
    """JSON text of a server frame; bytes fields become base64."""
    return _encoder.encode(frame)


def decode_server_frame(data: bytes | str) -> ServerFrame:
    """For clients. Raises InvalidFrame for anything that is not a frame of this specification."""
    try:
        return _server_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidFrame(str(error)) from None


def error_frame(error: OmniError) -> ErrorFrame:
    return ErrorFrame(
        error=ErrorFields(
            code=error.code,
            message=error.message,
            param=error.param,
            sequence_id=error.sequence_id,
            request_id=error.request_id,
            retryable=error.wire.retryable,
            retry_after_ms=error.retry_after_ms,
        )
    )
