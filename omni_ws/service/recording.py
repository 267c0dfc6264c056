"""Recordings: files with all that sessions receive and send, written by a thread; and the limits of their folder.

The event loop puts events into a queue that is bounded in bytes, and never waits for a disk. No failure of a disk
reaches a session: a recording that cannot continue is cut, with the reason in its last line.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import queue
import random
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeAlias

from msgspec import Struct

from omni_ws import __version__
from omni_ws.config.values import ConfigurationError
from omni_ws.core.chunks import AudioFormat
from omni_ws.service.process import check_space
from omni_ws.wire.recording import (
    FORMAT,
    VERSION,
    AnsweredLine,
    ClosedLine,
    CutLine,
    EndedLine,
    HeaderLine,
    InputEndedLine,
    OpenedLine,
    OutputEndedLine,
    PlayedLine,
    ReceivedLine,
    RecordedLine,
    RecordingKind,
    RequestedLine,
    SentLine,
    Side,
    SoundLine,
    StoredLine,
    ToldLine,
    digest,
    encode_line,
    without_content,
    without_payload,
    without_secrets,
)
from omni_ws.wire.session_config import scrubbed

logger = logging.getLogger(__name__)

#: Bytes of events that may wait for the disk.
QUEUE_BYTES: Final = 16 * 1024 * 1024
#: Bytes that an event is charged besides its content.
_EVENT_BYTES: Final = 256
#: How long the thread lets events gather: waking up for each message costs the event loop more than the message.
_GATHER_SEC: Final = 0.05
#: Seconds between two searches for recordings that have become too old.
SWEEP_SEC: Final = 60.0
#: How long the server waits for a disk when it stops.
_CLOSE_SEC: Final = 5.0

TOO_SLOW: Final = "the disk is too slow"


class Recorder:
    """Begins recordings, and runs the thread that writes them.

    Call ``begin``, and use the SessionRecording that it returns, on the event loop. ``close`` blocks: call it in a
    thread.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        *,
        engine: str,
        model: Callable[[], str],
        fraction: float = 1.0,
        keys: Collection[str] = (),
        payloads: bool = True,
        capacity: int = QUEUE_BYTES,
    ) -> None:
        """Record ``fraction`` of the sessions, chosen at random; with ``keys`` (names), only those of these API keys.

        Without ``payloads``, only the sizes and digests of contents are recorded. ``capacity`` is that of the queue in
        bytes.
        """
        self._folder = folder
        self._engine = engine
        self._model = model
        self._fraction = fraction
        self._keys = frozenset(keys)
        #: Whether messages are recorded with their content.
        self.payloads = payloads
        self._capacity = capacity
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # The first is written by the event loop only, the second by the thread only, so that no lock is needed. The
        # difference is how much waits.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._live: set[SessionRecording] = set()
        self._closing = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        """Start the thread, which also removes recordings that are too old. Idempotent; ``begin`` starts it, too."""
        if self._thread.ident is None:
            self._thread.start()

    def begin(
        self, kind: RecordingKind, *, key: str | None, name: str, asked_for: bool = False
    ) -> SessionRecording | None:
        """Begin to record a session. Returns None if it is not to be recorded, the queue is full, or after ``close``.

        ``key`` is the name of the session's API key; ``name``, of letters, digits, "_" and "-", becomes part of the
        file's name. With ``asked_for`` (by an operator) the session is recorded whatever its key and ``fraction``.
        """
        if not asked_for and self._keys and key not in self._keys:
            return None
        if not asked_for and self._fraction < 1 and random.random() >= self._fraction:
            return None
        if self._closing.is_set():
            return None
        self.start()
        now = datetime.now(UTC)
        recording = SessionRecording(self, f"{now:%Y%m%dT%H%M%S}_{name}.ndjson", key)
        header = HeaderLine(
            recording=FORMAT,
            version=VERSION,
            kind=kind,
            id=name,
            server=__version__,
            engine=self._engine,
            model=self._model(),
            started=now.isoformat(timespec="milliseconds"),
            key=key,
            payloads=self.payloads,
        )
        if not self._has_room(_EVENT_BYTES):
            return None
        self._live.add(recording)
        self.put(recording, header)
        return recording

    def put(self, recording: SessionRecording, event: _Event, size: int = 0) -> None:
        """Queue an event of a recording; if the queue is full, cut the recording instead."""
        size += _EVENT_BYTES
        if not self._has_room(size):
            recording.cut(TOO_SLOW)
            return
        self._put_bytes += size
        self._queue.put((recording.file, event, size))

    def _has_room(self, size: int) -> bool:
        return self._put_bytes - self._taken_bytes + size <= self._capacity

    def last(self, recording: SessionRecording, event: RecordedLine) -> None:
        """Queue the last event of a recording, even if the queue is full."""
        self._live.discard(recording)
        self._put_bytes += _EVENT_BYTES
        self._queue.put((recording.file, event, _EVENT_BYTES))

    def close(self) -> None:
        """End all recordings, and wait some seconds at most until the queued events are written; the rest is lost."""
        for recording in tuple(self._live):
            recording.end()
        self._closing.set()
        if self._thread.ident is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_SEC)
            if self._thread.is_alive():
                logger.warning("writing the recordings timed out; unwritten data is lost")

    # the thread

    def _run(self) -> None:
        next_sweep = time.monotonic()
        while not self._done:
            if (left := next_sweep - time.monotonic()) <= 0:
                self._sweep()
                next_sweep, left = time.monotonic() + SWEEP_SEC, SWEEP_SEC
            try:
                item = self._queue.get(timeout=left)
            except queue.Empty:
                continue
            self._closing.wait(_GATHER_SEC)
            touched: dict[RecordingFile, None] = {}
            while item is not None:
                file, event, size = item
                touched[file] = None
                file.take(event, self._folder, payloads=self.payloads)
                self._taken_bytes += size
                item = self._next()
            for file in touched:
                file.flush(self._folder)
            self._done = self._closing.is_set() and self._queue.empty()

    def _next(self) -> _Item | None:
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def _sweep(self) -> None:
        try:
            self._folder.remove_old()
        except OSError as error:
            logger.warning("failed to remove an old recording: %s", error)


def _clock() -> Callable[[], float]:
    """Return the clock of the running event loop, which also paces audio; without a loop, a monotonic one."""
    try:
        return asyncio.get_running_loop().time
    except RuntimeError:
        return time.monotonic


class SessionRecording:
    """The recording of one session, over any number of connections. Disk errors are never raised here.

    The recording ends when the session is finished and all its connections are closed, or by ``cut``.
    """

    def __init__(self, recorder: Recorder, name: str, key: str | None) -> None:
        self.key = key
        self.file = RecordingFile(name, _clock())
        self._recorder = recorder
        self._connections = 0
        self._open = 0
        self._finished = False
        self._is_over = False

    def connection(self) -> ConnectionRecording:
        """Begin to record a connection, or an HTTP request, of the session."""
        number = self._connections
        self._connections += 1
        self._open += 1
        return ConnectionRecording(self, number)

    def finish(self) -> None:
        """Note that the session has ended."""
        self._finished = True
        self._end_if_over()

    def connection_closed(self) -> None:
        """Note that a connection of the session is closed."""
        self._open -= 1
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._finished and not self._open:
            self.end()

    def end(self) -> None:
        """End the recording, as it is complete. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._recorder.last(self, EndedLine(at=self.now()))

    def cut(self, reason: str) -> None:
        """End the recording before its session ends, with the reason in its last line. Idempotent."""
        if not self._is_over:
            self._is_over = True
            self._recorder.last(self, CutLine(at=self.now(), reason=reason))

    def now(self) -> float:
        return self.file.now()

    # what no message of a connection says

    @property
    def has_sound(self) -> bool:
        """Whether audio that no message carries is recorded, see ``sound``."""
        return self._recorder.payloads

    def sound(
        self, audio: bytes, source: AudioFormat, *, by_user: bool, request_id: str | None = None, in_ms: float = 0.0
    ) -> None:
        """Record audio that no message carries (see SoundLine), if ``has_sound``. ``source`` is its format.

        ``in_ms``: in how many milliseconds it will be played.
        """
        if self.has_sound and not self._is_over and self.file.failure is None:
            at = self.now() + in_ms
            self._recorder.put(self, RecordedSound(at, audio, source, by_user, request_id), len(audio))

    def told(self, frame: bytes) -> None:
        """Record what the session tells a client of another protocol, as a native ``frame``; see ToldLine."""
        if not self._is_over and self.file.failure is None:
            self._recorder.put(self, RecordedFrame(self.now(), frame), len(frame))

    def played(self, request_id: str, played_ms: float) -> None:
        """Record how much of the answer to a request has been played so far."""
        self.put(PlayedLine(at=self.now(), request_id=request_id, played_ms=round(played_ms, 3)))

    def store(self) -> None:
        """Record that the client asked for the session to be stored, and may read the recording; see StoredLine."""
        self.put(StoredLine(at=self.now()))

    def put(self, event: RecordedLine) -> None:
        if not self._is_over and self.file.failure is None:
            self._recorder.put(self, event)

    def put_message(self, connection: int, data: bytes, *, outgoing: bool, is_text: bool | None) -> None:
        if not self._is_over and self.file.failure is None:
            self._recorder.put(self, RecordedMessage(self.now(), connection, outgoing, is_text, data), len(data))


class ConnectionRecording:
    """The part of a recording that belongs to one connection, or to one HTTP request."""

    def __init__(self, recording: SessionRecording, number: int) -> None:
        self.recording = recording
        self._number = number
        self._closed = False

    def opened(self, target: str, *, subprotocol: str | None, last_output: int | None) -> None:
        self.recording.put(
            OpenedLine(
                at=self.recording.now(),
                connection=self._number,
                target=target,
                subprotocol=subprotocol,
                last_output=last_output,
            )
        )

    def requested(self, method: str, target: str, headers: dict[str, str]) -> None:
        at = self.recording.now()
        self.recording.put(RequestedLine(at=at, connection=self._number, method=method, target=target, headers=headers))

    def received(self, data: bytes, *, is_text: bool | None = None) -> None:
        """Record a received message; ``is_text`` is None for a piece of an HTTP body."""
        self.recording.put_message(self._number, data, outgoing=False, is_text=is_text)

    def sent(self, data: bytes, *, is_text: bool | None = None) -> None:
        self.recording.put_message(self._number, data, outgoing=True, is_text=is_text)

    def input_ended(self) -> None:
        self.recording.put(InputEndedLine(at=self.recording.now(), connection=self._number))

    def answered(self, status: int, headers: Iterable[tuple[str, str]]) -> None:
        kept = {name: value for name, value in headers if name.lower() in ("content-type", "retry-after")}
        self.recording.put(AnsweredLine(at=self.recording.now(), connection=self._number, status=status, headers=kept))

    def output_ended(self) -> None:
        self.recording.put(OutputEndedLine(at=self.recording.now(), connection=self._number))

    def closed(self, by: Side, code: int | None = None) -> None:
        if not self._closed:
            self._closed = True
            self.recording.put(ClosedLine(at=self.recording.now(), connection=self._number, by=by, code=code))
            self.recording.connection_closed()


# In the thread: messages are encoded as lines, and lines are written to files.

#: Bytes of one recording that are gathered before they are written.
BUFFER_BYTES: Final = 64 * 1024
NO_ROOM: Final = "the total size limit of all recordings is reached"


class FileState(enum.Enum):
    """The state of a recording's file. THERE: it has its first line. CUT: writing failed, as its last line says."""

    ABSENT = "nothing was written"
    THERE = "it has a whole number of lines"
    CUT = "its last line is written"


class RecordingFile:
    """The file of a recording, with the lines that are to be written. Only the recorder's thread changes it.

    The event loop reads ``failure`` and ``is_over``, and calls ``now``.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is monotonic, in seconds."""
        self.name = name
        self._clock = clock
        #: Why nothing more is written; None while lines are.
        self.failure: str | None = None
        #: Whether the last line was written, as far as it could be.
        self.is_over = False
        #: The time of the clock at offset 0.
        self._began = clock()
        self._state = FileState.ABSENT
        self._lines = bytearray()

    def now(self) -> float:
        """Return the milliseconds since the beginning of the recording."""
        return round((self._clock() - self._began) * 1000, 3)

    def take(self, event: _Event, folder: RecordingFolder, *, payloads: bool) -> None:
        """Add an event; write the collected lines if they are many or the event is the last. Never raises.

        Without ``payloads``, the size and the digest of a message stand for its content.
        """
        try:
            if isinstance(event, RecordedMessage):
                event = _content(event) if payloads else _outline(event)
            elif isinstance(event, RecordedFrame):
                frame = scrubbed(event.frame)
                text = frame if payloads else without_content(frame) or b"{}"
                event = ToldLine(at=event.at, text=text.decode())
            elif isinstance(event, RecordedSound):
                event = event.line()
            if isinstance(event, CutLine | EndedLine):
                self._end(folder, event)
                return
            line = encode_line(event)
            if len(self._lines) + len(line) > BUFFER_BYTES:
                self.flush(folder)
            self._lines += line
        except Exception:
            # The thread goes on with the other recordings.
            logger.exception("recording %s failed", self.name)
            self.failure = "an internal error"

    def flush(self, folder: RecordingFolder, *, even_beyond: bool = False) -> None:
        """Write the collected lines. If that fails, cut the recording, and drop these lines.

        ``even_beyond``: write even beyond the limit of the folder, and after a failure.
        """
        data = bytes(self._lines)
        self._lines.clear()
        if not data or self._state is FileState.CUT:
            return
        if self.failure is not None and not (even_beyond and self._state is FileState.THERE):
            return
        try:
            if self._state is FileState.ABSENT:
                folder.create(self.name, data)
                self._state = FileState.THERE
            else:
                folder.append(self.name, data, even_beyond=even_beyond)
        except NoRoom:
            self._fail(folder, NO_ROOM)
        except OSError as error:
            self._fail(folder, f"write failed: {error.strerror}")

    def _end(self, folder: RecordingFolder, event: CutLine | EndedLine) -> None:
        self.flush(folder)
        if self.failure is not None:
            event = CutLine(at=event.at, reason=self.failure)  # which could not be written when it happened
        self._lines += encode_line(event)
        self.flush(folder, even_beyond=isinstance(event, CutLine))
        if self._state is not FileState.ABSENT:
            folder.finish(self.name)
        self.is_over = True
        if isinstance(event, CutLine):
            logger.warning("recording %s truncated: %s", self.name, event.reason)

    def _fail(self, folder: RecordingFolder, reason: str) -> None:
        self.failure = reason
        if self._state is FileState.THERE:
            try:
                folder.append(self.name, encode_line(CutLine(at=self.now(), reason=reason)), even_beyond=True)
                self._state = FileState.CUT
            except OSError as error:
                logger.warning("failed to mark recording %s as truncated: %s", self.name, error)


class RecordedMessage(Struct, frozen=True, gc=False):
    """A message as it was received or sent, before the thread encodes it.

    ``at`` is milliseconds since the recording began.
    """

    at: float
    connection: int
    outgoing: bool
    #: None for a piece of a body.
    is_text: bool | None
    data: bytes


class RecordedFrame(Struct, frozen=True, gc=False):
    """The content of a ToldLine, before the thread encodes it."""

    at: float
    frame: bytes


class RecordedSound(Struct, frozen=True, gc=False):
    """The content of a SoundLine, before the thread encodes it."""

    at: float
    audio: bytes
    source: AudioFormat
    by_user: bool
    request_id: str | None

    def line(self) -> SoundLine:
        return SoundLine(
            at=round(self.at, 3),
            by="user" if self.by_user else "server",
            format=self.source.encoding.value,
            sample_rate=self.source.sample_rate,
            audio=self.audio,
            request_id=self.request_id,
        )


#: What a recording takes: lines, and what the thread makes lines of.
_Event: TypeAlias = HeaderLine | RecordedLine | RecordedMessage | RecordedFrame | RecordedSound
#: An entry of the queue: an event of a recording, and the bytes that it is charged.
_Item: TypeAlias = tuple[RecordingFile, _Event, int]


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
    """Return the line of a message, with its size and digest in place of its content."""
    kind = SentLine if message.outgoing else ReceivedLine
    if message.is_text and (outline := without_content(without_secrets(message.data))) is not None:
        return kind(at=message.at, connection=message.connection, text=outline.decode())
    header: bytes | None = None
    if message.is_text is False:
        header, size, sha256 = without_payload(message.data)
    else:
        size, sha256 = digest(message.data)
    return kind(at=message.at, connection=message.connection, binary=header, size=size, sha256=sha256)


# The folder of recordings.

#: Names of recordings. No other file in the folder is counted or removed.
_OURS: Final = re.compile(r"\d{8}T\d{6}_[A-Za-z0-9_-]+\.ndjson")
#: Permissions that the folder may not give to its group or to others.
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class NoRoom(Exception):
    """Raised if the folder is at its limit, and no file may be removed: all recordings are still being written."""


class RecordingFolder:
    """A folder of recordings, limited to ``max_bytes`` and an age of ``max_age`` seconds (0: no limit). For one thread.

    When the folder is full, the oldest recordings are removed, except those that are still being written.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_bytes: int,
        max_age: float,
        wall_clock: Callable[[], float] = time.time,
        owns: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """``owns`` returns whether this process manages a file, given its name: several may share the folder."""
        self._owns = owns
        self._path = path
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._now = wall_clock
        #: The size of each file, and the wall time of the last write to it; the oldest file first.
        self._files: dict[str, tuple[int, float]] = {}
        #: Files that are still being written, and are not removed.
        self._live: set[str] = set()
        self._total = 0

    @property
    def total(self) -> int:
        """The bytes of all recordings that this process manages."""
        return self._total

    def prepare(self) -> None:
        """Create the folder, or list the recordings that it contains.

        Raises ConfigurationError if the folder is open to other users, or cannot be written.
        """
        try:
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self._path.stat().st_mode
            found = sorted(
                entry.name for entry in self._path.iterdir() if _OURS.fullmatch(entry.name) and self._owns(entry.name)
            )
        except OSError as error:
            raise ConfigurationError([f"record: {self._path}: {error.strerror}"]) from error
        if mode & _OTHERS:
            problem = f"record: {self._path} is accessible to other users (mode {stat.S_IMODE(mode):o})"
            raise ConfigurationError(
                [f"{problem}; recordings contain private speech: chmod 700, or choose another folder"]
            )
        try:
            check_space(self._path)
        except OSError as error:
            raise ConfigurationError([f"record: cannot write to {self._path}: {error.strerror}"]) from error
        for name in found:
            status = (self._path / name).lstat()
            if stat.S_ISREG(status.st_mode):
                self._files[name] = status.st_size, status.st_mtime
                self._total += status.st_size

    def create(self, name: str, data: bytes) -> None:
        """Create a file that begins with ``data``. Recordings that are too old, or in its way, are removed.

        Raises OSError, also if the file exists, and NoRoom.
        """
        self.remove_old()
        self._make_room(len(data))
        self._files[name] = 0, self._now()
        self._live.add(name)
        try:
            self._write(name, data, os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            self._forget(name)
            raise
        except OSError:
            self._remove(name)  # a full disk has made an empty file
            raise

    def append(self, name: str, data: bytes, *, even_beyond: bool = False) -> None:
        """Append ``data`` to a file. Old recordings are removed if there is no room for it.

        With ``even_beyond``, ``data`` is written even beyond the limit of the folder. Raises NoRoom; OSError, after
        which the file is as long as before.
        """
        if not even_beyond:
            self._make_room(len(data))
        self._write(name, data, 0)

    def finish(self, name: str) -> None:
        """Note that nothing more will be written to a file, so that the file may be removed."""
        self._live.discard(name)

    def remove_old(self) -> None:
        """Remove the finished recordings whose last write is longer ago than ``max_age``. Raises OSError."""
        if self._max_age:
            oldest = self._now() - self._max_age
            for name in [one for one in self._removable() if self._files[one][1] < oldest]:
                self._remove(name)

    def _removable(self) -> list[str]:
        return [name for name in self._files if name not in self._live]

    def _make_room(self, wanted: int) -> None:
        if self._total + wanted <= self._max_bytes:
            return
        for name in self._removable():
            self._remove(name)
            if self._total + wanted <= self._max_bytes:
                return
        raise NoRoom

    def _remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        size, _ = self._files.pop(name)
        self._live.discard(name)
        self._total -= size

    def _write(self, name: str, data: bytes, flags: int) -> None:
        size, _ = self._files[name]
        # Opened for each write: a thousand sessions that are recorded need no thousand open files.
        descriptor = os.open(self._path / name, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | flags, 0o600)
        try:
            written = 0
            try:
                while written < len(data):
                    written += os.write(descriptor, data[written:])
            except OSError:
                os.ftruncate(descriptor, size)  # half a line is worse than none
                raise
        finally:
            os.close(descriptor)
        self._files[name] = size + len(data), self._now()
        self._total += len(data)
