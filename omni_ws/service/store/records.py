"""What a store holds, and what a backend does with it.

A record is one session: a *clear part*, which is compared before anything is handed out; one *snapshot*; and a *log* of
what happened since it. One commit appends at most one element to a log; the element holds all entries of that commit.

**Fencing.** Each record has a fence number. Whoever takes a record raises it; a change that carries a lower number is
refused (``LOST``, ``DELETED``). A deleted record leaves a tombstone with its number for ``TOMBSTONE_SEC``, so that a
process that slept meanwhile cannot bring it back; only a snapshot with that number can.

**Gaps.** An element carries the number of the snapshot behind which it stands, and its place there. If the record is
gone, has another snapshot, or a log of another length, the store has lost data (a server that came back without its
last writes): the change is refused (``GAP``), and a snapshot mends the record. A snapshot that arrives behind a newer
one, over a connection that was given up, changes nothing.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

#: The version of records: of their layout, of ``SavedSession``, and of the entries of logs. Raise it with a change that
#: the version before cannot read, and name that in CHANGELOG.md; either version takes the other's records for absent.
RECORD_VERSION: Final = 1
#: A process that gave no sign of life for this long, by the store's clock, holds nothing any more.
HOLDER_EXPIRY_SEC: Final = 5.0
#: How long a deleted record keeps its fence number.
TOMBSTONE_SEC: Final = 3600.0


class StoreError(Exception):
    """The store did not do what it was asked. ``reason`` is one of few words, which metrics and /health repeat."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


#: The reasons of ``StoreError``.
SLOW: Final = "slow"
FULL: Final = "full"
GONE: Final = "gone"


class StoreEnd(enum.Enum):
    """How a process parts with a record: it is deleted, or left for others."""

    DELETE = "delete"
    RELEASE = "release"


class ChangeOutcome(enum.Enum):
    """What became of a change."""

    KEPT = 0
    #: Another process has the record.
    LOST = 1
    #: The store lacks what the change builds on; see the module.
    GAP = 2
    #: Another process deleted the record.
    DELETED = 3


@dataclass(slots=True, frozen=True)
class ClearPart:
    """What is written with a snapshot, and is readable without a key."""

    #: Version and key, see ``Sealer.form``: who does not know it cannot read the record.
    form: str
    kind: str
    owner: str | None
    #: Digests of the tokens that admit a client.
    tokens: tuple[bytes, ...]
    #: Whether the session has no client.
    away: bool


_encode_clear = msgspec.msgpack.Encoder().encode
_decode_clear = msgspec.msgpack.Decoder(tuple[str, str, str | None, tuple[bytes, ...]]).decode


def write_clear(clear: ClearPart) -> bytes:
    """Return a clear part as bytes, without ``away``, which the store keeps as a time."""
    return _encode_clear((clear.form, clear.kind, clear.owner, clear.tokens))


def read_clear(data: bytes, *, away: bool) -> ClearPart | None:
    """Return what ``write_clear`` wrote; None for anything else, such as that of a newer version."""
    try:
        return ClearPart(*_decode_clear(data), away)
    except msgspec.DecodeError:
        return None


class Change(msgspec.Struct, frozen=True):  # made many times a second, and so sooner than a dataclass
    """What one commit does to one record, all or nothing."""

    session_id: str
    fence: int
    #: The process that writes.
    holder: str
    #: The number of the lease's newest snapshot: that in this change, or the one that the element stands behind.
    serial: int
    #: These two replace the record and its log, or both are None.
    clear: ClearPart | None
    snapshot: bytes | None
    #: An element to append, at place ``place`` (the first after a snapshot is 0); None for none.
    element: bytes | None
    place: int
    #: Done after the rest. A change with nothing else needs the fence number alone.
    end: StoreEnd | None


@dataclass(slots=True, frozen=True)
class FoundRecord:
    """The clear part of a record, as it is in the store."""

    clear: ClearPart
    fence: int
    #: The process that has the record; "" if nobody has.
    holder: str
    #: Whether ``holder`` gave a sign of life within HOLDER_EXPIRY_SEC.
    held: bool
    #: Seconds since the session lost its client, by the store's clock; None if it has one.
    away_sec: float | None


@dataclass(slots=True, frozen=True)
class Contents:
    """The rest of a record: its snapshot, and the elements of its log in order."""

    snapshot: bytes
    log: tuple[bytes, ...]


@dataclass(slots=True, frozen=True)
class StoreSize:
    """How much a store holds, tombstones left out; bytes are those of the store's files or memory as far as known."""

    records: int
    bytes: int


class StoreBackend(Protocol):
    """A kind of store. One instance belongs to one process. Every method raises StoreError, and nothing else."""

    #: What it is, for logs and metrics; without passwords.
    name: str

    async def open(self) -> None:
        """Open the store, at the start and again after an error.

        Raises ConfigurationError, too, for what only the operator can mend.
        """

    async def close(self) -> None:
        """Release what ``open`` took."""

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        """Apply changes, each to a record of its own; return the outcome of each, in order."""

    async def find(self, session_id: str) -> FoundRecord | None:
        """Return the clear part of a record; None if there is none, or none that can be read."""

    async def read(self, session_id: str) -> Contents | None:
        """Return the rest of a record; None if there is none."""

    async def take(
        self, session_id: str, *, fence: int, holder: str, clear: ClearPart | None = None
    ) -> Contents | None:
        """Raise the fence number from ``fence`` by one and return what is there.

        None if the number is another now, or what is written with the snapshot is not that of ``clear`` any more.
        """

    async def erase(self, session_id: str) -> bool:
        """Delete a record whoever has it, and raise its fence number. Returns whether there was one.

        The next ``beat`` of who has it tells of it.
        """

    async def beat(self, holder: str) -> Sequence[str]:
        """Write the sign of life of a process. Returns the ids of its records that ``erase`` deleted, once each."""

    async def leave(self, holder: str) -> None:
        """Delete the sign of life of a process: others may take the records that it holds."""

    async def probe(self) -> None:
        """Write as many bytes as a record may have, and delete them, to find out whether the store works."""

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        """Delete records older than ``max_age_sec``, then the oldest until the rest fits ``max_bytes``.

        Records of living holders stay. Returns the size of what is left.
        """
