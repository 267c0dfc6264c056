"""MP4 files that can only be decoded as a whole, because their index (``moov``) follows the media data (``mdat``)."""

from __future__ import annotations

import io
import struct
from enum import Enum

from omni_ws.core.quota import UNLIMITED, Room
from omni_ws.errors import UnsupportedFormat


class Mp4Order(Enum):
    """Whether an MP4 file can be decoded while it arrives: its index precedes the media data, or follows it."""

    UNKNOWN = "unknown"
    STREAM = "stream"
    INDEX_LAST = "index last"


class Mp4Boxes:
    """Walks the top-level boxes of an MP4 file that arrives in pieces (ISO/IEC 14496-12, section 4.2)."""

    def __init__(self) -> None:
        #: The offset of the next box.
        self._position = 0

    def order(self, data: memoryview) -> Mp4Order:
        """Return the order, or UNKNOWN. ``data`` is the file so far, from its first byte.

        Raises UnsupportedFormat for a damaged box.
        """
        while self._position + 16 <= len(data):
            size, kind = struct.unpack_from(">I4s", data, self._position)
            if kind in (b"moov", b"moof"):
                return Mp4Order.STREAM
            if kind == b"mdat":
                return Mp4Order.INDEX_LAST
            if size == 1:
                size = struct.unpack_from(">Q", data, self._position + 8)[0]
            if size < 8:
                raise UnsupportedFormat("corrupt mp4")
            self._position += size
        return Mp4Order.UNKNOWN


class BufferedFile:
    """Buffers a file up to ``max_bytes``, accounted for in ``room`` until it is taken or closed."""

    def __init__(self, max_bytes: int, room: Room = UNLIMITED) -> None:
        self._max_bytes = max_bytes
        self._room = room
        self._reserved = 0
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        """Add bytes. Raises UnsupportedFormat above ``max_bytes``, and what ``room`` raises."""
        if len(self._data) + len(data) > self._max_bytes:
            raise UnsupportedFormat(
                f"an mp4 with its index at the end must not exceed {self._max_bytes} bytes; "
                "write the index first (faststart)"
            )
        self._room.take(len(data))
        self._reserved += len(data)
        self._data += data

    def view(self) -> memoryview:
        """Return a read-only view of the bytes."""
        return memoryview(self._data).toreadonly()

    def take(self) -> bytes:
        """Remove and return the bytes, and release their memory in ``room``."""
        taken = bytes(self._data)
        self.close()
        return taken

    def seekable(self) -> io.BytesIO:
        """Return the bytes as a file object. They remain accounted for until ``close``."""
        taken, self._data = bytes(self._data), bytearray()
        return io.BytesIO(taken)

    def close(self) -> None:
        """Discard the bytes and release their memory in ``room``. Idempotent."""
        reserved, self._reserved, self._data = self._reserved, 0, bytearray()
        self._room.give(reserved)
