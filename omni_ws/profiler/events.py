"""Request events: one JSON line for each thing that happens to a request, for reports made afterwards.

Off, which is the usual case, an event is one look at ``recorder``. Writing is a thread's work; what cannot be written
is counted, and harms no request.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
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
#: The stage that gives a file its name: all stages of this server are in one process.
FILE_STAGE: Final = "server"

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
    """Writes ``<event_dir>/events_server_<pid>.jsonl``, from its making to ``close``. Safe to use from any thread.

    Making one raises OSError where the file cannot be opened.
    """

    def __init__(self, run_id: str, event_dir: Path) -> None:
        self.run_id = run_id
        #: Events that were not written, because the disk failed or did not keep up.
        self.dropped = 0
        self._pid = os.getpid()
        event_dir.mkdir(parents=True, exist_ok=True)
        self.path = event_dir / f"events_{FILE_STAGE}_{self._pid}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._waiting: deque[_Waiting] = deque()
        self._encoder = msgspec.json.Encoder(enc_hook=_summary)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="request events", daemon=True)
        self._thread.start()

    def record(self, request_id: str, stage: str, name: str, metadata: Metadata) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append((time.time_ns(), time.monotonic_ns(), request_id, stage, name, metadata))

    def close(self) -> None:
        """Write what waits, and let go of the file. Blocks while the disk does. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _write_all(self) -> None:
        last = False
        while not last:
            last = self._closing.wait(FLUSH_SEC)
            self._write_waiting()
        os.close(self._file)

    def _write_waiting(self) -> None:
        lines: list[bytes] = []
        for _ in range(len(self._waiting)):
            wall, monotonic, request_id, stage, name, metadata = self._waiting.popleft()
            values = {"monotonic_ns": monotonic, **metadata}
            try:
                lines.append(
                    self._encoder.encode(EventLine(request_id, stage, name, wall, self.run_id, self._pid, values))
                )
            except (TypeError, ValueError, RecursionError):
                self.dropped += 1
        if not lines:
            return
        data = b"\n".join(lines) + b"\n"
        try:
            written = os.write(self._file, data)
            if written < len(data):  # a disk that is nearly full takes a part, which may end inside of a line
                self.dropped += data[written:].count(b"\n")
                os.write(self._file, b"\n")
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
