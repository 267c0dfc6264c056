from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import AudioFormat, InputChunk, Modality, OutputChunk, OutputModality
from omni_ws.errors import InvalidFrame
from omni_ws.wire.frames import (
    HEADER,
    BinaryAudio,
    RefusedChunk,
    decode_input,
    decode_output_audio,
    encode_input,
    encode_output_audio,
)

U32 = st.integers(0, 2**32 - 1)


def output(sequence_id: int, start_ms: int | None, payload: bytes) -> OutputChunk:
    return OutputChunk(
        request_id="req_1",
        sequence_id=sequence_id,
        modality=OutputModality.AUDIO,
        payload=payload,
        format=AudioFormat(),
        start_ms=start_ms,
    )


def test_the_header_to_the_byte() -> None:
    data = bytes([1, 1, 2, 0b11, 0, 0, 1, 2, 0, 0, 3, 4]) + b"pcm"
    chunk = InputChunk(Modality.AUDIO, b"pcm", 0x0102, None, 0x0304, True)
    assert decode_input(data) == chunk
    assert encode_input(chunk) == data
    assert (
        encode_output_audio(output(0x0102, 0x0304, b"pcm")) == bytes([1, 2, 2, 0b10, 0, 0, 1, 2, 0, 0, 3, 4]) + b"pcm"
    )


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_read(kind: type[bytes] | type[bytearray] | type[memoryview]) -> None:
    chunk = decode_input(kind(bytes([1, 1, 1, 0]) + bytes(8) + b"hi"))
    assert chunk == InputChunk(Modality.TEXT, b"hi", 0)
    assert isinstance(chunk, InputChunk)
    assert isinstance(chunk.payload, bytes)


def test_the_timestamp_counts_only_where_its_flag_is_set() -> None:
    chunk = decode_input(HEADER.pack(1, 1, 2, 0, 7, 99))
    assert chunk == InputChunk(Modality.AUDIO, b"", 7)


@given(
    st.builds(
        InputChunk,
        st.sampled_from(Modality),
        st.binary(max_size=40),
        U32,
        st.none(),
        st.none() | U32,
        st.booleans(),
    )
)
def test_input_comes_back_as_it_was(chunk: InputChunk) -> None:
    assert decode_input(encode_input(chunk)) == chunk


@given(U32, st.none() | U32, st.binary(max_size=40))
def test_output_comes_back_as_it_was(sequence_id: int, start_ms: int | None, payload: bytes) -> None:
    data = encode_output_audio(output(sequence_id, start_ms, payload))
    assert decode_output_audio(data) == BinaryAudio(sequence_id, start_ms, payload)


def test_output_numbers_wrap_and_its_time_stops_at_the_field() -> None:
    data = encode_output_audio(output(2**32 + 5, 2**32, b""))
    assert decode_output_audio(data) == BinaryAudio(5, 2**32 - 1, b"")


@pytest.mark.parametrize("length", [0, 1, 11])
def test_a_short_header(length: int) -> None:
    with pytest.raises(InvalidFrame, match="header"):
        decode_input(b"\1" * length)
    with pytest.raises(InvalidFrame, match="header"):
        decode_output_audio(b"\1" * length)


@pytest.mark.parametrize(("version", "kind"), [(0, 1), (2, 1), (1, 0), (1, 2), (1, 3)])
def test_an_unknown_version_or_kind(version: int, kind: int) -> None:
    with pytest.raises(InvalidFrame, match=f"version {version}, kind {kind}"):
        decode_input(HEADER.pack(version, kind, 2, 0, 0, 0))


@pytest.mark.parametrize(
    ("modality", "flags", "named"), [(0, 0, "modality 0"), (5, 0, "modality 5"), (2, 4, "flags 0x04")]
)
def test_an_unknown_modality_or_flag_uses_the_number_up(modality: int, flags: int, named: str) -> None:
    refused = decode_input(HEADER.pack(1, 1, modality, flags, 77, 0) + b"x")
    assert isinstance(refused, RefusedChunk)
    assert refused.sequence_id == 77
    assert isinstance(refused.error, InvalidFrame)
    assert refused.error.sequence_id == 77
    assert named in str(refused.error)


@pytest.mark.parametrize(("version", "kind", "modality"), [(2, 2, 2), (1, 1, 2), (1, 2, 1)])
def test_a_client_reads_output_audio_only(version: int, kind: int, modality: int) -> None:
    with pytest.raises(InvalidFrame):
        decode_output_audio(HEADER.pack(version, kind, modality, 0, 0, 0))


@pytest.mark.parametrize("chunk", [InputChunk(Modality.AUDIO, b"x"), InputChunk(Modality.IMAGE, b"x", 0, "image/png")])
def test_what_a_binary_frame_cannot_carry(chunk: InputChunk) -> None:
    with pytest.raises(ValueError, match="sequence_id and no format"):
        encode_input(chunk)


@pytest.mark.parametrize(("sequence_id", "timestamp_ms"), [(2**32, 0), (0, 2**32)])
def test_numbers_past_the_field_are_refused(sequence_id: int, timestamp_ms: int) -> None:
    with pytest.raises(struct.error):
        encode_input(InputChunk(Modality.AUDIO, b"x", sequence_id, None, timestamp_ms))


@given(st.binary(max_size=20) | st.binary(max_size=20).map(lambda rest: b"\1\1\2" + rest))
def test_any_bytes_are_a_chunk_or_refused(data: bytes) -> None:
    try:
        frame = decode_input(data)
    except InvalidFrame:
        return
    if isinstance(frame, InputChunk):
        assert frame.payload == data[HEADER.size :]
        assert decode_input(encode_input(frame)) == frame
    else:
        assert frame.error.sequence_id == frame.sequence_id
