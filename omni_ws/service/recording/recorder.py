"""The recorder: writes what sessions receive and send to files, in a thread of its own.

The event loop puts events into a queue that is bounded in bytes, and never waits for a disk. No failure of a disk
reaches a session: a recording that cannot continue is cut, with the reason in its last line.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

from omni_ws import __version__
from omni_ws.service.recording.folder import RecordingFolder
from omni_ws.service.recording.writer import Batch, RecordedMessage, RecordingFile
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
    RecordedLine,
    RecordingKind,
    RequestedLine,
    Side,
)

logger = logging.getLogger(__name__)

#: Bytes that may wait for the disk.
QUEUE_BYTES: Final = 16 * 1024 * 1024
#: Bytes that an event is charged besides its content.
_EVENT_BYTES: Final = 256
#: How long the thread lets events gather: waking up for each message costs the event loop more than the message.
_GATHER_SEC: Final = 0.05
#: Seconds between two searches for recordings that have become too old.
_SWEEP_SEC: Final = 60.0
#: How long the server waits for a disk when it stops.
_CLOSE_SEC: Final = 5.0

TOO_SLOW: Final = "the disk is too slow"


_Item: TypeAlias = tuple[RecordingFile, HeaderLine | RecordedLine | RecordedMessage, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingChoice:
    """Which sessions are recorded, and what of them."""

    #: Share of the sessions that is recorded, chosen at random.
    fraction: float = 1.0
    #: Names of the keys whose sessions are recorded; empty for all.
    keys: frozenset[str] = frozenset()
    #: Whether contents are recorded, or only their sizes and digests.
    payloads: bool = True


class Recorder:
    """Begins recordings, and owns the thread that writes them.

    ``begin`` and what it returns are used on the event loop. ``close`` blocks, and is called in a thread.
    """

    def __init__(
        self,
        folder: RecordingFolder,
        *,
        engine: str,
        model: Callable[[], str],
        choice: RecordingChoice = RecordingChoice(),
        capacity: int = QUEUE_BYTES,
    ) -> None:
        self._folder = folder
        self._engine = engine
        self._model = model
        self._choice = choice
        self._capacity = capacity
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        # Each is counted by one thread only, so that no lock is needed. The difference is what waits.
        self._put_bytes = 0
        self._taken_bytes = 0
        self._live: set[SessionRecording] = set()
        self._closing = threading.Event()
        self._done = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def begin(self, kind: RecordingKind, *, key: str | None, name: str) -> SessionRecording | None:
        """Begin to record a session; None where it is not to be recorded.

        ``key`` is the name of its key, ``name`` becomes part of the file's name.
        """
        choice = self._choice
        if choice.keys and key not in choice.keys:
            return None
        if choice.fraction < 1 and random.random() >= choice.fraction:
            return None
        if self._closing.is_set():
            return None
        if self._thread.ident is None:
            self._thread.start()
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
            payloads=choice.payloads,
        )
        if not self._has_room(_EVENT_BYTES):
            return None
        self._live.add(recording)
        self.put(recording, header)
        return recording

    def put(
        self, recording: SessionRecording, event: HeaderLine | RecordedLine | RecordedMessage, size: int = 0
    ) -> None:
        """Queue an event of a recording, or cut the recording when the queue is full."""
        size += _EVENT_BYTES
        if not self._has_room(size):
            recording.cut(TOO_SLOW)
            return
        self._put_bytes += size
        self._queue.put((recording.file, event, size))

    def _has_room(self, size: int) -> bool:
        return self._put_bytes - self._taken_bytes + size <= self._capacity

    def last(self, recording: SessionRecording, event: RecordedLine) -> None:
        """Queue the last event of a recording, however full the queue is."""
        self._live.discard(recording)
        self._put_bytes += _EVENT_BYTES
        self._queue.put((recording.file, event, _EVENT_BYTES))

    def close(self) -> None:
        """End all recordings and write what waits, for some seconds at most."""
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
        while not self._done:
            try:
                item = self._queue.get(timeout=_SWEEP_SEC)
            except queue.Empty:
                self._sweep()
                continue
            self._closing.wait(_GATHER_SEC)
            batch = Batch(self._folder, payloads=self._choice.payloads)
            while item is not None:
                file, event, size = item
                try:
                    batch.add(file, event)
                except Exception:
                    # The thread goes on with the other recordings.
                    logger.exception("recording %s failed", file.name)
                    file.failure = "an internal error"
                self._taken_bytes += size
                item = self._next()
            batch.flush()
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


class SessionRecording:
    """The recording of one session, over any number of connections.

    It ends when the session is finished and all its connections are closed.
    """

    def __init__(self, recorder: Recorder, name: str, key: str | None) -> None:
        self.key = key
        self.file = RecordingFile(name)
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
        """The session is over."""
        self._finished = True
        self._end_if_over()

    def connection_closed(self) -> None:
        self._open -= 1
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._finished and not self._open:
            self.end()

    def end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._recorder.last(self, EndedLine(at=self.now()))

    def cut(self, reason: str) -> None:
        if not self._is_over:
            self._is_over = True
            self._recorder.last(self, CutLine(at=self.now(), reason=reason))

    def now(self) -> float:
        return self.file.now()

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
        """A message was received, or, where ``is_text`` is None, a piece of a body."""
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
