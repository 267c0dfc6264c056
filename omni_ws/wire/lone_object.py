"""LoneObject: whether a body is one JSON object or lines of them, told from as little of it as can be."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Final

import orjson

_BLANKS: Final = b" \t\r\n"


class LoneObject:
    """``marks``: the object has one of these fields, and nothing stands behind it. It may be spread over lines."""

    def __init__(self, marks: Set[str], *, max_line_bytes: int) -> None:
        self._marks = marks
        self._max_line_bytes = max_line_bytes
        #: All that came.
        self.data = bytearray()
        #: Up to here ``data`` has been searched: for what begins the body, for the end of its first line, for what
        #: stands behind that line.
        self._searched = 0
        self._first_line_at: int | None = None
        #: Whether the first line is such an object.
        self._stands_alone = False
        #: Whether the first line is none that a stream of lines could begin with: only the whole body can tell.
        self._spread = False

    def feed(self, data: bytes) -> bool | None:
        """None while it depends on what comes."""
        self.data += data
        if self._first_line_at is None:
            self._searched = self._skip_blanks(self._searched)
            if self._searched == len(self.data):
                return None
            if self.data[self._searched] != ord("{"):
                return False
            self._first_line_at = self._searched
        if not self._stands_alone and not self._spread:
            end = self.data.find(b"\n", self._searched)
            self._searched = len(self.data) if end < 0 else end + 1
            if self._searched - self._first_line_at > self._max_line_bytes:
                self._spread = True
            elif end >= 0 and not self._read_first_line(bytes(self.data[self._first_line_at : end])):
                return False
        if not self._stands_alone:
            return None
        self._searched = self._skip_blanks(self._searched)
        return None if self._searched == len(self.data) else False

    def finish(self) -> bool:
        """The body has ended."""
        if self._stands_alone or self._first_line_at is None:
            return self._stands_alone
        try:
            return self._is_marked(orjson.loads(self.data))
        except orjson.JSONDecodeError:
            return False

    def _read_first_line(self, line: bytes) -> bool:
        """Whether it may still be a lone object."""
        try:
            self._stands_alone = self._is_marked(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            self._spread = 0 < len(error.doc) <= error.pos  # it breaks off, instead of being wrong
        return self._stands_alone or self._spread

    def _is_marked(self, value: Any) -> bool:
        return isinstance(value, dict) and not self._marks.isdisjoint(value)

    def _skip_blanks(self, start: int) -> int:
        end = len(self.data)
        while start < end and self.data[start] in _BLANKS:
            start += 1
        return start
