"""Worker: one process of a server with several workers; and ProcessChannel, its channel to the supervisor.

The channel is a Unix socket. Its messages may carry open connections, as file descriptors.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import pickle
import re
import signal
import socket
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import IO, TYPE_CHECKING, Any, Final, TypeAlias, cast

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from websockets.asyncio.server import Server, ServerConnection
from websockets.extensions.permessage_deflate import enable_server_permessage_deflate
from websockets.server import ServerProtocol

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.engine.base import EngineState
from omni_ws.service import unexpected
from omni_ws.service.sessions.shared_counts import METRICS, SharedCounts, WorkerGroup, WorkerState

if TYPE_CHECKING:
    from omni_ws.server import App
    from omni_ws.transport.http.connections import Connections
    from omni_ws.transport.http.front_door import FrontDoor


logger = logging.getLogger(__name__)


#: The head of a message: kind, whether a file descriptor comes with it, number, and size of the payload.
_HEAD: Final = struct.Struct("!B?QI")
_READ_BYTES: Final = 256 * 1024
#: The room for file descriptors in a read; Linux delivers one at most.
_READ_DESCRIPTORS: Final = 64


class MessageKind(IntEnum):
    """The kinds of messages. The comments give the meaning of number and payload; some messages carry a connection."""

    #: To a worker: the settings to start with (payload).
    START = auto()
    #: To a worker: serve this connection; the payload has the bytes read so far. Number: 1 if another worker passed it
    #: on, and this one must serve it in any case.
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
    """A received message. Its receiver owns ``descriptor``, which is None if this process can open no more files."""

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
        """Drop the first ``sent`` bytes; the descriptor was sent with them. Returns whether any bytes are left."""
        self.close_descriptor()
        self.data = self.data[sent:]
        return bool(self.data)

    def close_descriptor(self) -> None:
        if self.descriptor is not None and self.is_ours:
            os.close(self.descriptor)
        self.descriptor = None


class ProcessChannel:
    """One end of the channel between the supervisor and a worker, which sends and receives messages.

    ``received`` is called with each message, and ``closed`` when the other end is closed or the connection fails.
    Messages that cannot be sent yet are queued; ``waiting`` is their number. ``on_room`` is called when no message is
    queued any more.
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

    @property
    def is_open(self) -> bool:
        return self._open

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

        This process closes ``descriptor`` after sending it, or if it cannot be sent. A ``lent`` descriptor stays open:
        the caller closes it once the other end has received it. On a closed channel, nothing is sent.
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
        """Send the queued messages, however long that takes, and close the channel. Blocks."""
        if self._open:
            self._socket.setblocking(True)
            self._write()
            self.close()

    def close(self) -> None:
        """Close the channel, and the descriptors of queued messages, which are not sent. Idempotent."""
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
    """Wait for the first message on a socket without a channel, and return the object that it contains. Blocks.

    Raises EOFError if the other end is closed.
    """
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
    """Return the SharedCounts in ``file`` for a server with these settings and ``wanted`` workers."""
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
    """Convert metrics to the form in which workers send them: see Family."""
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
    """Return the metrics that must outlive a worker: counters, histograms and summaries, which only grow."""
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


# Worker: the process's side of a server with several workers, with the channel to the others.


#: The id of a session or call, with the number of its worker, in the target of a request; without ``rtc_`` or the
#: ``replica_id``, which may be before it.
_ID: Final = re.compile(rb"(?<![A-Za-z0-9])w([1-9][0-9]{0,8})_(?:sess_|live_)?[0-9a-f]{24}(?![A-Za-z0-9])")
#: The interval at which a worker records its state, for changes that no event reports.
NOTE_INTERVAL_SEC: Final = 0.25


class Worker(WorkerGroup):
    """This process, as one of several workers. Its channel leads to the supervisor."""

    def __init__(self, start: WorkerStart, counts: SharedCounts, end: socket.socket) -> None:
        super().__init__(start.serial, start.wanted, counts, counts.rows[start.row])
        self.port = start.port
        self._loop = asyncio.get_running_loop()
        self._make: Callable[[], FrontDoor] | None = None
        self._note: Callable[[], None] = lambda: None
        self._serves: Callable[[str], bool] = lambda session_id: True
        self._timer: asyncio.TimerHandle | None = None
        self._retiring = False
        self._questions: dict[int, asyncio.Future[list[Any]]] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = ProcessChannel(end, received=self._receive, closed=self._abandoned)

    # serving

    def serve(
        self,
        make: Callable[[], FrontDoor],
        note: Callable[[], tuple[WorkerState, int, int, int]],
        serves: Callable[[str], bool],
    ) -> None:
        """Serve connections from now on, each with a protocol that ``make`` creates.

        ``note`` returns the worker's state and three numbers: of open connections, of WebSockets, and of requests in
        the engine. ``serves`` returns whether this worker serves a session or call with its name, even as it drains.
        """

        def write() -> None:
            state, connections, websockets, requests = note()
            if self._retiring:
                state = WorkerState.DRAINING
            self.row.note(state=state, connections=connections, websockets=websockets, engine_requests=requests)

        self._make, self._note, self._serves = make, write, serves
        self._tick()
        self._channel.send(MessageKind.LISTENING)

    def changed(self) -> None:
        """Publish the worker's state and numbers now, instead of at the next interval."""
        self._note()

    def _tick(self) -> None:
        self._note()
        self._timer = self._loop.call_later(NOTE_INTERVAL_SEC, self._tick)

    def begin(self) -> None:
        """Report that the engine has started, so that the worker is given new sessions."""
        self._note()
        self._channel.send(MessageKind.READY)

    def close(self, own: list[Metric]) -> None:
        """Report ``own`` as the final metrics, and close the channel. Blocks until they are sent."""
        if self._timer is not None:
            self._timer.cancel()
        self._channel.send(MessageKind.LAST_METRICS, payload=pickle.dumps(as_families(own)))
        self._channel.finish()

    # connections

    def destination(self, target: bytes) -> int | None:
        """Return the number of the worker that must serve a request for ``target``.

        None means this worker; 0 means any other worker, since this one is being replaced.
        """
        found = _ID.search(target)
        if found is None:
            return 0 if self._retiring else None
        serial = int(found[1])
        if serial == self.serial and self._retiring and not self._serves(found[0].decode()):
            return 0  # another one has it from the store
        if serial == self.serial or not any(row.serial == serial for row in self.counts.rows):
            return None
        return serial

    def pass_on(self, serial: int, connection: int, received: bytes) -> None:
        """Pass on a connection (an open descriptor), with the bytes read from it, to the worker numbered ``serial``."""
        self._channel.send(MessageKind.PASS_ON, serial, received, descriptor=connection)

    def _take(self, message: WorkerMessage) -> None:
        self._channel.send(MessageKind.TAKEN)  # before any byte of the connection is read
        if message.descriptor is None:
            self.row.receive()
            logger.error("a connection is lost: this process may open no more files")
            return
        make = self._make
        assert make is not None, "a worker gets connections only once it listens"
        connection = socket.socket(fileno=message.descriptor)

        def protocol() -> FrontDoor:
            door = make()
            door.received_elsewhere(message.payload, passed_on=message.number == 1)
            return door

        self._run(self._serve_connection(connection, protocol))

    async def _serve_connection(self, connection: socket.socket, protocol: Callable[[], FrontDoor]) -> None:
        try:
            await self._loop.connect_accepted_socket(protocol, connection)
        except OSError:  # the client has disconnected
            connection.close()
        finally:  # from now on it counts as an open connection
            self.row.receive()

    # messages

    def _receive(self, message: WorkerMessage) -> None:
        match message.kind:
            case MessageKind.CONNECTION:
                self._take(message)
            case MessageKind.ALIVE:
                self._channel.send(MessageKind.ALIVE)
            case MessageKind.RETIRE:
                self._retiring = True
                self._note()
                os.kill(os.getpid(), signal.SIGTERM)
            case MessageKind.ASKED:
                question, argument = pickle.loads(message.payload)
                self._run(self._reply(message.number, question, argument))
            case MessageKind.ANSWERS:
                waiting = self._questions.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(pickle.loads(message.payload))

    async def _reply(self, number: int, question: str, argument: Any) -> None:
        try:
            answer = await self._handlers[question](argument)
        except Exception as error:
            logger.error("%s", unexpected(error, where=f"the question {question} of another worker").message)
            answer = None
        self._channel.send(MessageKind.REPLY, number, pickle.dumps(answer))

    async def ask_others(self, question: str, argument: Any = None) -> list[Any]:
        if not self._channel.is_open:  # the supervisor is gone: nobody would answer
            return []
        self._asked += 1
        waiting = self._questions[self._asked] = self._loop.create_future()
        self._channel.send(MessageKind.QUESTION, self._asked, pickle.dumps((question, argument)))
        answers: list[Any] = await waiting
        return answers

    async def all_metrics(self, own: list[Metric]) -> list[Metric]:
        families = as_families(own)
        others = await self.ask_others(METRICS, families)
        return as_metrics(summed([families, *filter(None, others)]))

    def _abandoned(self) -> None:
        """End this worker: the supervisor is gone, so no more connections will come."""
        logger.error("the supervisor has gone")
        for waiting in self._questions.values():
            if not waiting.done():
                waiting.set_result([])
        os.kill(os.getpid(), signal.SIGTERM)

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# Serving connections that the supervisor accepted


def unreachable_socket() -> socket.socket:
    """Return a listening socket to which nobody can connect, since its name was removed."""
    with tempfile.TemporaryDirectory() as folder:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(os.path.join(folder, "none"))
    return listening


_STATES: Final = {
    EngineState.STARTING: WorkerState.STARTING,
    EngineState.OK: WorkerState.OK,
    EngineState.UNHEALTHY: WorkerState.UNHEALTHY,
}
#: The arguments that the library passes to each connection by default.
_LIBRARY_DEFAULTS: Final = {"ping_timeout": 20, "max_queue": 16, "write_limit": 32 * 1024}


def join(
    worker: Worker,
    app: App,
    server: Server,
    connections: Connections,
    door: type[ServerConnection],
    options: dict[str, Any],
) -> None:
    """Let ``server`` serve the worker's connections. Each gets a protocol made by ``door`` with ``options``."""
    deflate = app.config.streaming_input.permessage_deflate

    def make() -> FrontDoor:
        protocol = ServerProtocol(extensions=enable_server_permessage_deflate(None) if deflate else None)
        return cast("FrontDoor", door(protocol, server, **_LIBRARY_DEFAULTS, **options))

    def note() -> tuple[WorkerState, int, int, int]:
        engine = app.sessions.engine
        draining = app.sessions.admission.draining
        state = WorkerState.DRAINING if draining else _STATES[engine.state]
        return state, len(connections), len(server.all_connections), engine.active_requests

    async def metrics(argument: Any) -> Any:
        return as_families(app.sessions.metrics.families())

    connections.report_to(worker.changed)
    worker.on(METRICS, metrics)
    worker.serve(make, note, app.serves)
