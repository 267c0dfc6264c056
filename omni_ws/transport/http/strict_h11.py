"""A stricter h11, for input that a proxy in front may parse as another request. Uses private parts of h11.

A release of h11 may change these parts: only its series 0.16 is allowed, and the import fails if one of them is gone.
"""

from __future__ import annotations

import re
from typing import Final

import h11
from h11._readers import ChunkedReader
from h11._receivebuffer import ReceiveBuffer

from omni_ws.installing import check_private_names

check_private_names(
    "h11",
    {
        h11.Connection: ("_receive_buffer", "_reader"),
        ReceiveBuffer: ("_data", "_extract", "maybe_extract_lines", "is_next_line_obviously_invalid_request_line"),
        ChunkedReader: ("_bytes_in_chunk", "_bytes_to_discard", "_reading_trailer", "__call__"),
    },
)

#: Digits of a chunk size, enough for 64 bits. Implementations handle more digits differently, and a proxy that reads
#: another size sees another request.
MAX_CHUNK_SIZE_DIGITS: Final = 16

#: Empty lines that are ignored before a request line. Some clients end a body with one that is no part of it (RFC 9112,
#: section 2.2).
MAX_EMPTY_LINES: Final = 2

#: The longest line with the size of a chunk and its extensions, in bytes. No extension is known that anybody needs.
MAX_CHUNK_LINE: Final = 256

_HEX_DIGITS: Final = frozenset(b"0123456789abcdefABCDEF")
#: The line before a chunk (RFC 9112, section 7.1.1), without blanks after the size.
_CHUNK_LINE: Final = re.compile(rb"[0-9A-Fa-f]+(?:;[\t\x20-\x7e\x80-\xff]*)?")


class BoundedChunkedReader(ChunkedReader):
    """h11's reader of chunked bodies, with limits on the line in front of a chunk.

    h11 accepts 20 digits, and extensions of any bytes; but a proxy that takes a bare CR for the end of a line sees
    another request.
    """

    def __call__(self, buffer: ReceiveBuffer) -> h11.Data | h11.EndOfMessage | None:
        if not (self._bytes_in_chunk or self._reading_trailer):
            start = len(self._bytes_to_discard)
            digits = buffer._data[start : start + MAX_CHUNK_SIZE_DIGITS + 1]
            if len(digits) > MAX_CHUNK_SIZE_DIGITS and _HEX_DIGITS.issuperset(digits):
                raise h11.RemoteProtocolError("chunk size too long")
            line = bytes(buffer._data[start : start + MAX_CHUNK_LINE + 2])
            end = line.find(b"\r\n")
            if end < 0 and len(line) > MAX_CHUNK_LINE + 1:
                raise h11.RemoteProtocolError("chunk line too long")
            if end >= 0 and not _CHUNK_LINE.fullmatch(line, 0, end):
                raise h11.RemoteProtocolError("illegal chunk header")
        return super().__call__(buffer)


def limit_chunk_sizes(http: h11.Connection) -> None:
    """Limit the chunk sizes of the request whose head ``http`` has just parsed."""
    if isinstance(http._reader, ChunkedReader):
        http._reader = BoundedChunkedReader()


class StrictReceiveBuffer(ReceiveBuffer):
    """h11's receive buffer, which also refuses header lines that end without CR or continue the line before.

    h11 accepts both, as RFC 9112 permits (sections 2.2 and 5.2). But a proxy that parses such lines differently sees
    another request. An empty line before a head, which h11 refuses, can be skipped.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Within ``maybe_extract_lines``, the bytes of the extracted lines; None outside.
        self._raw: bytearray | None = None

    def _extract(self, count: int) -> bytearray:
        extracted = super()._extract(count)
        if self._raw is not None:
            self._raw = extracted
        return extracted

    def skip_empty_line(self) -> bool:
        """Remove the empty line at the beginning of the buffer, if there is one. Returns whether there was."""
        found = self._data.startswith(b"\r\n")
        if found:
            self._extract(2)
        return found

    def is_next_line_obviously_invalid_request_line(self) -> bool:
        return self._data != b"\r" and super().is_next_line_obviously_invalid_request_line()

    def maybe_extract_lines(self) -> list[bytearray] | None:
        self._raw = bytearray()
        lines = super().maybe_extract_lines()
        raw, self._raw = self._raw, None
        if lines is None:
            return None
        if raw.count(b"\n") != raw.count(b"\r\n"):
            raise h11.RemoteProtocolError("bare LF")
        if any(line.startswith((b" ", b"\t")) for line in lines[1:]):
            raise h11.RemoteProtocolError("folded line")
        return lines


def skip_empty_line(http: h11.Connection) -> bool:
    """Skip an empty line before a head. Returns whether there was one. ``http`` comes from ``strict_http``."""
    buffer = http._receive_buffer
    return isinstance(buffer, StrictReceiveBuffer) and buffer.skip_empty_line()


def strict_http(max_header_bytes: int) -> h11.Connection:
    """Create the server's side of an HTTP/1.1 connection, which parses heads strictly."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=max_header_bytes)
    http._receive_buffer = StrictReceiveBuffer()
    return http
