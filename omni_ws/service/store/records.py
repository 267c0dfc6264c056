"""Records of a store, the operations that a backend offers, and the encoding of records.

A record is one session: a *clear part*, which is checked before anything is handed out; one *snapshot*; and a *log* of
what happened since the snapshot. One commit appends at most one element to a log; the element holds all entries of that
commit.

**Fencing.** Each record has a fence number. Whoever takes a record raises the number; a change with a lower number is
refused (``LOST``, ``DELETED``). A deleted record leaves a tombstone with its number for ``TOMBSTONE_SEC``, so that a
process that slept meanwhile cannot bring the record back; only a snapshot with that number can.

**Gaps.** An element carries the number of the snapshot that it follows, and its place in the log. If the record is
gone, has another snapshot, or a log of another length, the store has lost data (a server that came back without its
last writes): the change is refused (``GAP``), and a new snapshot repairs the record. A snapshot that arrives after a
newer one, over a connection that was given up, changes nothing.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

from omni_ws.config.values import ConfigurationError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


#: The version of records: of their layout, of ``SavedSession``, and of the entries of logs. Raise it with a change that
#: the version before cannot read, and name that in CHANGELOG.md; either version takes the other's records for absent.
RECORD_VERSION: Final = 1
#: A process that gave no sign of life for this long, by the store's clock, holds nothing any more.
HOLDER_EXPIRY_SEC: Final = 5.0
#: How long a deleted record keeps its fence number.
TOMBSTONE_SEC: Final = 3600.0


class StoreError(Exception):
    """The store could not do what it was asked. ``reason`` is SLOW, FULL or GONE, which metrics and /health show."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


#: The reasons of ``StoreError``.
SLOW: Final = "slow"
FULL: Final = "full"
GONE: Final = "gone"


class StoreEnd(enum.Enum):
    """The way in which a process gives a record up: deletes the record, or releases it for others."""

    DELETE = "delete"
    RELEASE = "release"


class ChangeOutcome(enum.Enum):
    """The outcome of a change."""

    KEPT = 0
    #: Another process has the record.
    LOST = 1
    #: The store lacks the data that the change builds on; see the module docstring.
    GAP = 2
    #: Another process deleted the record.
    DELETED = 3


@dataclass(slots=True, frozen=True)
class ClearPart:
    """The part of a record that is not encrypted; it is written with each snapshot."""

    #: Version and key, see ``Sealer.form``: a process that does not know this form cannot read the record.
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
    """Encode a clear part, without ``away``, which the store keeps as a time."""
    return _encode_clear((clear.form, clear.kind, clear.owner, clear.tokens))


def read_clear(data: bytes, *, away: bool) -> ClearPart | None:
    """Decode what ``write_clear`` encoded. Returns None for other data, such as that of a newer version."""
    try:
        return ClearPart(*_decode_clear(data), away)
    except msgspec.DecodeError:
        return None


class Change(msgspec.Struct, frozen=True):  # made many times a second, and so sooner than a dataclass
    """The changes of one commit to one record, all of which are made, or none."""

    session_id: str
    fence: int
    #: The process that writes.
    holder: str
    #: The number of the lease's newest snapshot: that in this change, or the one that the element stands behind.
    serial: int
    #: Both replace the record and its log, or both are None.
    clear: ClearPart | None
    snapshot: bytes | None
    #: An element to append, at place ``place`` (the first after a snapshot is 0); None for none.
    element: bytes | None
    place: int
    #: Done after the rest. A change with nothing else needs the fence number alone.
    end: StoreEnd | None


@dataclass(slots=True, frozen=True)
class FoundRecord:
    """The clear part of a record, and who holds the record, as the store has it."""

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
    """The size of a store, without tombstones. ``bytes`` is that of its files or memory, as far as known."""

    records: int
    bytes: int


class StoreBackend(Protocol):
    """A kind of store.

    One instance belongs to one process. Every method may raise StoreError, and no other exception.
    """

    #: The kind of store, for logs and metrics; without passwords.
    name: str

    async def open(self) -> None:
        """Open the store, at the start and again after an error.

        Also raises ConfigurationError, for faults that only the operator can repair.
        """

    async def close(self) -> None:
        """Release the resources that ``open`` acquired."""

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        """Apply changes, each to a different record; return the outcome of each, in order."""

    async def find(self, session_id: str) -> FoundRecord | None:
        """Return the clear part of a record, and who holds it; None if there is none, or that part is unreadable."""

    async def read(self, session_id: str) -> Contents | None:
        """Return the snapshot and the log of a record; None if there is no record."""

    async def take(
        self, session_id: str, *, fence: int, holder: str, clear: ClearPart | None = None
    ) -> Contents | None:
        """Raise the fence number from ``fence`` by one, make ``holder`` the holder, and return the record's contents.

        Returns None if there is no record, its number is not ``fence``, or its clear part is no longer ``clear`` (None:
        any).
        """

    async def erase(self, session_id: str) -> bool:
        """Delete a record, whoever holds it, and raise its fence number. Returns whether there was one.

        The next ``beat`` of the record's holder returns the id.
        """

    async def beat(self, holder: str) -> Sequence[str]:
        """Write the heartbeat of a process. Returns the ids of its records that ``erase`` has deleted, once each."""

    async def leave(self, holder: str) -> None:
        """Delete the heartbeat of a process: others may take the records that it holds."""

    async def probe(self) -> None:
        """Check that the store works: write data of the size of a usual record, and delete it."""

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        """Delete records older than ``max_age_sec``, then the oldest until the rest fits ``max_bytes``.

        Records of living holders stay. Returns the size of the rest; if another process has just pruned the store, the
        size that it found.
        """


# What is written to a store: compressed, and encrypted if there is a key (AES-256-GCM).
#
# Each lease has a key of its own, derived from the server's key and a random salt (HKDF-SHA256): with one key for all,
# random nonces would come too close to repeating after 2**32 records. What is sealed names its session and its place
# there, so it cannot stand in for anything else.


KEY_BYTES: Final = 32
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
#: The place of a snapshot; elements of the log count from 0.
SNAPSHOT_PLACE: Final = -1

#: Encrypts data for a place in the record of one session.
Seal: TypeAlias = Callable[[bytes, int], bytes]


#: The shortest and the longest data that is compressed. Longer data is mostly audio, whose compression takes more CPU
#: time than everything else that is done for it.
_COMPRESSED_BYTES: Final = (512, 64 << 10)
#: What is compressed has no more bytes than this; earlier servers compressed what was longer.
_MOST_BYTES: Final = 1 << 20
#: The first byte of compressed data, and of other data.
_DEFLATED: Final = b"z"
_PLAIN: Final = b"p"


class Unreadable(Exception):
    """The data was sealed with another key, for another place, or is damaged."""


def packed(data: bytes, *, compress: bool = True) -> bytes:
    """Return a marker byte and ``data``, which is compressed if that is worthwhile: records repeat names of fields."""
    shortest, longest = _COMPRESSED_BYTES
    return _DEFLATED + zlib.compress(data, 1) if compress and shortest <= len(data) <= longest else _PLAIN + data


def unpacked(data: bytes) -> bytes:
    """Return the data that was given to ``packed``. Raises Unreadable."""
    kind, content = data[:1], data[1:]
    if kind == _PLAIN:
        return content
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(content, _MOST_BYTES) if kind == _DEFLATED else b""
    except zlib.error:
        plain = b""
    if not stream.eof:
        raise Unreadable("what is stored of a session is damaged")
    return plain


class Sealer:
    """Encrypts with the first of ``keys``, and decrypts with all of them; without keys, data stays as it is."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_form(key): key for key in keys}
        #: The form of the records that are written: their version and key, by which a process knows whether it can read
        #: a record.
        self.form = next(iter(self._keys), str(RECORD_VERSION))
        self.encrypts = bool(self._keys)

    def reads(self, form: str) -> bool:
        """Return whether records of this form (version and key) can be read here."""
        return form == self.form or form in self._keys

    def seal(self, session_id: str) -> Seal:
        """Return the function that encrypts the data of one lease."""
        if not self._keys:
            return lambda data, place: data
        salt = os.urandom(_SALT_BYTES)
        cipher = _cipher(self._keys[self.form], salt)

        def seal(data: bytes, place: int) -> bytes:
            nonce = os.urandom(_NONCE_BYTES)
            return salt + nonce + cipher.encrypt(nonce, data, _where(session_id, place))

        return seal

    def open(self, form: str, session_id: str, data: bytes, place: int) -> bytes:
        """Decrypt data that was sealed in a record of ``form``, one that ``reads`` accepts. Raises Unreadable."""
        if not self._keys:
            return data
        from cryptography.exceptions import InvalidTag

        salt, nonce, sealed = data[:_SALT_BYTES], data[_SALT_BYTES:][:_NONCE_BYTES], data[_SALT_BYTES + _NONCE_BYTES :]
        try:
            return _cipher(self._keys[form], salt).decrypt(nonce, sealed, _where(session_id, place))
        except (InvalidTag, ValueError) as error:
            raise Unreadable("what is stored of a session is damaged") from error


def _form(key: bytes) -> str:
    return f"{RECORD_VERSION}.{hashlib.sha256(b'omni_ws key id' + key).hexdigest()[:16]}"


def _where(session_id: str, place: int) -> bytes:
    return f"{session_id} {place}".encode()


@lru_cache(maxsize=64)
def _cipher(key: bytes, salt: bytes) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return AESGCM(HKDF(SHA256(), KEY_BYTES, salt, b"omni_ws session").derive(key))


def load_keys_of_store(setting: str) -> list[bytes]:
    """Return the keys of ``sessions.store_key``: one in base64, or the path of a file with one or more, a line each.

    Raises ConfigurationError, which does not repeat the setting.
    """
    if (key := _decoded(setting)) is not None:
        return [key]
    try:
        lines = Path(setting).expanduser().read_text(encoding="ascii").split()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigurationError(
            [
                f"sessions.store_key is neither {KEY_BYTES} bytes in base64 (openssl rand -base64 {KEY_BYTES}) nor a "
                f"file that can be read: {reason}"
            ]
        ) from None
    keys = [_decoded(line) for line in lines]
    if not keys or None in keys:
        raise ConfigurationError(
            [
                f"the file of sessions.store_key has a line that is not {KEY_BYTES} bytes in base64 "
                f"(openssl rand -base64 {KEY_BYTES}), or none at all"
            ]
        )
    return [key for key in keys if key is not None]


def _decoded(text: str) -> bytes | None:
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return key if len(key) == KEY_BYTES else None
