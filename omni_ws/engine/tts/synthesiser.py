"""What a speech synthesiser is to the voice worker, and the frames between that and the server.

Imports nothing but the standard library: the worker starts fast.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import msgspec


class NoVoice(Exception):
    """The synthesiser is not installed, or does not work on this machine."""


class SpokenWord(NamedTuple):
    """A word and its place in milliseconds from the start of the audio."""

    text: str
    start_ms: int
    end_ms: int


@dataclass(frozen=True, slots=True)
class VoiceFacts:
    """``synthesiser`` and ``source`` are for people, ``voices`` for requests, the default first."""

    synthesiser: str
    source: str
    voices: tuple[str, ...] = field(default=())
    #: The language of each voice (RFC 5646).
    languages: Mapping[str, str] = field(default_factory=dict)
    #: Whether it speaks only what is written in Latin letters.
    latin_only: bool = False


class SynthesisListener(Protocol):
    """Takes what is being spoken."""

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        """The next samples, little-endian; says whether to go on."""
        ...

    def words(self, words: list[SpokenWord]) -> None:
        """Words of the audio so far or to come, in order."""
        ...


class Synthesiser(Protocol):
    """One process has one, and speaks one text at a time: the libraries keep global state."""

    @property
    def facts(self) -> VoiceFacts: ...

    def speak(self, text: str, voice: str, listener: SynthesisListener, *, speed: float) -> None: ...


# Frames: a big-endian head (u32 length of the payload, u8 kind, u32 job) and the payload

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
    return encode_frame(kind, job, msgspec.json.encode(value))


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
    return msgspec.json.decode(payload)
