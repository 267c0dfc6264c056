"""LoneObject: distinguishes a body that is one JSON object from NDJSON, reading as little of it as possible."""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any, Final

import orjson

from omni_ws.core.json_values import MAX_BODY_VALUES, check_values

_NOT_BLANK: Final = re.compile(rb"[^ \t\r\n]")


class LoneObject:
    """An incremental test for a body that consists of one JSON object, possibly over several lines.

    The object has to contain a field of ``marks``, so that the parameters at the head of an NDJSON stream do not match,
    and only white space may follow. ``max_line_bytes`` is the longest line that NDJSON allows.

    Most bodies are decided by their first line: it is complete JSON, and what follows decides, or it is invalid JSON.
    Only a first line that breaks off within a value, or exceeds the limit, leaves the decision to ``finish``.
    """

    def __init__(self, marks: Set[str], *, max_line_bytes: int) -> None:
        self._marks = marks
        self._max_line_bytes = max_line_bytes
        #: The body so far.
        self.data = bytearray()
        #: Where to go on searching ``data``: for the first character, then for the end of the first line, then for
        #: anything but white space after it.
        self._searched = 0
        self._first_line_at: int | None = None
        #: Whether the first line is a complete object with a mark.
        self._first_line_matches = False
        #: Whether the first line cannot be a line of NDJSON, so that the object, if it is one, spans several.
        self._spans_lines = False

    def feed(self, data: bytes) -> bool | None:
        """Return False once the body cannot be a lone object, and None while it can."""
        self.data += data
        if self._first_line_at is None:
            self._searched = self._skip_blanks(self._searched)
            if self._searched == len(self.data):
                return None
            if self.data[self._searched] != ord("{"):
                return False
            self._first_line_at = self._searched
        if not self._first_line_matches and not self._spans_lines:
            end = self.data.find(b"\n", self._searched)
            self._searched = len(self.data) if end < 0 else end + 1
            if self._searched - self._first_line_at > self._max_line_bytes:
                self._spans_lines = True
            elif end >= 0 and not self._read_first_line(bytes(self.data[self._first_line_at : end])):
                return False
        if not self._first_line_matches:
            return None
        self._searched = self._skip_blanks(self._searched)
        return None if self._searched == len(self.data) else False

    def finish(self) -> bool:
        """Return whether the body, now complete, is a lone object."""
        if self._first_line_matches or self._first_line_at is None:
            return self._first_line_matches
        try:
            return self._is_marked(self._parsed(self.data))
        except orjson.JSONDecodeError:
            return False

    def _read_first_line(self, line: bytes) -> bool:
        """Return whether the body may still be a lone object."""
        try:
            self._first_line_matches = self._is_marked(self._parsed(line))
        except orjson.JSONDecodeError as error:
            self._spans_lines = 0 < len(error.doc) <= error.pos  # an error at the end: incomplete
        return self._first_line_matches or self._spans_lines

    @staticmethod
    def _parsed(data: bytes | bytearray) -> Any:
        check_values(data, MAX_BODY_VALUES)
        return orjson.loads(data)

    def _is_marked(self, value: Any) -> bool:
        return isinstance(value, dict) and not self._marks.isdisjoint(value)

    def _skip_blanks(self, start: int) -> int:
        found = _NOT_BLANK.search(self.data, start)
        return len(self.data) if found is None else found.start()
