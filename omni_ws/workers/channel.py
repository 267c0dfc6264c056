"""ProcessChannel: messages between the supervisor and a worker over a Unix socket; and the data in these messages."""

from __future__ import annotations

import array
import asyncio
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import IO, Any, Final, TypeAlias

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.service.sessions.shared_counts import SharedCounts

#: The head of a message: kind, whether a file descriptor comes with it, number, and size of the payload.
_HEAD: Final = struct.Struct("!B?QI")
_READ_BYTES: Final = 256 * 1024
#: The room for file descriptors in a read; Linux delivers one at most.
_READ_DESCRIPTORS: Final = 64


class MessageKind(IntEnum):
    """The kinds of messages, and the meaning of their number and payload. Some also carry an open connection."""

    #: To a worker: the settings to start with (payload).
    START = auto()
    #: To a worker: serve this connection; the payload has the bytes read so far. Number: 1 if another worker passed it
    #: on.
    CONNECTION = auto()
    #: From a worker: it has taken the oldest of the connections that were sent to it, and serves it.
    TAKEN = auto()
    #: From a worker: give this connection to the worker with this number (0: to any other).
    PASS_ON = auto()
    #: To a worker: a successor takes its place; finish open work, and pass on new connections.
    RETIRE = auto()
    #: From a worker: it serves connections, even if its engine has not started.
    LISTENING = auto()
    #: From a worker: its engine has started.
    READY = auto()
    #: From a worker: ask all other workers (payload), and send their answers under this number.
    QUESTION = auto()
    #: To a worker: the answers (payload) to its question with this number.
    ANSWERS = auto()
    #: To a worker: a question (payload), to be answered under this number.
    ASKED = auto()
    #: From a worker: its answer (payload) to the question with this number.
    REPLY = auto()
    #: From a worker that is about to end: its final metrics (payload).
    LAST_METRICS = auto()
    #: To a worker: answer with the same kind, once the event loop gets to it.
    ALIVE = auto()


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """A message that has arrived. The receiver owns ``descriptor``, which is None if this process can open no more."""

    kind: MessageKind
    number: int = 0
    payload: bytes = b""
    descriptor: int | None = None


@dataclass(slots=True)
class _Waiting:
    data: memoryview[int]
    descriptor: int | None
    #: Whether this process has to close the descriptor.
    is_ours: bool

    def advance(self, sent: int) -> bool:
        """Drop the first ``sent`` bytes; the descriptor was sent with them. Return whether any bytes are left."""
        self.close_descriptor()
        self.data = self.data[sent:]
        return bool(self.data)

    def close_descriptor(self) -> None:
        if self.descriptor is not None and self.is_ours:
            os.close(self.descriptor)
        self.descriptor = None


class ProcessChannel:
    """One end of the channel between the supervisor and a worker, which sends and receives messages.

    ``received`` is called with each message, and ``closed`` when the other end is closed. Messages that cannot be sent
    yet are queued; ``waiting`` is their number. ``on_room`` is called when none is left.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        received: Callable[[WorkerMessage], None],
        closed: Callable[[], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        end.setblocking(False)
        self._socket = end
        self._received = received
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._input = bytearray()
        #: The descriptors of messages that have not arrived completely; None for a descriptor that was lost.
        self._descriptors: deque[int | None] = deque()
        self._output: deque[_Waiting] = deque()
        self._open = True
        self._on_room = on_room
        self._loop.add_reader(end.fileno(), self._read)

    @property
    def waiting(self) -> int:
        return len(self._output)

    def send(
        self,
        kind: MessageKind,
        number: int = 0,
        payload: bytes = b"",
        *,
        descriptor: int | None = None,
        lent: bool = False,
    ) -> None:
        """Send a message.

        ``descriptor`` is closed here after it was sent, or if it cannot be sent, unless it is ``lent``: then the caller
        keeps it open until the other end has it.
        """
        head = _HEAD.pack(kind, descriptor is not None, number, len(payload))
        message = _Waiting(memoryview(head + payload), descriptor, not lent)
        if not self._open:
            message.close_descriptor()
            return
        self._output.append(message)
        if len(self._output) == 1:
            self._write()

    def finish(self) -> None:
        """Send the queued messages, however long that takes, and close. Blocks."""
        if self._open:
            self._socket.setblocking(True)
            self._write()
            self.close()

    def close(self) -> None:
        """Send no more, and close the descriptors of queued messages. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        for descriptor in self._descriptors:
            if descriptor is not None:
                os.close(descriptor)
        for message in self._output:
            message.close_descriptor()
        self._descriptors.clear()
        self._output.clear()

    def _write(self) -> None:
        while self._output:
            first = self._output[0]
            try:
                sent = self._socket.sendmsg([first.data], _rights(first.descriptor))
            except (BlockingIOError, InterruptedError):
                self._loop.add_writer(self._socket.fileno(), self._write)
                return
            except OSError:
                self._lose()
                return
            if not first.advance(sent):
                self._output.popleft()
        self._loop.remove_writer(self._socket.fileno())
        self._on_room()

    def _read(self) -> None:
        room = socket.CMSG_SPACE(_READ_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(_READ_BYTES, room)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary, flags = b"", [], 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self._descriptors.extend(found)
        if flags & socket.MSG_CTRUNC:  # too many open files; a read brings one descriptor, so one is lost
            self._descriptors.append(None)
        if not data:
            self._lose()
            return
        self._input += data
        while self._open and len(self._input) >= _HEAD.size:
            kind_number, has_descriptor, number, size = _HEAD.unpack_from(self._input)
            end = _HEAD.size + size
            if len(self._input) < end:
                return
            payload = bytes(self._input[_HEAD.size : end])
            del self._input[:end]
            descriptor = self._descriptors.popleft() if has_descriptor else None
            self._received(WorkerMessage(MessageKind(kind_number), number, payload, descriptor))

    def _lose(self) -> None:
        self.close()
        self._closed()


def _rights(descriptor: int | None) -> list[tuple[int, int, array.array[int]]]:
    return [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def first_payload(end: socket.socket) -> Any:
    """Wait for the first message on a socket without a channel, and return the object that it contains. Blocks."""
    size = _HEAD.unpack(_exactly(end, _HEAD.size))[3]
    return pickle.loads(_exactly(end, size))


def _exactly(end: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        read = end.recv(size - len(found))
        if not read:
            raise EOFError("the supervisor has gone")
        found += read
    return bytes(found)


# The start of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The settings of one worker, as the supervisor sends them to its process."""

    config: ServerConfig = field(repr=False)
    keys: tuple[ApiKey, ...] = field(repr=False)
    serial: int
    #: The number of workers that the server is to have.
    wanted: int
    row: int
    port: int


#: The rows of counts for each wanted worker: one for the worker that serves, one for its predecessor while that drains,
#: and one for a successor that starts.
ROWS_PER_WORKER: Final = 3


def shared_counts(file: IO[bytes], config: ServerConfig, keys: Sequence[ApiKey], wanted: int) -> SharedCounts:
    """Return the shared counts, in this file, of a server with these settings."""
    names = [key.name for key in keys]
    return SharedCounts(file, rows=ROWS_PER_WORKER * wanted, slots=config.limits.max_sessions, keys=names)


# The metrics of a server, combined from those of its workers

#: A metric in the form that workers send: name, documentation, type, unit, and samples with name, labels and value.
Family: TypeAlias = tuple[str, str, str, str, list[tuple[str, dict[str, str], float]]]

#: Gauges that are not added up, with the function that combines them. All other metrics are added up.
_COMBINED: Final[dict[str, Callable[[Iterable[float]], float]]] = {
    **dict.fromkeys(("omni_ws_engine_up", "omni_ws_part_up", "omni_ws_draining", "process_start_time_seconds"), min),
    **dict.fromkeys(("omni_ws_sessions_limit", "omni_ws_info", "python_info", "process_max_fds"), max),
    "omni_ws_store_up": min,
    **dict.fromkeys(("omni_ws_store_records", "omni_ws_store_bytes"), max),  # of one store
}
#: The types of metrics that only grow, and therefore must not shrink when a worker ends.
_GROWING: Final = frozenset({"counter", "histogram", "summary"})


def as_families(metrics: Iterable[Metric]) -> list[Family]:
    """Convert metrics to the form in which workers send them."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            metric.unit,
            [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples],
        )
        for metric in metrics
    ]


def as_metrics(families: Iterable[Family]) -> list[Metric]:
    """Convert metrics back from the form of ``as_families``."""
    metrics = []
    for name, documentation, kind, unit, samples in families:
        metric = Metric(name, documentation, kind, unit)
        metric.samples.extend(Sample(sample, labels, value) for sample, labels, value in samples)
        metrics.append(metric)
    return metrics


def growing(families: Iterable[Family]) -> list[Family]:
    """Return the metrics that outlive a worker: counters and histograms."""
    return [family for family in families if family[2] in _GROWING]


def summed(parts: Sequence[Sequence[Family]]) -> list[Family]:
    """Return the combined metrics of several workers, in the order in which they first appear."""
    families: dict[str, Family] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = {}
    for part in parts:
        for name, documentation, kind, unit, samples in part:
            families.setdefault(name, (name, documentation, kind, unit, []))
            for sample, labels, value in samples:
                values.setdefault((name, sample, tuple(labels.items())), []).append(value)
    for (name, sample, of_sample), found in values.items():
        combine: Any = _COMBINED.get(name, sum) if families[name][2] not in _GROWING else sum
        families[name][4].append((sample, dict(of_sample), combine(found)))
    return list(families.values())
