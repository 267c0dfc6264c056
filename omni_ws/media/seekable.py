"""Files that must be whole to be read: an mp4 whose index (``moov``) comes after the pictures (``mdat``)."""

from __future__ import annotations

import io
import struct
from enum import Enum

from omni_ws.core.quota import UNCOUNTED, Room
from omni_ws.errors import UnsupportedFormat


class Mp4Order(Enum):
    """Whether an mp4 can be decoded while it comes."""

    UNKNOWN = "unknown"
    STREAM = "stream"
    INDEX_LAST = "index last"


class Mp4Boxes:
    """The boxes at the top level of a file that comes in pieces (ISO/IEC 14496-12 §4.2)."""

    def __init__(self) -> None:
        #: Where the next box begins.
        self._position = 0

    def order(self, data: memoryview) -> Mp4Order:
        """By the file's beginning, longer each time; UNKNOWN until the first ``moov`` or ``mdat``."""
        while self._position + 16 <= len(data):
            size, kind = struct.unpack_from(">I4s", data, self._position)
            if kind in (b"moov", b"moof"):
                return Mp4Order.STREAM
            if kind == b"mdat":
                return Mp4Order.INDEX_LAST
            if size == 1:
                size = struct.unpack_from(">Q", data, self._position + 8)[0]
            if size < 8:
                raise UnsupportedFormat("a damaged mp4")
            self._position += size
        return Mp4Order.UNKNOWN


class BufferedFile:
    """Bytes kept up to a limit, and counted in ``room`` until they are taken or the file is closed."""

    def __init__(self, max_bytes: int, room: Room = UNCOUNTED) -> None:
        self._max_bytes = max_bytes
        self._room = room
        self._counted = 0
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        if len(self._data) + len(data) > self._max_bytes:
            raise UnsupportedFormat(
                f"an mp4 with its index at the end can have {self._max_bytes} bytes; write it with the index first"
            )
        self._room.take(len(data))
        self._counted += len(data)
        self._data += data

    def view(self) -> memoryview:
        return memoryview(self._data).toreadonly()

    def take(self) -> bytes:
        taken = bytes(self._data)
        self.close()
        return taken

    def seekable(self) -> io.BytesIO:
        """All of it, which stays counted."""
        taken, self._data = bytes(self._data), bytearray()
        return io.BytesIO(taken)

    def close(self) -> None:
        """Idempotent."""
        counted, self._counted, self._data = self._counted, 0, bytearray()
        self._room.give(counted)
