"""Incremental decoders for request bodies that are streams: lines of JSON, and frames behind a length."""

from __future__ import annotations

from collections.abc import Iterator

from omni_ws.errors import InvalidFrame, PayloadTooLarge


class NdjsonDecoder:
    """Lines out of bytes; HTTP chunk borders mean nothing. Blank lines are skipped but counted.

    ``line_number`` is that of the line given out last, from 1.
    """

    def __init__(self, *, max_line_bytes: int) -> None:
        self.max_line_bytes = max_line_bytes
        self.line_number = 0
        self._pending = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """Of a line whose end has not come."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises PayloadTooLarge when a line, white space and all, is longer than allowed."""
        first, *rest = data.split(b"\n")
        self._pending += first
        for following in rest:
            yield from self._end_line()
            self._pending += following
        if len(self._pending) > self.max_line_bytes:
            self.line_number += 1
            raise self._too_long()

    def finish(self) -> Iterator[bytes]:
        """The last line needs no newline."""
        yield from self._end_line()

    def _end_line(self) -> Iterator[bytes]:
        self.line_number += 1
        # The length with its white space, or it would depend on how the body was cut whether a line passes.
        if len(self._pending) > self.max_line_bytes:
            raise self._too_long()
        line = bytes(self._pending).strip(b" \t\r")
        self._pending.clear()
        if line:
            yield line

    def _too_long(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"line {self.line_number} is longer than {self.max_line_bytes} bytes")


class LengthPrefixedDecoder:
    """Frames behind a big-endian length of ``prefix_bytes`` (4 or 8)."""

    def __init__(self, *, prefix_bytes: int, max_frame_bytes: int) -> None:
        self.prefix_bytes = prefix_bytes
        self.max_frame_bytes = max_frame_bytes
        self.frame_number = 0
        self._pending = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """Of a frame whose end has not come."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises PayloadTooLarge as soon as a length is read that is over the cap; empty frames are skipped."""
        self._pending += data
        start = 0
        while len(self._pending) - start >= self.prefix_bytes:
            length = int.from_bytes(self._pending[start : start + self.prefix_bytes], "big")
            if length > self.max_frame_bytes:
                self.frame_number += 1
                raise PayloadTooLarge(
                    f"frame {self.frame_number} says {length} bytes; {self.max_frame_bytes} are allowed"
                )
            end = start + self.prefix_bytes + length
            if end > len(self._pending):
                break
            frame = bytes(self._pending[start + self.prefix_bytes : end])
            start = end
            self.frame_number += 1
            if frame:
                yield frame
        del self._pending[:start]

    def finish(self) -> Iterator[bytes]:
        """Raises InvalidFrame when the body ends inside a frame."""
        if self._pending:
            raise InvalidFrame(f"the body ends inside frame {self.frame_number + 1}")
        yield from ()
