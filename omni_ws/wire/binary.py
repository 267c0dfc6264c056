"""Binary frames: a 12-byte header followed by the bare payload.

The header is big-endian: u8 version (1), u8 kind (1 input_chunk, 2 output_chunk), u8 modality (1 text, 2 audio, 3
video, 4 image), u8 flags (bit 0: end_of_input, bit 1: timestamp present), u32 sequence_id, u32 timestamp_ms.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from omni_ws.core.chunks import InputChunk, Modality, OutputChunk
from omni_ws.errors import InvalidFrame
from omni_ws.wire.frames import RefusedChunk

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
    """Encode a numbered chunk without a format of its own, for clients. Raises ValueError for any other."""
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
    """An output frame as clients decode it: audio in the session's output format. ``start_ms`` is None if absent."""

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
