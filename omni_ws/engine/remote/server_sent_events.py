"""Reading server-sent events as they come (WHATWG HTML, "Server-sent events").

Lines end in LF, CR or CRLF, wherever the bytes were cut; comments, ids and reconnection times are skipped.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from omni_ws.errors import EngineFailed

#: One event may be the whole audio of an answer in base64; what is longer is no event.
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024

#: The name of the event that a body is which is no stream.
WHOLE_BODY: Final = "whole body"

#: White space in front of such a body, in bytes.
_MOST_BLANKS: Final = 256

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """``name`` is ``message`` where the sender gives none."""

    name: str
    data: bytes


class EventReader:
    """Fed with bytes, gives events. A body that begins as a JSON object does is one event, WHOLE_BODY."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_carriage_return = False
        self._at_start = True
        self._is_whole = False
        #: Whether the newest bytes began or went on with data that is not a whole event yet.
        self.grows = False
        self._name = b""
        #: The lines of data so far, each with its end.
        self._data = bytearray()

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that ``data`` completes. Raises EngineFailed for one that does not end."""
        if self._is_whole:
            self._data += data
            self.grows = True
            self._check_size()
            return []
        before, events = self._pending, self._read(data)
        self.grows = self._pending > (0 if events else before)
        self._check_size()
        return events

    @property
    def _pending(self) -> int:
        return len(self._data) + (len(self._line) if self._line.startswith(b"data:") else 0)

    def _read(self, data: bytes) -> list[ServerSentEvent]:
        if self._after_carriage_return and data.startswith(b"\n"):
            data = data[1:]
            self._after_carriage_return = False
        if not data:
            return []
        self._after_carriage_return = data.endswith(b"\r")
        if self._at_start and len(self._line) < _MOST_BLANKS and _is_object(self._line + data):
            self._is_whole, self._data, self._line = True, self._line + data, bytearray()
            return []
        first, *others = _LINE_END.split(data)
        self._line += first
        events: list[ServerSentEvent] = []
        for following in others:
            self._end_line(events)
            self._line += following
        return events

    def finish(self) -> list[ServerSentEvent]:
        """The event that the end of the stream completes: some servers leave out the last blank line."""
        if self._is_whole:
            return [ServerSentEvent(WHOLE_BODY, bytes(self._data).removeprefix(_BYTE_ORDER_MARK))]
        events: list[ServerSentEvent] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

    def _check_size(self) -> None:
        if len(self._line) + len(self._data) > MAX_EVENT_BYTES:
            raise EngineFailed("the upstream sent an event without an end")

    def _end_line(self, events: list[ServerSentEvent]) -> None:
        line, self._line = bytes(self._line), bytearray()
        if self._at_start:
            line, self._at_start = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            self._dispatch(events)
            return
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data += value
            self._data += b"\n"
        elif field == b"event":
            self._name = value

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        if self._data:
            name = self._name.decode("utf-8", "replace") or "message"
            del self._data[-1:]
            events.append(ServerSentEvent(name, bytes(self._data)))
        self._name, self._data = b"", bytearray()


def _is_object(body: bytes | bytearray) -> bool:
    """Whether a body begins as a JSON object does."""
    return body.removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"{"
