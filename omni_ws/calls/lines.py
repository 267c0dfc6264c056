"""CallLines: the lines of a recording's file, each with its place in the file; and the sound that a line holds."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import orjson

from omni_ws.wire.frames import HEADER
from omni_ws.wire.recording import (
    HeaderLine,
    ReceivedLine,
    RecordedLine,
    RecordingKind,
    SentLine,
    SoundLine,
    StoredLine,
    decode_event,
    decode_header,
)

#: Names of the files of recordings: the second at which each began, and its id.
_NAME: Final = re.compile(r"\d{8}T\d{6}_(?P<id>[A-Za-z0-9_-]+)\.ndjson")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")
#: The kinds of recordings that are calls: people speak and listen.
CALL_KINDS: Final[frozenset[RecordingKind]] = frozenset(
    {"websocket", "realtime", "live", "telephony", "webrtc", "wyoming"}
)
#: The longest first line of a recording.
_HEADER_BYTES: Final = 64 * 1024
#: The longest other line: a message of 16 MiB, which a recorder takes at most, with an escape for each character.
MAX_LINE_BYTES: Final = 100 * 1024 * 1024
#: With fewer brackets than this no message is too deep to be written as JSON again.
_SURELY_SHALLOW: Final = 200


class Line(NamedTuple):
    """A line of a recording, with its offset and size in the file, in bytes."""

    event: RecordedLine
    offset: int
    size: int


class CallLines:
    """The file of one recording; iterate over it to read its lines.

    Raises OSError, and ValueError for a file that is no recording of a call.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            first = file.readline(_HEADER_BYTES)
            found = os.fstat(file.fileno())
        self.header: HeaderLine = decode_header(first)
        self._first = len(first)
        #: The size of the file when it was opened: lines that a running call adds later are not read.
        self.size = found.st_size
        self.started = datetime.fromisoformat(self.header.started)
        self.last_written = datetime.fromtimestamp(found.st_mtime, self.started.tzinfo)
        if self.header.kind not in CALL_KINDS:
            raise ValueError(f"a recording of kind {self.header.kind}, which is no call")

    def __iter__(self) -> Iterator[Line]:
        """Iterate over the lines after the header, up to the first line that is damaged or incomplete."""
        with self.path.open("rb", buffering=1 << 20) as file:
            offset = file.seek(self._first)
            for data in raw_lines(file):
                if offset + len(data) > self.size or not data.endswith(b"\n"):
                    return
                try:
                    event = decode_event(data)
                except ValueError:
                    return
                yield Line(event, offset, len(data))
                offset += len(data)

    def was_stored(self) -> bool:
        """Return whether the client asked for the session to be stored, so that it may read the recording."""
        return any(isinstance(line.event, StoredLine) for line in self)


def raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Iterate over the lines of a file from where it stands; a line above MAX_LINE_BYTES is yielded in pieces."""
    return iter(partial(file.readline, MAX_LINE_BYTES), b"")


def read_sound(file: BinaryIO, offset: int, size: int) -> bytes:
    """Return the sound in the line of ``size`` bytes at ``offset`` of a file; b"" if the line has no sound.

    Raises ValueError for a damaged line.
    """
    file.seek(offset)
    return sound_in(decode_event(file.read(size)))


def sound_in(event: RecordedLine, fields: dict[str, Any] | None = None) -> bytes:
    """Return the sound that a line holds, whatever the protocol; b"" if it has no sound.

    ``fields`` is the message in the line, if it is parsed already.
    """
    if isinstance(event, SoundLine):
        return event.audio
    if not isinstance(event, ReceivedLine | SentLine):
        return b""
    if event.text is None:
        return (event.binary or b"")[HEADER.size :]
    fields = parsed(event) if fields is None else fields
    media = fields.get("media")
    inner = media.get("payload") if isinstance(media, dict) else None
    for payload in (fields.get("payload"), fields.get("audio"), fields.get("delta"), inner):
        if isinstance(payload, str):
            try:
                return base64.b64decode(payload)
            except ValueError:
                return b""
    return b""


def parsed(event: ReceivedLine | SentLine) -> dict[str, Any]:
    """Return the JSON object of a text message; {} for any other message."""
    return parsed_text(event.text or "")


def parsed_text(text: str) -> dict[str, Any]:
    """Return the JSON object in a text; {} for anything else, and for an object that is nested too deeply to show."""
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) and not _is_deep(text, fields) else {}


def _is_deep(text: str, fields: dict[str, Any]) -> bool:
    """Return whether ``fields`` are nested too deeply for ``call.json``, which nests them up to five levels deeper."""
    if text.count("[") + text.count("{") < _SURELY_SHALLOW:
        return False
    try:
        orjson.dumps([[[[[fields]]]]])
    except orjson.JSONEncodeError:
        return True
    return False


class CallFolder:
    """The folder with the recordings of all workers, for reading. All methods block."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def find(self, call_id: str) -> CallLines | None:
        """Return the recording with this id; None if there is none, the id is not valid, or it is no readable call."""
        if not _ID.fullmatch(call_id):
            return None
        for path in self._paths():
            if call_id_of(path) == call_id:
                return _opened(path)
        return None

    def newest(self, most: int) -> list[CallLines]:
        """Return the newest calls, at most ``most``, the newest first. Files that are no readable calls are skipped."""
        found: list[CallLines] = []
        for path in sorted(self._paths(), key=lambda one: one.name, reverse=True):
            if (lines := _opened(path)) is not None:
                found.append(lines)
                if len(found) == most:
                    break
        return found

    def _paths(self) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()]
        except OSError:
            return []


def call_id_of(path: Path) -> str:
    """Return the call's id from the name of a recording's file; "" for any other file."""
    found = _NAME.fullmatch(path.name)
    return "" if found is None else found["id"]


def _opened(path: Path) -> CallLines | None:
    try:
        return CallLines(path)
    except (OSError, ValueError):
        return None
