"""The messages between the server and the process of a StepModel, and their form on the socket between them.

A message is its length (u32, big-endian) and its pickle. Both ends are this program, and nobody else has the socket:
the server makes it for the process, which inherits its end.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

LENGTH: Final = struct.Struct(">I")
#: The longest message; one that claims to be longer is none.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class BrokenPipeMessage(Exception):
    """The bytes on the socket are no message."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The first message to the process. ``factory`` is ``module:function``, which returns a LoadedModel."""

    factory: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model is loaded and warm."""

    slots: int
    memory_bytes: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be loaded; the message is for the operator."""

    message: str


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Open a session; SlotOpened or SlotRefused follows."""

    session: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """The session has a slot."""

    session: int


@dataclass(frozen=True, slots=True)
class SlotRefused:
    """The session is closed; ``overloaded`` if for want of a slot."""

    session: int
    message: str
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class FeedItem:
    """An item for the session, which counts as ``cost`` bytes until it is taken."""

    session: int
    item: Any
    cost: int


@dataclass(frozen=True, slots=True)
class ItemTaken:
    """The model took an item of ``cost`` bytes."""

    session: int
    cost: int


@dataclass(frozen=True, slots=True)
class GrantFrames:
    """Allow the session that many frames more."""

    session: int
    frames: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Free the session's slot."""

    session: int


@dataclass(frozen=True, slots=True)
class ItemMade:
    """The model made an item for the session."""

    session: int
    item: Any


@dataclass(frozen=True, slots=True)
class AskOccupation:
    """Ask for the Occupation."""

    number: int


@dataclass(frozen=True, slots=True)
class Occupation:
    """The answer: how many sessions are open, and whether the model has work."""

    number: int
    sessions: int
    busy: bool


@dataclass(frozen=True, slots=True)
class ChangeTrace:
    """Begin a trace of torch's operations that will be written to ``path``; without one, end it and write it."""

    number: int
    path: str | None


@dataclass(frozen=True, slots=True)
class TraceChanged:
    """The answer, with the reason if it failed."""

    number: int
    error: str | None = None


def encode_message(message: object) -> bytes:
    """Return the message's bytes. Raises BrokenPipeMessage for one that is too long."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BrokenPipeMessage(f"a message of {len(payload)} bytes")
    return LENGTH.pack(len(payload)) + payload


def decode_length(head: bytes) -> int:
    """Return the length of the pickle that follows. Raises BrokenPipeMessage."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise BrokenPipeMessage(f"a message of {length} bytes")
    return int(length)


@dataclass(slots=True)
class MessageBuffer:
    """Cuts received bytes into messages."""

    _received: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that ``data`` completes. Raises BrokenPipeMessage."""
        received = self._received
        received += data
        messages: list[Any] = []
        start = 0
        while len(received) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + decode_length(bytes(received[start:begin]))
            if len(received) < end:
                break
            messages.append(pickle.loads(received[begin:end]))
            start = end
        del received[:start]
        return messages
