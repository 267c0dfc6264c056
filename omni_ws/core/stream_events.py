"""The events that an InputStream returns for what it received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import InputChunk
from omni_ws.core.request_input import InputEvent, RequestInput
from omni_ws.errors import InvalidValue, PayloadTooLarge


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """A chunk opened the next request; the events that follow belong to it until its InputEnded."""

    session: RequestInput
    #: Whether it is audio in which speech was detected.
    by_speech: bool = False


class Diverted(Struct, frozen=True):
    """A chunk, or with None a bare end of input, in order but not assigned to a request.

    Its bytes are held until the chunk is admitted, or they are released.
    """

    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class TextRefused:
    """Text is not UTF-8. The error names the chunk, which is discarded, or only its last character."""

    error: InvalidValue


@dataclass(frozen=True, slots=True)
class InputRefused:
    """The input of the open request is too much in all. The rest of it is dropped, up to its end."""

    error: PayloadTooLarge


class ReceivedInput(Struct, frozen=True):
    """How much of an input has arrived: everything below ``next_sequence_id`` was accepted in order."""

    next_sequence_id: int
    buffered_chunks: int
    received_bytes: int


StreamEvent: TypeAlias = RequestOpened | Diverted | TextRefused | InputRefused | InputEvent
