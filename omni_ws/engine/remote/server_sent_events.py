"""Reading server-sent events as they come (WHATWG HTML, "Server-sent events").

Lines end in LF, CR or CRLF, wherever the bytes were cut; comments, ids and reconnection times are skipped.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from omni_ws.errors import EngineFailed

#: One event may be the whole audio of an answer in base64; what is longer is no event.
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class ServerSentEvent(NamedTuple):
    """``name`` is ``message`` where the sender gives none."""

    name: str
    data: bytes


class EventReader:
    """Fed with bytes, gives events."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._after_carriage_return = False
        self._at_start = True
        self._name = b""
        #: The lines of data so far, each with its end.
        self._data = bytearray()

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """The events that ``data`` completes. Raises EngineFailed for one that does not end."""
        if self._after_carriage_return and data.startswith(b"\n"):
            data = data[1:]
            self._after_carriage_return = False
        if not data:
            return []
        self._after_carriage_return = data.endswith(b"\r")
        first, *others = _LINE_END.split(data)
        self._line += first
        events: list[ServerSentEvent] = []
        for following in others:
            self._end_line(events)
            self._line += following
        if len(self._line) + len(self._data) > MAX_EVENT_BYTES:
            raise EngineFailed("the upstream sent an event without an end")
        return events

    def finish(self) -> list[ServerSentEvent]:
        """The event that the end of the stream completes: some servers leave out the last blank line."""
        events: list[ServerSentEvent] = []
        if self._line:
            self._end_line(events)
        self._dispatch(events)
        return events

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


class WholeReader:
    """Fed with the bytes of one JSON object, gives it as the data of one event at the end."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[ServerSentEvent]:
        """Raises EngineFailed for an object that does not end."""
        self._data += data
        if len(self._data) > MAX_EVENT_BYTES:
            raise EngineFailed("the upstream sent an answer without an end")
        return []

    def finish(self) -> list[ServerSentEvent]:
        """The object."""
        return [ServerSentEvent("message", bytes(self._data))]


def reader_of(head: bytes) -> EventReader | WholeReader | None:
    """The reader of an answer that begins so; None while there is nothing but white space."""
    begun = head.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if not begun:
        return None
    return WholeReader() if begun.startswith(b"{") else EventReader()
