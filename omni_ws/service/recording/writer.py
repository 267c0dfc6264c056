"""The recorder's thread: encodes messages as lines, and writes lines to files."""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from msgspec import Struct

from omni_ws.service.recording.folder import NoRoom, RecordingFolder
from omni_ws.wire.recording import (
    CutLine,
    EndedLine,
    HeaderLine,
    ReceivedLine,
    RecordedLine,
    SentLine,
    digest,
    encode_line,
    without_content,
    without_payload,
    without_secrets,
)

logger = logging.getLogger(__name__)

#: Bytes of one recording that are gathered before they are written.
BUFFER_BYTES: Final = 64 * 1024
NO_ROOM: Final = "the total size limit of all recordings is reached"


class FileState(enum.Enum):
    """The state of a recording's file: from ABSENT to THERE with its first line, to CUT with a line that ends it."""

    ABSENT = "nothing was written"
    THERE = "it has a whole number of lines"
    CUT = "its last line is written"


@dataclass(slots=True, eq=False)
class RecordingFile:
    """The file of a recording. Only the thread changes it; the event loop reads ``failure``."""

    name: str
    #: ``time.monotonic()`` at offset 0.
    began: float = field(default_factory=time.monotonic)
    #: Why nothing more is written.
    failure: str | None = None
    state: FileState = FileState.ABSENT

    def now(self) -> float:
        """Milliseconds since the beginning of the recording."""
        return round((time.monotonic() - self.began) * 1000, 3)


class RecordedMessage(Struct, frozen=True, gc=False):
    """A message as it was received or sent, to be encoded by the thread. ``at`` is in milliseconds."""

    at: float
    connection: int
    outgoing: bool
    #: None for a piece of a body.
    is_text: bool | None
    data: bytes


class Batch:
    """Gathers the lines of many recordings, to write each file once. ``flush`` writes what is left."""

    def __init__(self, folder: RecordingFolder, *, payloads: bool) -> None:
        self._folder = folder
        self._payloads = payloads
        self._lines: dict[RecordingFile, bytearray] = {}

    def add(self, file: RecordingFile, event: HeaderLine | RecordedLine | RecordedMessage) -> None:
        lines = self._lines.setdefault(file, bytearray())
        if isinstance(event, RecordedMessage):
            event = _content(event) if self._payloads else _outline(event)
        if isinstance(event, CutLine | EndedLine):
            self._end(file, lines, event)
            return
        line = encode_line(event)
        if len(lines) + len(line) > BUFFER_BYTES:
            self._write(file, lines)
        lines += line

    def flush(self) -> None:
        for file, lines in self._lines.items():
            self._write(file, lines)

    def _end(self, file: RecordingFile, lines: bytearray, event: CutLine | EndedLine) -> None:
        self._write(file, lines)
        if file.failure is not None:
            event = CutLine(at=event.at, reason=file.failure)  # which could not be written when it happened
        lines += encode_line(event)
        self._write(file, lines, even_beyond=isinstance(event, CutLine))
        del self._lines[file]
        if file.state is not FileState.ABSENT:
            self._folder.finish(file.name)
        if isinstance(event, CutLine):
            logger.warning("recording %s truncated: %s", file.name, event.reason)

    def _write(self, file: RecordingFile, lines: bytearray, *, even_beyond: bool = False) -> None:
        """Write ``lines``, and empty them. When that fails, the recording is cut."""
        data = bytes(lines)
        lines.clear()
        if not data or file.state is FileState.CUT:
            return
        if file.failure is not None and not (even_beyond and file.state is FileState.THERE):
            return
        try:
            if file.state is FileState.ABSENT:
                self._folder.create(file.name, data)
                file.state = FileState.THERE
            else:
                self._folder.append(file.name, data, even_beyond=even_beyond)
        except NoRoom:
            self._fail(file, NO_ROOM)
        except OSError as error:
            self._fail(file, f"write failed: {error.strerror}")

    def _fail(self, file: RecordingFile, reason: str) -> None:
        file.failure = reason
        if file.state is FileState.THERE:
            try:
                self._folder.append(file.name, encode_line(CutLine(at=file.now(), reason=reason)), even_beyond=True)
                file.state = FileState.CUT
            except OSError as error:
                logger.warning("failed to mark recording %s as truncated: %s", file.name, error)


def _content(message: RecordedMessage) -> RecordedLine:
    kind = SentLine if message.outgoing else ReceivedLine
    data = message.data
    if message.outgoing and message.is_text:
        data = without_secrets(data)
    if message.is_text is not False:
        try:
            return kind(at=message.at, connection=message.connection, text=data.decode())
        except UnicodeDecodeError:
            if message.is_text:
                return kind(at=message.at, connection=message.connection, bad_text=data)
    return kind(at=message.at, connection=message.connection, binary=data)


def _outline(message: RecordedMessage) -> RecordedLine:
    """The message as a line with its size and digest in place of its content."""
    kind = SentLine if message.outgoing else ReceivedLine
    if message.is_text and (outline := without_content(without_secrets(message.data))) is not None:
        return kind(at=message.at, connection=message.connection, text=outline.decode())
    header: bytes | None = None
    if message.is_text is False:
        header, size, sha256 = without_payload(message.data)
    else:
        size, sha256 = digest(message.data)
    return kind(at=message.at, connection=message.connection, binary=header, size=size, sha256=sha256)
