"""Request events: one JSON line for each thing that happens to a request, for reports made afterwards.

While profiling is off, which is the usual case, an event costs one test of ``recorder``. A thread writes the lines;
lines that cannot be written are counted, and harm no request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import msgspec

T = TypeVar("T")

#: Events that may wait for the disk, some MiB; what comes beyond them is dropped.
MAX_WAITING: Final = 1 << 16
#: How long an event may wait before it is written.
FLUSH_SEC: Final = 0.25
#: The stage of the events about a whole request; its file exists from the start.
COORDINATOR: Final = "coordinator"

STAGE_START: Final = "stage_input_received"
STAGE_END: Final = "stage_complete"

#: The request that the running task works for; tasks that it starts inherit it.
current_request: ContextVar[str | None] = ContextVar("current_request", default=None)

Metadata: TypeAlias = dict[str, Any]
_Waiting: TypeAlias = tuple[int, int, str, str, str, Metadata]


class EventLine(msgspec.Struct, frozen=True, gc=False):
    """One line of a file. ``metadata`` also holds ``monotonic_ns``: lengths are computed with it, since the time of
    day, ``timestamp_ns``, may be set while a request runs."""

    request_id: str
    stage: str
    event_name: str
    timestamp_ns: int
    run_id: str
    pid: int
    metadata: Metadata


class EventRecorder:
    """Writes ``<event_dir>/events_<stage>_<pid>.jsonl``, a file for each stage, until ``close``. Thread-safe.

    The file of a stage is opened with its first event, that of the coordinator at once: the constructor raises OSError
    where that fails.
    """

    def __init__(self, run_id: str, event_dir: Path) -> None:
        self.run_id = run_id
        #: Events that were not written, because the disk failed or did not keep up.
        self.dropped = 0
        self._pid = os.getpid()
        self._folder = event_dir
        event_dir.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, int] = {COORDINATOR: self._open(COORDINATOR)}
        self._waiting: deque[_Waiting] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=_summary)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="request events", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file of the coordinator's events."""
        return self._path(COORDINATOR)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files opened so far, the coordinator's first."""
        return tuple(self._path(stage) for stage in tuple(self._files))

    def record(self, request_id: str, stage: str, name: str, metadata: Metadata) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((time.time_ns(), time.monotonic_ns(), request_id, stage, name, metadata))

    def close(self) -> None:
        """Write the waiting events and close the files. Blocks while the disk does. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _path(self, stage: str) -> Path:
        return self._folder / f"events_{stage}_{self._pid}.jsonl"

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
        """The lines of the waiting events, by stage."""
        lines: defaultdict[str, list[bytes]] = defaultdict(list)
        for _ in range(len(self._waiting)):
            wall, monotonic, request_id, stage, name, metadata = self._waiting.popleft()
            values = {"monotonic_ns": monotonic, **metadata}
            try:
                lines[stage].append(
                    self._encoder.encode(EventLine(request_id, stage, name, wall, self.run_id, self._pid, values))
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
            if written < len(data):  # a disk that is nearly full takes a part, which may end inside of a line
                self.dropped += data[written:].count(b"\n")
                os.write(file, b"\n")
        except OSError:
            self.dropped += len(lines)


#: What hears the events; None while nobody does. Look at it before taking any trouble for an event.
recorder: EventRecorder | None = None

_NOTHING: Final = nullcontext()


def emit(stage: str, name: str, *, request_id: str | None = None, **metadata: Any) -> None:
    """An event of ``request_id``, or of the request that the running task works for."""
    if recorder is not None and (request_id := request_id or current_request.get()) is not None:
        recorder.record(request_id, stage, name, metadata)


def span(stage: str, start: str = STAGE_START, end: str = STAGE_END, **metadata: Any) -> AbstractContextManager[None]:
    """Two events around the block, for the request that the running task works for."""
    return _NOTHING if recorder is None else _span(stage, start, end, metadata)


@contextmanager
def _span(stage: str, start: str, end: str, metadata: Metadata) -> Iterator[None]:
    emit(stage, start, **metadata)
    try:
        yield
    finally:
        emit(stage, end)


def awaited(stage: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items; the waiting for each of them is work of ``stage``."""
    return items if recorder is None else _Awaited(stage, items)


class _Awaited(AsyncIterator[T]):
    def __init__(self, stage: str, items: AsyncIterator[T]) -> None:
        self._stage = stage
        self._items = items

    async def __anext__(self) -> T:
        with span(self._stage):
            return await anext(self._items)


def generated(stage: str, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same items, which a model makes for a request that it has been given just now."""
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
    """What JSON has no words for. A tensor is described, and never written down."""
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
