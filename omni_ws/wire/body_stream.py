"""Incremental decoders for the framings of streamed request bodies: NDJSON and length-prefixed frames."""

from __future__ import annotations

from collections.abc import Iterator

from omni_ws.errors import InvalidFrame, PayloadTooLarge


class NdjsonDecoder:
    """Splits a body into lines, regardless of how HTTP cut it into chunks.

    Blank lines are skipped but counted. ``line_number`` is that of the last line yielded, from 1. A line of more than
    ``max_line_bytes``, white space included, raises PayloadTooLarge.
    """

    def __init__(self, *, max_line_bytes: int) -> None:
        self.max_line_bytes = max_line_bytes
        self.line_number = 0
        self._pending = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """The bytes held of a line that is not complete."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that ``data`` completes, stripped. Raises PayloadTooLarge."""
        first, *rest = data.split(b"\n")
        self._pending += first
        for following in rest:
            yield from self._end_line()
            self._pending += following
        if len(self._pending) > self.max_line_bytes:
            self.line_number += 1
            raise self._too_long()

    def finish(self) -> Iterator[bytes]:
        """Yield the last line if it has no newline. Raises PayloadTooLarge."""
        yield from self._end_line()

    def _end_line(self) -> Iterator[bytes]:
        self.line_number += 1
        # The limit includes white space, so that the result does not depend on how the body is cut.
        if len(self._pending) > self.max_line_bytes:
            raise self._too_long()
        line = bytes(self._pending).strip(b" \t\r")
        self._pending.clear()
        if line:
            yield line

    def _too_long(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"line {self.line_number} is longer than {self.max_line_bytes} bytes")


class LengthPrefixedDecoder:
    """Splits a body into frames, each preceded by its length: a big-endian integer of ``prefix_bytes`` (4 or 8).

    Empty frames are skipped but counted. ``frame_number`` is that of the last frame yielded, from 1.
    """

    def __init__(self, *, prefix_bytes: int, max_frame_bytes: int) -> None:
        self.prefix_bytes = prefix_bytes
        self.max_frame_bytes = max_frame_bytes
        self.frame_number = 0
        self._pending = bytearray()

    @property
    def unfinished_bytes(self) -> int:
        """The bytes held of a frame that is not complete, its prefix included."""
        return len(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the frames that ``data`` completes. Raises PayloadTooLarge as soon as a prefix exceeds the limit."""
        self._pending += data
        start = 0
        while len(self._pending) - start >= self.prefix_bytes:
            length = int.from_bytes(self._pending[start : start + self.prefix_bytes], "big")
            if length > self.max_frame_bytes:
                self.frame_number += 1
                raise PayloadTooLarge(
                    f"frame {self.frame_number}: at most {self.max_frame_bytes} bytes per frame, got {length}"
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
        """Yield nothing. Raises InvalidFrame when the body ends within a frame."""
        if self._pending:
            raise InvalidFrame(f"the body ended inside frame {self.frame_number + 1}")
        yield from ()
