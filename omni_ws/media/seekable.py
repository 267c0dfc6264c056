"""Files that must be whole to be read: an mp4 whose index (``moov``) comes after the pictures (``mdat``)."""

from __future__ import annotations

import io
import struct
from enum import Enum

from omni_ws.errors import UnsupportedFormat


class Mp4Order(Enum):
    """Whether an mp4 can be decoded while it comes."""

    UNKNOWN = "unknown"
    STREAM = "stream"
    INDEX_LAST = "index last"


def mp4_order(data: memoryview) -> Mp4Order:
    """By the boxes at the top level (ISO/IEC 14496-12 §4.2); UNKNOWN until the first ``moov`` or ``mdat``."""
    position = 0
    while position + 16 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        if kind in (b"moov", b"moof"):
            return Mp4Order.STREAM
        if kind == b"mdat":
            return Mp4Order.INDEX_LAST
        if size == 1:
            size = struct.unpack_from(">Q", data, position + 8)[0]
        if size < 8:
            raise UnsupportedFormat("a damaged mp4")
        position += size
    return Mp4Order.UNKNOWN


class BufferedFile:
    """Bytes kept up to a limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        if len(self._data) + len(data) > self._max_bytes:
            raise UnsupportedFormat(
                f"an mp4 with its index at the end can have {self._max_bytes} bytes; write it with the index first"
            )
        self._data += data

    def view(self) -> memoryview:
        return memoryview(self._data).toreadonly()

    def take(self) -> bytes:
        taken, self._data = bytes(self._data), bytearray()
        return taken

    def seekable(self) -> io.BytesIO:
        return io.BytesIO(self.take())
