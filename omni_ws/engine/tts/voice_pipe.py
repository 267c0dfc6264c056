"""The frames between the server and its voice worker. Imports nothing but the standard library: the worker starts fast.

A frame is a big-endian head (u32 length of the payload, u8 kind, u32 job) and the payload.
"""

from __future__ import annotations

import json
import struct
from enum import IntEnum
from typing import Any, NamedTuple

HEAD = struct.Struct(">IBI")
RATE = struct.Struct(">I")

#: No honest frame is larger; a length beyond it means that the pipe carries something else.
MAX_PAYLOAD = 1024 * 1024


class FrameKind(IntEnum):
    """What a frame says; the comment is its payload."""

    SPEAK = 1  # {"voice": …, "speed": …, "text": …}
    CANCEL = 2  # nothing
    READY = 16  # the fields of VoiceFacts, or {"reason": …} where there is no voice
    AUDIO = 17  # u32 sample rate, then pcm16, little-endian
    WORDS = 18  # [[text, start_ms, end_ms], …], places from the start of the job's audio
    DONE = 19  # nothing; also after CANCEL
    FAILED = 20  # {"message": …}


class Frame(NamedTuple):
    kind: FrameKind
    job: int
    payload: bytes


class BrokenPipeFrame(Exception):
    """The bytes in the pipe are no frame."""


def encode_frame(kind: FrameKind, job: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(len(payload), kind, job) + payload


def encode_object(kind: FrameKind, job: int, value: object) -> bytes:
    return encode_frame(kind, job, json.dumps(value).encode())


def decode_head(head: bytes) -> tuple[int, FrameKind, int]:
    """Length, kind and job. Raises BrokenPipeFrame."""
    length, kind, job = HEAD.unpack(head)
    if length > MAX_PAYLOAD:
        raise BrokenPipeFrame(f"a frame of {length} bytes")
    try:
        return length, FrameKind(kind), job
    except ValueError as error:
        raise BrokenPipeFrame(f"a frame of kind {kind}") from error


def decode_object(payload: bytes) -> Any:
    return json.loads(payload)
