from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from omni_ws.core.chunks import MAX_FORMAT_CHARACTERS, MAX_ID_CHARACTERS, InputChunk, Modality
from omni_ws.core.reorder import MAX_SEQUENCE_ID
from omni_ws.errors import (
    EngineOverloaded,
    InvalidFrame,
    InvalidRequest,
    InvalidValue,
    OmniError,
    UnknownType,
    UnsupportedParameter,
)
from omni_ws.wire.frames import (
    CLIENT_TYPES,
    MAX_TIMESTAMP_MS,
    CancelFrame,
    ChunkFields,
    ConfigPatch,
    FinishFrame,
    OutputAckFrame,
    PingFrame,
    RefusedChunk,
    decode_frame,
    field_error,
    loads_object,
    nested_deeper,
    to_chunk,
)
from omni_ws.wire.server_frames import (
    ErrorFields,
    ErrorFrame,
    InputAckFrame,
    OutputChunkFrame,
    PongFrame,
    decode_server_frame,
    encode_frame,
    error_frame,
)
from omni_ws.wire.session_config import MAX_DEPTH


def frame(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def chunk(**fields: Any) -> bytes:
    return frame(**{"type": "input_chunk", "sequence_id": 7, **fields})


def refusal(data: bytes) -> InvalidRequest:
    """Why a chunk was refused; that its number was read is checked on the way."""
    refused = decode_frame(data)
    assert isinstance(refused, RefusedChunk)
    assert refused.sequence_id == refused.error.sequence_id == 7
    return refused.error


# client frames


def test_a_chunk_of_audio() -> None:
    data = chunk(modality="audio", payload=base64.b64encode(b"\0\1").decode(), format="pcmu", timestamp_ms=40)
    assert decode_frame(data) == InputChunk(Modality.AUDIO, b"\0\1", 7, "pcmu", 40, False)


def test_bytes_are_audio_and_text_is_text_where_nothing_else_is_said() -> None:
    assert decode_frame(chunk(payload="AAE=")) == InputChunk(Modality.AUDIO, b"\0\1", 7)
    assert decode_frame(chunk(text="hé")) == InputChunk(Modality.TEXT, "hé".encode(), 7)
    assert decode_frame(chunk(modality="text", text="hi")) == InputChunk(Modality.TEXT, b"hi", 7)
    assert decode_frame(chunk(modality="text", payload="aGk=")) == InputChunk(Modality.TEXT, b"hi", 7)
    assert decode_frame(chunk(end_of_input=True)) == InputChunk(Modality.AUDIO, b"", 7, end_of_input=True)


def test_null_is_as_good_as_nothing() -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("modality", "payload", "text", "format", "timestamp_ms", "end_of_input", "role", "tool_call_id", "offset")
    )
    assert decode_frame(chunk(**nothing)) == InputChunk(Modality.AUDIO, b"", 7)


def test_unknown_fields_are_ignored() -> None:
    assert decode_frame(chunk(text="a", color="red")) == InputChunk(Modality.TEXT, b"a", 7)
    assert decode_frame(frame(type="finish", now=True)) == FinishFrame()


@pytest.mark.parametrize("value", [0, 1, 2**31, MAX_SEQUENCE_ID])
def test_sequence_numbers_in_range(value: int) -> None:
    assert decode_frame(chunk(sequence_id=value)) == InputChunk(Modality.AUDIO, b"", value)


@pytest.mark.parametrize("value", [-1, MAX_SEQUENCE_ID + 1, 10**30, 1.0, 1.5, "1", True, None, [], {}])
def test_any_other_sequence_number_is_invalid(value: object) -> None:
    with pytest.raises(InvalidValue) as caught:
        decode_frame(chunk(sequence_id=value))
    assert caught.value.param == "sequence_id"


def test_a_chunk_has_a_sequence_number() -> None:
    with pytest.raises(InvalidValue) as caught:
        decode_frame(frame(type="input_chunk", text="a"))
    assert caught.value.param == "sequence_id"


@pytest.mark.parametrize(("value", "milliseconds"), [(0, 0), (12.9, 12), (MAX_TIMESTAMP_MS, MAX_TIMESTAMP_MS)])
def test_timestamps_in_range(value: float, milliseconds: int) -> None:
    assert decode_frame(chunk(timestamp_ms=value)) == InputChunk(Modality.AUDIO, b"", 7, None, milliseconds)


@pytest.mark.parametrize("value", [-1, -0.5, MAX_TIMESTAMP_MS + 1, 1e300, "1", True, []])
def test_any_other_timestamp_is_invalid(value: object) -> None:
    error = refusal(chunk(timestamp_ms=value))
    assert isinstance(error, InvalidValue)
    assert error.param == "timestamp_ms"


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"payload": "not base64!"}, InvalidFrame, "payload"),
        ({"payload": "AAA"}, InvalidFrame, "payload"),
        ({"payload": 5}, InvalidFrame, "payload"),
        ({"text": 5}, InvalidFrame, "text"),
        ({"modality": "smell"}, InvalidValue, "modality"),
        ({"modality": 5}, InvalidValue, "modality"),
        ({"format": 5}, InvalidValue, "format"),
        ({"end_of_input": "yes"}, InvalidValue, "end_of_input"),
        ({"payload": "AAE=", "text": "a"}, InvalidValue, "text"),
        ({"modality": "audio", "text": "a"}, InvalidValue, "modality"),
        ({"role": "tool", "text": "a"}, InvalidValue, "tool_call_id"),
        ({"tool_call_id": "1", "text": "a"}, InvalidValue, "role"),
        ({"role": "tool", "tool_call_id": "1", "modality": "audio", "payload": ""}, InvalidValue, "modality"),
        ({"role": "assistant", "text": "a"}, InvalidValue, "role"),
        ({"offset": 0, "text": "a"}, UnsupportedParameter, "offset"),
    ],
)
def test_a_refused_chunk_names_its_field(fields: dict[str, Any], kind: type[OmniError], param: str) -> None:
    error = refusal(chunk(**fields))
    assert type(error) is kind
    assert error.param == param


@pytest.mark.parametrize(
    ("name", "longest", "fields"),
    [
        ("format", MAX_FORMAT_CHARACTERS, {"modality": "image", "payload": "AAE="}),
        ("tool_call_id", MAX_ID_CHARACTERS, {"role": "tool", "text": "a"}),
    ],
)
def test_names_that_a_chunk_keeps_have_a_longest_length(name: str, longest: int, fields: dict[str, Any]) -> None:
    accepted = decode_frame(chunk(**fields, **{name: "x" * longest}))
    assert getattr(accepted, name) == "x" * longest
    error = refusal(chunk(**fields, **{name: "x" * (longest + 1)}))
    assert (type(error), error.param) == (InvalidValue, name)


def test_offset_instead_of_a_number_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        decode_frame(frame(type="input_chunk", offset=0, text="a"))
    assert caught.value.param == "offset"


def test_a_long_value_is_not_repeated_in_full() -> None:
    error = refusal(chunk(modality="x" * 100_000))
    assert error.param == "modality"
    assert len(error.message) < 300


def test_what_a_value_says_is_not_taken_for_the_place_of_an_error() -> None:
    error = refusal(chunk(modality="Object missing required field `payload` - at `$.payload`"))
    assert error.param == "modality"


def test_the_other_frames() -> None:
    assert decode_frame(frame(type="finish")) == FinishFrame()
    assert decode_frame(frame(type="cancel")) == CancelFrame()
    assert decode_frame(frame(type="cancel", request_id="req_1")) == CancelFrame("req_1")
    assert decode_frame(frame(type="output_ack", sequence_id=3)) == OutputAckFrame(3)
    assert decode_frame(frame(type="output_ack", sequence_id=3, played_ms=1.5)) == OutputAckFrame(3, 1.5)
    assert decode_frame(frame(type="ping", t={"a": [1]})) == PingFrame({"a": [1]})
    assert decode_frame(frame(type="ping")) == PingFrame(None)
    assert decode_frame(frame(type="session_config", voice=None, x=1)) == ConfigPatch({"voice": None, "x": 1})


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (frame(type="cancel", request_id=5), "request_id"),
        (frame(type="output_ack"), "sequence_id"),
        (frame(type="output_ack", sequence_id=-1), "sequence_id"),
        (frame(type="output_ack", sequence_id=0, played_ms=-1), "played_ms"),
    ],
)
def test_a_bad_value_in_another_frame(data: bytes, param: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        decode_frame(data)
    assert caught.value.param == param


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'"finish"', b"5", b"{}", frame(type=5), frame(type=None)])
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_frame(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"type":"session_config","x":1e999}',
        b'{"type":"session_config","x":01}',
        b'{"type":"ping","t":1e999}',
        b'{"type":"ping","t":"\\ud800"}',
        b'{"type":"input_chunk","sequence_id":0,"text":"\\ud800"}',
        b'{"type":"finish"} x',
        b'{"type":"finish","type":"ping"}',
    ],
)
def test_what_only_looks_like_json(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_frame(data)


@pytest.mark.parametrize("name", ["hello", "session_created", "x" * 1000, "\0", "\n"])
def test_an_unknown_type(name: str) -> None:
    with pytest.raises(UnknownType) as caught:
        decode_frame(frame(type=name))
    assert caught.value.param == "type"
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("data", [b'{"type":"finish","x":"\xff"}', b'{"type":"\xff"}', b"\xff"])
def test_what_is_not_utf8(data: bytes, kind: type[bytes] | type[bytearray] | type[memoryview]) -> None:
    with pytest.raises(UnicodeDecodeError):
        decode_frame(kind(data))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_read(kind: type[bytes] | type[bytearray] | type[memoryview]) -> None:
    assert decode_frame(kind(chunk(text="a"))) == InputChunk(Modality.TEXT, b"a", 7)
    assert decode_frame(kind(frame(type="session_config", voice="a"))) == ConfigPatch({"voice": "a"})
    with pytest.raises(UnknownType):
        decode_frame(kind(frame(type="hello")))


@pytest.mark.parametrize(("left", "right"), [(b"[", b"]"), (b'{"a":', b"}")])
@pytest.mark.parametrize("head", [b'{"type":"ping","t":', b'{"type":"session_config","stage_params":'])
def test_nesting_has_a_limit(head: bytes, left: bytes, right: bytes) -> None:
    def nested(levels: int) -> bytes:
        return head + left * levels + b"1" + right * levels + b"}"

    # The fields of a configuration are one level themselves.
    allowed = MAX_DEPTH if b"ping" in head else MAX_DEPTH - 1
    decode_frame(nested(allowed))
    for levels in (allowed + 1, 900, 1100, 100_000):
        with pytest.raises(InvalidFrame, match=r"nested|[Rr]ecursion|depth|values"):
            decode_frame(nested(levels))


def test_nesting_is_counted_in_arrays_and_objects() -> None:
    assert not nested_deeper(1, 0)
    assert not nested_deeper("text", 0)
    assert nested_deeper([], 0)
    assert nested_deeper({}, 0)
    assert not nested_deeper([1, {"a": 2}], 2)
    assert nested_deeper([1, {"a": [2]}], 2)


def test_objects_of_http_bodies() -> None:
    assert loads_object(b'{"a": 1}') == {"a": 1}
    for data in (b"[1]", b"{", b"\xef\xbb\xbf{}"):
        with pytest.raises(InvalidFrame):
            loads_object(data)
    with pytest.raises(UnicodeDecodeError):
        loads_object(b'{"a": "\xff"}')


def test_chunks_of_http_bodies_need_no_number() -> None:
    assert to_chunk(ChunkFields(text="a", end_of_input=True), None) == InputChunk(
        Modality.TEXT, b"a", end_of_input=True
    )
    with pytest.raises(InvalidValue):
        to_chunk(ChunkFields(text="a", payload=b"b"), None)


def test_an_error_of_the_parser_itself_is_an_invalid_frame() -> None:
    assert type(field_error(msgspec.DecodeError("truncated"))) is InvalidFrame


# whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = st.sampled_from(
    [
        *("sequence_id", "modality", "payload", "text", "format", "timestamp_ms", "end_of_input", "role", "offset"),
        *("tool_call_id", "request_id", "played_ms", "t", "voice", "stage_params"),
    ]
)
FIELD_VALUES = JSON | st.integers(0, 9) | st.sampled_from(["audio", "text", "AAE=", "AA", "image", 2**32, 1e300])
FRAMES = st.builds(
    lambda kind, fields: json.dumps({**fields, **kind}).encode(),
    st.fixed_dictionaries({}, optional={"type": st.sampled_from(sorted(CLIENT_TYPES)) | JSON}),
    st.dictionaries(FIELD_NAMES, FIELD_VALUES, max_size=5),
)


def accepted_or_refused(data: bytes) -> None:
    try:
        decoded = decode_frame(data)
    except (InvalidFrame, InvalidValue, UnknownType, UnsupportedParameter, UnicodeDecodeError) as error:
        if isinstance(error, OmniError):
            encode_frame(error_frame(error))
        return
    match decoded:
        case RefusedChunk(error=refused, sequence_id=sequence_id):
            assert refused.sequence_id == sequence_id
            encode_frame(error_frame(refused))
        case InputChunk(sequence_id=sequence_id, payload=payload, timestamp_ms=timestamp_ms):
            assert sequence_id is not None
            assert 0 <= sequence_id <= MAX_SEQUENCE_ID
            assert type(payload) is bytes
            assert timestamp_ms is None or 0 <= timestamp_ms <= MAX_TIMESTAMP_MS
        case PingFrame(t=t):
            assert decode_server_frame(encode_frame(PongFrame(t=t, server_time_ms=0))) == PongFrame(
                t=t, server_time_ms=0
            )
        case ConfigPatch(fields=fields):
            assert "type" not in fields


@given(FRAMES)
@settings(max_examples=300)
def test_any_json_is_a_frame_or_refused(data: bytes) -> None:
    accepted_or_refused(data)


@given(st.binary(max_size=60))
@example(b"\0")
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    accepted_or_refused(data)


@given(FRAMES, st.integers(0, 80), st.binary(max_size=3))
def test_a_damaged_frame_is_a_frame_or_refused(data: bytes, place: int, damage: bytes) -> None:
    accepted_or_refused(data[:place] + damage + data[place + 1 :])


# server frames


def test_only_what_is_set_goes_out() -> None:
    data = encode_frame(OutputChunkFrame(request_id="req_1", sequence_id=0, modality="audio", payload=b"\0\1"))
    assert json.loads(data) == {
        "type": "output_chunk",
        "request_id": "req_1",
        "sequence_id": 0,
        "modality": "audio",
        "payload": "AAE=",
    }


@pytest.mark.parametrize(
    "sent",
    [
        InputAckFrame(next_sequence_id=1, buffered_chunks=2, received_bytes=3, credit_bytes=4),
        OutputChunkFrame(request_id="req_1", sequence_id=0, modality="text", text="ü"),
        OutputChunkFrame(request_id="req_1", sequence_id=1, final=True, finish_reason="stop"),
        ErrorFrame(error=ErrorFields(code="invalid_value", message="no", param="voice")),
        PongFrame(t=[1, "a", None], server_time_ms=5),
    ],
)
def test_a_client_reads_what_the_server_sent(sent: Any) -> None:
    assert decode_server_frame(encode_frame(sent)) == sent
    assert decode_server_frame(encode_frame(sent).decode()) == sent


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        frame(type="hello"),
        frame(type="input_ack"),
        b'{"type":"pong","t":"\xff","server_time_ms":1}',
        b'{"type":"pong","t":' + b"[" * 100_000 + b"]" * 100_000 + b',"server_time_ms":1}',
    ],
)
def test_a_client_refuses_what_is_no_server_frame(data: bytes) -> None:
    with pytest.raises(InvalidFrame):
        decode_server_frame(data)


def test_an_error_frame_carries_the_whole_error() -> None:
    error = EngineOverloaded("later", param="model", sequence_id=3, request_id="req_1", retry_after_ms=100)
    assert json.loads(encode_frame(error_frame(error))) == {
        "type": "error",
        "error": {
            "code": "engine_overloaded",
            "message": "later",
            "param": "model",
            "sequence_id": 3,
            "request_id": "req_1",
            "retryable": True,
            "retry_after_ms": 100,
        },
    }
