"""Worker: the process's side of a server with several workers, with the channel to the others."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from prometheus_client.metrics_core import Metric
from websockets.asyncio.server import Server, ServerConnection
from websockets.extensions.permessage_deflate import enable_server_permessage_deflate
from websockets.server import ServerProtocol

from omni_ws.engine.base import EngineState
from omni_ws.service.failure import unexpected
from omni_ws.service.sessions.shared_counts import METRICS, SharedCounts, WorkerGroup, WorkerState
from omni_ws.workers.channel import (
    MessageKind,
    ProcessChannel,
    WorkerMessage,
    WorkerStart,
    as_families,
    as_metrics,
    summed,
)

if TYPE_CHECKING:
    from omni_ws.app import App
    from omni_ws.transport.http.front_door import FrontDoor
    from omni_ws.transport.http.hang_up import Connections

logger = logging.getLogger(__name__)

#: The id of a session or call, with the number of its worker, in the target of a request.
_ID: Final = re.compile(rb"(?<![A-Za-z0-9])w([1-9][0-9]{0,8})_(?:sess_|live_)?[0-9a-f]{24}(?![A-Za-z0-9])")
#: The interval at which a worker records its state, for changes that no event reports.
NOTE_INTERVAL_SEC: Final = 0.25


class Worker(WorkerGroup):
    """This process as one of several workers; its channel leads to the supervisor."""

    def __init__(self, start: WorkerStart, counts: SharedCounts, end: socket.socket) -> None:
        super().__init__(start.serial, start.wanted, counts, counts.rows[start.row])
        self.port = start.port
        self._loop = asyncio.get_running_loop()
        self._make: Callable[[], FrontDoor] | None = None
        self._note: Callable[[], None] = lambda: None
        self._timer: asyncio.TimerHandle | None = None
        self._retiring = False
        self._questions: dict[int, asyncio.Future[list[Any]]] = {}
        self._asked = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._channel = ProcessChannel(end, received=self._receive, closed=self._abandoned)

    # serving

    def serve(self, make: Callable[[], FrontDoor], note: Callable[[], tuple[WorkerState, int, int, int]]) -> None:
        """Serve connections from now on, each with a protocol that ``make`` creates.

        ``note`` returns the state, and the numbers of open connections, of WebSockets, and of requests in the engine.
        """

        def write() -> None:
            state, connections, websockets, requests = note()
            if self._retiring:
                state = WorkerState.DRAINING
            self.row.note(state=state, connections=connections, websockets=websockets, engine_requests=requests)

        self._make, self._note = make, write
        self._tick()
        self._channel.send(MessageKind.LISTENING)

    def changed(self) -> None:
        """Record at once what the worker does."""
        self._note()

    def _tick(self) -> None:
        self._note()
        self._timer = self._loop.call_later(NOTE_INTERVAL_SEC, self._tick)

    def begin(self) -> None:
        """Report that the engine has started, so that the worker is given new sessions."""
        self._note()
        self._channel.send(MessageKind.READY)

    def close(self, own: list[Metric]) -> None:
        """Report the final metrics, and close the channel."""
        if self._timer is not None:
            self._timer.cancel()
        self._channel.send(MessageKind.LAST_METRICS, payload=pickle.dumps(as_families(own)))
        self._channel.finish()

    # connections

    def destination(self, target: bytes) -> int | None:
        """Return the number of the worker for a request for ``target``; 0 for any other one; None for this one."""
        found = _ID.search(target)
        if found is None:
            return 0 if self._retiring else None
        serial = int(found[1])
        if serial == self.serial or not any(row.serial == serial for row in self.counts.rows):
            return None
        return serial

    def pass_on(self, serial: int, connection: int, received: bytes) -> None:
        """Give away an open connection, by its file descriptor, with the bytes that were read from it."""
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
        """End this worker: the supervisor is gone, so there will be no more connections."""
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
    """Return a listening socket that never gets a connection: its name is removed."""
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
    """Let ``server`` serve the worker's connections, each as a ``door`` with these ``options``."""
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
    worker.serve(make, note)
