"""Records events of requests as JSON lines, for reports afterwards.

While profiling is off, an event costs one test of ``recorder``. While it is on, a thread writes the lines; a line
that cannot be written is counted and affects no request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

#: Events queued for the disk (some MiB); further ones are dropped.
MAX_WAITING: Final = 1 << 16
#: Interval of writing queued events.
FLUSH_SEC: Final = 0.25
#: Stage of events about a request as a whole; its file exists from the start.
COORDINATOR: Final = "coordinator"

STAGE_START: Final = "stage_input_received"
STAGE_END: Final = "stage_complete"

#: Request that the current task works for; child tasks inherit it.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

Metadata: TypeAlias = dict[str, Any]
_Waiting: TypeAlias = tuple[int, int, str, str, str, Metadata]


class ProfileEvent(msgspec.Struct, frozen=True, gc=False):
    """A line of an event file. Other programs that write such files may omit the last three fields.

    ``metadata`` includes ``monotonic_ns``, from which durations are computed: ``timestamp_ns`` is the time of day,
    which may be adjusted while a request runs.
    """

    request_id: str
    stage: str
    event_name: str
    timestamp_ns: int
    run_id: str | None = None
    pid: int | None = None
    metadata: Metadata = {}

    @property
    def monotonic_ns(self) -> int | None:
        """Monotonic time in nanoseconds; None if it was not recorded."""
        value = self.metadata.get("monotonic_ns")
        return value if type(value) is int else None


class EventRecorder:
    """A writer of ``<event_dir>/events_<stage>_<pid>.jsonl``, one file per stage, until ``close``. Thread-safe.

    The constructor creates the folder, opens the file of the stage ``coordinator`` for appending, and raises OSError if
    that fails. The file of another stage is opened after its first event.
    """

    def __init__(self, run_id: str, event_dir: Path) -> None:
        self.run_id = run_id
        #: Events lost because the disk failed or was too slow.
        self.dropped = 0
        self._pid = os.getpid()
        #: The folder of the files.
        self.folder = event_dir
        event_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, int] = {COORDINATOR: self._open(COORDINATOR)}
        self._waiting: deque[_Waiting] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=_summary)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="request events", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file of events about requests as a whole (the stage ``coordinator``)."""
        return self._path(COORDINATOR)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files opened so far, ``path`` first."""
        return tuple(self._path(stage) for stage in tuple(self._files))

    def record(self, request_id: str, stage: str, name: str, metadata: Metadata) -> None:
        """Queue an event; drop the event if too many wait to be written."""
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((time.time_ns(), time.monotonic_ns(), request_id, stage, name, metadata))

    def close(self) -> None:
        """Write the queued events and close the files. Blocks until they are written. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _path(self, stage: str) -> Path:
        return self.folder / f"events_{stage}_{self._pid}.jsonl"

    def _open(self, stage: str) -> int:
        return os.open(self._path(stage), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _write_all(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(FLUSH_SEC)
            for stage, lines in self._encode_waiting().items():
                self._write(stage, lines)
        for file in self._files.values():
            os.close(file)

    def _encode_waiting(self) -> dict[str, list[bytes]]:
        """Encode the queued events, and return their lines by stage."""
        lines: defaultdict[str, list[bytes]] = defaultdict(list)
        for _ in range(len(self._waiting)):
            wall, monotonic, request_id, stage, name, metadata = self._waiting.popleft()
            values = {"monotonic_ns": monotonic, **metadata}
            try:
                lines[stage].append(
                    self._encoder.encode(ProfileEvent(request_id, stage, name, wall, self.run_id, self._pid, values))
                )
            except (TypeError, ValueError, RecursionError):
                self.dropped += 1
        return lines

    def _write(self, stage: str, lines: list[bytes]) -> None:
        data = b"\n".join(lines) + b"\n"
        try:
            if (file := self._files.get(stage)) is None:
                file = self._files[stage] = self._open(stage)
            written = os.write(file, data)
            if written < len(data):  # a nearly full disk may cut a line
                self.dropped += data[written:].count(b"\n")
                os.write(file, b"\n")
        except OSError:
            self.dropped += len(lines)


class SeveralRecorders:
    """A recorder that passes each event to several recorders."""

    def __init__(self, recorders: Sequence[EventRecorder]) -> None:
        self._recorders = tuple(recorders)

    def record(self, request_id: str, stage: str, name: str, metadata: Metadata) -> None:
        """Pass an event to all recorders."""
        for each in self._recorders:
            each.record(request_id, stage, name, metadata)


#: Active recorder; None while profiling is off. Test it before computing the metadata of an event.
recorder: EventRecorder | SeveralRecorders | None = None

_NOTHING: Final = nullcontext()


def record_with(recorders: Sequence[EventRecorder]) -> None:
    """Record all events from now on with ``recorders``; an empty sequence turns profiling off."""
    global recorder
    recorder = SeveralRecorders(recorders) if len(recorders) > 1 else next(iter(recorders), None)


def emit(stage: str, name: str, *, request_id: str | None = None, **metadata: Any) -> None:
    """Record an event of ``request_id``; None: of the current task's request. Without a request, record nothing."""
    if recorder is not None and (request_id := request_id or current_request.get()) is not None:
        recorder.record(request_id, stage, name, metadata)


def span(stage: str, start: str = STAGE_START, end: str = STAGE_END, **metadata: Any) -> AbstractContextManager[None]:
    """Return a context manager that records an event before and after its block, for the current task's request.

    ``metadata`` is that of the first event.
    """
    return _NOTHING if recorder is None else _span(stage, start, end, metadata)


@contextmanager
def _span(stage: str, start: str, end: str, metadata: Metadata) -> Iterator[None]:
    emit(stage, start, **metadata)
    try:
        yield
    finally:
        emit(stage, end)


def awaited(stage: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wrap an iterator so that waiting for each item counts as work of ``stage``."""
    return items if recorder is None else _Awaited(stage, items)


class _Awaited(AsyncIterator[T]):
    def __init__(self, stage: str, items: AsyncIterator[T]) -> None:
        self._stage = stage
        self._items = items

    async def __anext__(self) -> T:
        with span(self._stage):
            return await anext(self._items)


def generated(stage: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """Wrap the output of a model, and record when the request was submitted (now), the first item, and the end."""
    return items if recorder is None else _Generated(stage, items)


class _Generated(AsyncIterator[T]):
    def __init__(self, stage: str, items: AsyncIterator[T]) -> None:
        self._stage = stage
        self._items = items
        self._begun = False
        emit(stage, "scheduler_queue_enter")

    async def __anext__(self) -> T:
        try:
            item = await anext(self._items)
        except BaseException:
            emit(self._stage, "generation_end")
            raise
        if not self._begun:
            self._begun = True
            emit(self._stage, "scheduler_first_emit")
        return item


def _summary(value: object) -> object:
    """Encode what JSON cannot express. A tensor is described by type, shape and dtype; its data is never written."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return repr(value)
    item = getattr(value, "item", None)
    if len(shape) == 0 and item is not None:
        return item()
    return {
        "__tensor_summary__": True,
        "type": type(value).__name__,
        "shape": [int(length) for length in shape],
        "dtype": str(dtype),
    }
