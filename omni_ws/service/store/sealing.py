"""What is written to a store: compressed, and encrypted if there is a key (AES-256-GCM).

Each lease has a key of its own, derived from the server's key and a random salt (HKDF-SHA256): with one key for all,
random nonces would come too close to repeating after 2**32 records. What is sealed names its session and its place
there, so it cannot stand in for anything else.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from omni_ws.config.values import ConfigurationError
from omni_ws.service.store.records import RECORD_VERSION

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES: Final = 32
_SALT_BYTES: Final = 16
_NONCE_BYTES: Final = 12
#: The place of a snapshot; elements of the log count from 0.
SNAPSHOT_PLACE: Final = -1

#: Seals data for a place of one session.
Seal: TypeAlias = Callable[[bytes, int], bytes]


#: What is shorter is not compressed, and what is longer not either: most of it is audio, which takes more CPU time to
#: compress than all else that is done for it.
_COMPRESSED_BYTES: Final = (512, 64 << 10)
#: What is compressed has no more bytes than this; earlier servers compressed what was longer.
_MOST_BYTES: Final = 1 << 20
#: The first byte of what is compressed, and of what is not.
_DEFLATED: Final = b"z"
_PLAIN: Final = b"p"


class Unreadable(Exception):
    """The data was sealed with another key, for another place, or is damaged."""


def packed(data: bytes, *, compress: bool = True) -> bytes:
    """Return data compressed, if that is worthwhile: records name each of their fields, again and again."""
    shortest, longest = _COMPRESSED_BYTES
    return _DEFLATED + zlib.compress(data, 1) if compress and shortest <= len(data) <= longest else _PLAIN + data


def unpacked(data: bytes) -> bytes:
    """Return what was ``packed``. Raises Unreadable."""
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
    """Seals with the first of ``keys``, and opens with all of them; without keys, data stays as it is."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._keys = {_form(key): key for key in keys}
        #: Tells who can read a record: its version and its key.
        self.form = next(iter(self._keys), str(RECORD_VERSION))
        self.encrypts = bool(self._keys)

    def reads(self, form: str) -> bool:
        """Return whether records of this form can be read here."""
        return form == self.form or form in self._keys

    def seal(self, session_id: str) -> Seal:
        """Return what seals the data of one lease."""
        if not self._keys:
            return lambda data, place: data
        salt = os.urandom(_SALT_BYTES)
        cipher = _cipher(self._keys[self.form], salt)

        def seal(data: bytes, place: int) -> bytes:
            nonce = os.urandom(_NONCE_BYTES)
            return salt + nonce + cipher.encrypt(nonce, data, _where(session_id, place))

        return seal

    def open(self, form: str, session_id: str, data: bytes, place: int) -> bytes:
        """Return what was sealed, in a record of ``form``, which must be one that ``reads``. Raises Unreadable."""
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
