"""Supervisor: starts the workers of a server, gives each connection to one of them, and replaces workers that die."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from itertools import compress
from typing import IO, Any, Final

from omni_ws import __version__
from omni_ws.config import check_available, check_exposure, configured_keys
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.engine.child import STABLE_AFTER_SEC, Backoff
from omni_ws.service.process import allow_connections, configure_logging, unless
from omni_ws.service.sessions.admission import DailyUseFile
from omni_ws.service.sessions.shared_counts import KNOW_SECRET, METRICS, WorkerRow, WorkerState
from omni_ws.transport.http.connections import (
    MAX_TURNED_AWAY,
    notice_dead_networks,
)
from omni_ws.workers.worker import (
    Family,
    MessageKind,
    ProcessChannel,
    WorkerMessage,
    WorkerStart,
    growing,
    shared_counts,
    summed,
)

logger = logging.getLogger(__name__)


def launch_workers(config: ServerConfig, *, listening: Callable[[int], object] | None = None) -> int:
    """Run a server of ``config.workers`` processes until SIGTERM or SIGINT, and return the exit status. Blocks.

    SIGHUP replaces the workers, one after another. ``listening`` is called with the port once all workers are ready.
    Raises ConfigurationError, and OSError if the port is taken.
    """
    configure_logging(config.log_format, config.log_level)
    keys = configured_keys(config)
    check_exposure(config)
    check_available(config)

    async def supervise() -> int:
        supervisor = Supervisor(config, keys)
        logger.info("omni_ws %s starts %d workers", __version__, config.workers)
        return await supervisor.run(listening)

    return asyncio.run(supervise())


#: The time, after the drain, in which a worker has to close its connections and its engine. Then it is killed.
CLOSING_SEC: Final = 20.0
#: The time in which a worker has to end after a second signal. Then it is killed.
AT_ONCE_SEC: Final = 0.8
#: The most connections that may wait in a worker's channel; when all workers have so many, the system queues them.
MOST_WAITING: Final = 64
#: The most connections that are accepted in one pass of the event loop.
_ACCEPTED_AT_ONCE: Final = 64
#: The pause before accepting again after the system refused.
_ACCEPT_PAUSE_SEC: Final = 0.2
#: The interval at which the file with the daily use is updated.
DAILY_INTERVAL_SEC: Final = 1.0
#: The number of checks within ``worker_hang_timeout_sec``, after which a worker that answers none is killed; and the
#: number of unanswered checks after which the log and /health report that it hangs.
_LOOKS: Final = 12
_LOOKS_UNTIL_TOLD: Final = _LOOKS // 3


class Supervisor:
    """The parent process of the workers. It serves no requests itself.

    Each of the ``config.workers`` workers has a *seat*, from 0; a worker that ends or is replaced leaves its seat to a
    successor.
    """

    def __init__(self, config: ServerConfig, keys: tuple[ApiKey, ...]) -> None:
        self._config = config
        self._keys = keys
        self._wanted = config.workers
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._accepting = False
        self._members: list[Member] = []
        #: For each seat, the worker that takes new sessions.
        self._seated: dict[int, Member] = {}
        self._serials = [0] * self._wanted
        self._backoffs = [Backoff() for _ in range(self._wanted)]
        self._questions = Questions()
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed at the end of the server)
        self._counts = shared_counts(self._file, config, keys, self._wanted)
        self._daily = DailyUseFile.configured(config, keys)
        if self._daily is not None:
            self._counts.set_daily(self._daily.use.day, self._daily.use.used)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started = False
        self._all_ready = asyncio.Event()
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()
        self._failure: int | None = None
        self._replacing = False

    async def run(self, listening: Callable[[int], object] | None = None) -> int:
        """Serve until SIGTERM or SIGINT, and return the exit status. Raises OSError if the port is in use.

        If a worker ends before all are ready, the server ends, too, with that worker's status, at least 1.
        ``listening`` is called with the port once all workers are ready.
        """
        await self._open_port()
        for number, action in (
            *((one, self._stopped) for one in (signal.SIGTERM, signal.SIGINT)),
            (signal.SIGHUP, self._replace_all),
        ):
            self._loop.add_signal_handler(number, action)
        try:
            await asyncio.gather(*(self._fill(seat, None) for seat in range(self._wanted)))
            self._spawn(self._watch_answers())
            if await unless(self._stop, self._all_ready.wait(), name="start of the workers"):
                self._started = True
                self._counts.note_started()
                logger.info("all %d workers are ready", self._wanted)
                if self._daily is not None:
                    self._spawn(self._keep_daily_use(self._daily))
                if listening is not None:
                    listening(self.port)
                await self._stop.wait()
                logger.info("shutting down")
            await self._end_all()
        finally:
            await self._close()
        return self._failure or 0

    @property
    def port(self) -> int:
        found: int = self._sockets[0].getsockname()[1]
        return found

    async def _open_port(self) -> None:
        config = self._config
        allow_connections(config.limits.max_connections)
        server = await self._loop.create_server(asyncio.Protocol, config.host, config.port, start_serving=False)
        self._sockets = [socket.socket(fileno=os.dup(one.fileno())) for one in server.sockets]
        server.close()
        for one in self._sockets:
            one.setblocking(False)
            one.listen(config.limits.max_connections)
            notice_dead_networks(one)

    async def _close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.remove_signal_handler(number)
        self._pause_accepting()
        for one in self._sockets:
            one.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._daily is not None:
            self._note_daily_use(self._daily)
            await self._daily.close()
        self._file.close()

    # connections

    def _resume_accepting(self) -> None:
        if not self._accepting and self._least_loaded() is not None:
            self._accepting = True
            for one in self._sockets:
                self._loop.add_reader(one, self._accept, one)

    def _pause_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            for one in self._sockets:
                self._loop.remove_reader(one)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            member = self._least_loaded()
            if member is None:
                self._pause_accepting()
                return
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                logger.error("cannot accept a connection: %s", error.strerror)
                self._pause_accepting()
                self._loop.call_later(_ACCEPT_PAUSE_SEC, self._resume_accepting)
                return
            if self._open_connections >= self._config.limits.max_connections + MAX_TURNED_AWAY:
                connection.close()  # each worker answers some of the connections above the limit
            else:
                member.give(GivenConnection(connection.detach()))

    @property
    def _open_connections(self) -> int:
        """The number of connections of all workers, including those that are on their way to a worker."""
        return sum(one.row.all_connections for one in self._members)

    def _least_loaded(self, *, beside: Member | None = None) -> Member | None:
        """Return the worker for the next connection, other than ``beside``; None if no worker can take one.

        It is the least loaded of the workers that take new sessions; if there are none, of those that can at least
        refuse a session with an error.
        """
        found = [one for one in self._members if one.listening and one.is_alive and one is not beside]
        found = [one for one in found if not one.row.hung] or found
        willing = [one for one in found if one.takes_sessions] or [one for one in found if not one.leaving] or found
        open_to_more = [one for one in willing if one.channel.waiting < MOST_WAITING]
        return min(open_to_more, key=lambda one: one.load, default=None)

    def _pass_on(self, sender: Member, message: WorkerMessage) -> None:
        if message.descriptor is None:
            return
        if message.number:
            found = (one for one in self._members if one.serial == message.number and one.listening and one.is_alive)
            to = next(found, None)
        else:
            to = self._least_loaded(beside=sender)
        if self._open_connections >= self._config.limits.max_connections:
            os.close(message.descriptor)
        else:
            # A worker that drains may pass on what was given to it by its number.
            is_last = to is None or not message.number
            (to or sender).give(GivenConnection(message.descriptor, message.payload, passed_on=is_last))

    def _give_to_others(self, ended: Member) -> None:
        """Give the connections that were on their way to ``ended``, a worker that has ended, to other workers."""
        for connection in ended.take_back():
            member = self._least_loaded()
            if member is None:
                os.close(connection.descriptor)
            else:
                member.give(connection)

    # messages

    def _receive(self, member: Member, message: WorkerMessage) -> None:
        match message.kind:
            case MessageKind.LISTENING:
                member.listens()
                self._questions.tell(member)  # before it gets a connection
                self._resume_accepting()
            case MessageKind.READY:
                member.ready.set()
                if len(self._seated) == self._wanted and all(one.ready.is_set() for one in self._seated.values()):
                    self._all_ready.set()
                logger.info("worker w%d is ready", member.serial)
                self._resume_accepting()
            case MessageKind.TAKEN:
                member.taken()
            case MessageKind.PASS_ON:
                self._pass_on(member, message)
            case MessageKind.QUESTION:
                # Looked at as the question is asked: who listens from then on is told by ``tell``.
                others = (one for one in self._members if one.listening and one.is_alive and one is not member)
                self._spawn(self._questions.ask(member, message.number, message.payload, others))
            case MessageKind.REPLY:
                self._questions.answered(message.number, message.payload)
            case MessageKind.LAST_METRICS:
                member.count(pickle.loads(message.payload), final=True)

    # life of the workers

    async def _fill(self, seat: int, before: Member | None) -> None:
        """Start a worker to take ``seat`` from ``before``. If the seat was taken meanwhile, end the new worker."""
        member = await self._start_member(seat)
        if self._seated.get(seat) is before:
            self._seated[seat] = member
        else:
            member.leave(signal.SIGTERM)

    async def _start_member(self, seat: int) -> Member:
        """Start a worker for ``seat``, without giving it the seat yet."""
        serial = seat + 1 + self._serials[seat] * self._wanted
        self._serials[seat] += 1
        row = self._counts.take_row(serial)
        start = WorkerStart(
            config=self._config_of_worker(),
            keys=self._keys,
            serial=serial,
            wanted=self._wanted,
            row=row.index,
            port=self.port,
        )
        member = Member(start, row, self._receive, on_room=self._resume_accepting)
        try:
            await member.start(self._file.fileno())
        except BaseException:
            self._counts.free(row)
            raise
        self._members.append(member)
        logger.info("started worker w%d (process %d)", serial, member.pid)
        self._spawn(self._watch(member))
        if self._stop.is_set():
            member.leave(signal.SIGKILL)
        return member

    def _config_of_worker(self) -> ServerConfig:
        """Return the configuration of a worker, with its share of the server's limits on memory and disk."""
        limits = self._config.limits
        return self._config.model_copy(
            update={
                "limits": limits.model_copy(update={"max_held_bytes": limits.max_held_bytes // self._wanted}),
                "record_max_bytes": max(1, self._config.record_max_bytes // self._wanted),
            }
        )

    async def _watch(self, member: Member) -> None:
        """Wait for the end of a worker. If it was not told to end, replace it or, during the start, stop the server."""
        begun = self._loop.time()
        status = await member.wait()
        self._members.remove(member)
        self._give_to_others(member)
        self._questions.ended(member)
        was_hung = member.row.hung
        self._counts.free(member.row)
        expected = member.leaving or self._stop.is_set()
        logger.log(
            logging.INFO if expected else logging.ERROR,
            "worker w%d (process %d) has ended with %s",
            member.serial,
            member.pid,
            f"signal {-status}" if status < 0 else f"status {status}",
        )
        if expected or self._seated.get(member.seat) is not member:
            return
        if not self._started and not was_hung:
            self._failure = status if status > 0 else 1
            self._stop.set()
            return
        if self._loop.time() - begun > STABLE_AFTER_SEC:
            self._backoffs[member.seat].reset()
        await asyncio.sleep(self._backoffs[member.seat].next())
        await self._start_again(member)

    async def _start_again(self, ended: Member) -> None:
        """Start a worker in the seat of one that has ended, unless another has the seat or the server stops."""
        while self._seated.get(ended.seat) is ended and not self._stop.is_set():
            try:
                await self._fill(ended.seat, ended)
            except (OSError, RuntimeError) as error:
                logger.error("cannot start a worker: %s", error)
                await asyncio.sleep(self._backoffs[ended.seat].next())

    async def _watch_answers(self) -> None:
        """Check at intervals that each worker answers. Report a worker that does not answer, and finally kill it.

        The checks are counted, not the time: if this process itself was blocked, the workers have not been silent.
        """
        while True:
            await asyncio.sleep(self._config.worker_hang_timeout_sec / _LOOKS)
            for member in [one for one in self._members if one.is_alive]:
                looks = member.silent_looks()
                if looks < _LOOKS_UNTIL_TOLD:
                    if member.row.hung:
                        member.row.note_hung(False)
                        logger.warning("worker w%d answers again", member.serial)
                        self._resume_accepting()
                elif not member.row.hung:
                    member.row.note_hung(True)
                    logger.error("worker w%d (process %d) does not answer", member.serial, member.pid)
                elif looks >= _LOOKS:
                    limit = self._config.worker_hang_timeout_sec
                    logger.error("worker w%d did not answer for %g seconds: it is killed", member.serial, limit)
                    member.signal(signal.SIGKILL)

    # signals

    def _stopped(self) -> None:
        if self._stop.is_set():
            self._at_once.set()
        self._stop.set()

    def _replace_all(self) -> None:
        if self._replacing or not self._started or self._stop.is_set():
            logger.warning("the workers are not replaced now: the server is starting, replacing them, or ending")
            return
        self._replacing = True
        self._spawn(self._replace_each())

    async def _replace_each(self) -> None:
        """Replace the workers one after another. Each is told to drain once its successor takes sessions."""
        try:
            for seat in range(self._wanted):
                successor = await self._start_member(seat)
                if not await unless(successor.ended, successor.ready.wait(), name="start of a successor"):
                    if self._stop.is_set():
                        return
                    logger.error("the workers are not replaced: worker w%d did not start", successor.serial)
                    return
                before, self._seated[seat] = self._seated.get(seat), successor
                if before is not None and before.is_alive:
                    before.retire()
                    await self._end(before)
                if self._stop.is_set():
                    return
            logger.info("all workers have been replaced")
        except (OSError, RuntimeError) as error:
            logger.error("the workers are not replaced: %s", error)
        finally:
            self._replacing = False

    async def _end(self, member: Member) -> None:
        """Wait for the end of a worker that was told to end; kill it after a time-out."""
        limit = self._config.drain_timeout_sec + CLOSING_SEC
        try:
            async with asyncio.timeout(limit):
                await member.ended.wait()
        except TimeoutError:
            logger.error("worker w%d did not end within %g seconds", member.serial, limit)
            member.signal(signal.SIGKILL)
            await member.ended.wait()

    async def _end_all(self) -> None:
        for member in self._members:
            if not member.leaving:  # a replaced worker drains already; a second signal would cut that short
                member.leave(signal.SIGTERM)
        ends = _gathered([self._end(member) for member in self._members])
        if not await unless(self._at_once, ends, name="end of the workers"):
            for member in self._members:
                member.signal(signal.SIGTERM)
            await _within(AT_ONCE_SEC, _gathered([member.ended.wait() for member in self._members]))
            for member in self._members:
                member.signal(signal.SIGKILL)
            await _within(AT_ONCE_SEC, _gathered([member.ended.wait() for member in self._members]))

    # Daily use

    async def _keep_daily_use(self, file: DailyUseFile) -> None:
        while True:
            await asyncio.sleep(DAILY_INTERVAL_SEC)
            self._note_daily_use(file)

    def _note_daily_use(self, file: DailyUseFile) -> None:
        day, used = self._counts.daily()
        if day and (day, used) != (file.use.day, file.use.used):
            file.use.replace(day, used)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _gathered(works: list[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*works)


async def _within(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        pass


# One worker, as the supervisor sees it

#: The time in which the last messages of an ended process arrive: they were sent before.
_LAST_MESSAGES_SEC: Final = 5.0


class Member:
    """A worker process, as the supervisor sees it.

    ``received`` is called with the worker's messages, and ``on_room`` when no messages to it are queued any more.
    """

    def __init__(
        self,
        start: WorkerStart,
        row: WorkerRow,
        received: Callable[[Member, WorkerMessage], None],
        *,
        on_room: Callable[[], None],
    ) -> None:
        self.serial = start.serial
        #: The worker's seat, from 0; its successor gets the same.
        self.seat = (start.serial - 1) % start.wanted
        self.row = row
        #: The number of consecutive checks that the worker has not answered, and its CPU time at the last check.
        self._silent_looks = 0
        self._used = -1.0
        #: The connections sent to the worker that it has not taken yet. They stay open here, so none is lost if it
        #: ends.
        self._untaken: deque[GivenConnection] = deque()
        self.listening = False
        self.ready = asyncio.Event()
        #: Whether the worker is to end, and is not to be replaced.
        self.leaving = False
        self.ended = asyncio.Event()
        #: The metrics that the worker reported last, of those that only grow.
        self.counted: list[Family] = []
        self._counted_all = False
        self._start = start
        self._received = received
        self._on_room = on_room
        self._closed = asyncio.Event()
        self._process: asyncio.subprocess.Process
        self.channel: ProcessChannel

    async def start(self, counts: int) -> None:
        """Start the process, which maps the file with the shared counts; ``counts`` is the file's descriptor."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # A program that finds the package by other means than the environment has workers that find it, too.
        path = os.pathsep.join(place or os.curdir for place in sys.path)
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "omni_ws.workers.process", str(theirs.fileno()), str(counts)),
                    pass_fds=(theirs.fileno(), counts),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                    # Ctrl-C in a terminal reaches the supervisor only, which ends its workers in order.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self.channel = ProcessChannel(ours, received=self._receive, closed=self._closed.set, on_room=self._on_room)
        self.channel.send(MessageKind.START, payload=pickle.dumps(self._start))

    def _receive(self, message: WorkerMessage) -> None:
        self._silent_looks = 0
        self._received(self, message)

    def silent_looks(self) -> int:
        """Check whether the worker answers, and ask it again. Returns how many checks in a row it has not answered.

        A worker that does not listen yet may compute for long before its event loop runs: it counts as silent only
        while it uses no CPU time.
        """
        if not self.listening and (used := _processor_sec(self.pid)) != self._used:
            self._used, self._silent_looks = used, 0
            return 0
        if self.listening and not self._silent_looks:
            self.channel.send(MessageKind.ALIVE)
        self._silent_looks += 1
        return self._silent_looks - 1

    async def wait(self) -> int:
        """Wait until the process has ended and all its messages have arrived.

        Returns the exit status, or the negative number of the signal that killed the process.
        """
        status = await self._process.wait()
        try:
            async with asyncio.timeout(_LAST_MESSAGES_SEC):
                await self._closed.wait()
        except TimeoutError:  # a child process of the worker has kept the channel open
            self.channel.close()
        self.ended.set()
        return status

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> int:
        """The number of the worker's connections and sessions, including connections on their way to it."""
        return self.row.connections + self.row.slots + self.row.given - self.row.received

    @property
    def takes_sessions(self) -> bool:
        return self.ready.is_set() and not self.leaving and not self.row.hung and self.row.state is WorkerState.OK

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    def give(self, connection: GivenConnection) -> None:
        """Send the worker a connection to serve."""
        self.row.give()
        self._untaken.append(connection)
        number, received = int(connection.passed_on), connection.received
        self.channel.send(MessageKind.CONNECTION, number, received, descriptor=connection.descriptor, lent=True)

    def taken(self) -> None:
        """Record that the worker has taken the oldest connection that was on its way to it."""
        os.close(self._untaken.popleft().descriptor)

    def take_back(self) -> list[GivenConnection]:
        """Return the connections that an ended worker has not taken. The caller owns their descriptors."""
        back = list(self._untaken)
        self._untaken.clear()
        return back

    def listens(self) -> None:
        """Record that the worker serves connections from now on."""
        self.listening = True

    def leave(self, number: int) -> None:
        """End the worker with the signal ``number``. It will not be replaced."""
        self.leaving = True
        self.signal(number)

    def retire(self) -> None:
        """Tell the worker to finish its open work, since a successor has its seat."""
        self.leaving = True
        self.channel.send(MessageKind.RETIRE)

    def count(self, families: Iterable[Family], *, final: bool = False) -> None:
        """Keep those of the reported metrics that must outlive the worker: see ``growing``.

        Nothing replaces ``final`` ones: an earlier report may be handled later.
        """
        if final or not self._counted_all:
            self.counted, self._counted_all = growing(families), final

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def ask(self, number: int, question: bytes) -> None:
        self.channel.send(MessageKind.ASKED, number, question)


@dataclass(frozen=True, slots=True)
class GivenConnection:
    """A connection on its way to a worker: its file descriptor, and the bytes that another worker has read from it.

    ``passed_on``: another worker has passed it on, and the one that gets it must serve it.
    """

    descriptor: int
    received: bytes = b""
    passed_on: bool = False


def _processor_sec(pid: int) -> float:
    """Return the CPU time of a process in seconds; without /proc, the time of the monotonic clock."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# Questions of one worker to the others, which pass through the supervisor

#: A worker that does not answer within this time is ignored.
ANSWER_TIMEOUT_SEC: Final = 2.0
#: The number of a question whose answer is ignored; other questions are numbered from 1.
_NO_ANSWER: Final = 0
#: The questions that are also passed to workers that start later. The argument of such a question is a tuple that
#: begins with the Unix time until which the question is valid.
REMEMBERED: Final = frozenset({KNOW_SECRET})


class Questions:
    """Passes the questions of one worker to the other workers, and keeps the metrics of workers that have ended."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Member, asyncio.Future[Any]]] = {}
        self._asked = 0
        self._remembered: list[tuple[str, Any]] = []
        self._ended: list[Family] = []

    def tell(self, member: Member) -> None:
        """Send the remembered questions to a worker that has just begun to listen."""
        for one in self._still_true():
            member.ask(_NO_ANSWER, pickle.dumps(one))

    def _still_true(self) -> list[tuple[str, Any]]:
        self._remembered = [one for one in self._remembered if one[1][0] > time.time()]
        return self._remembered

    async def ask(self, asker: Member, number: int, payload: bytes, others: Iterable[Member]) -> None:
        """Send a question to the workers ``others``, and send their answers to the worker ``asker``."""
        question, argument = pickle.loads(payload)
        if question in REMEMBERED:
            self._still_true().append((question, argument))
        if question == METRICS:
            asker.count(argument)
        others = tuple(others)
        answers = await asyncio.gather(*(self._ask(one, question, payload) for one in others), return_exceptions=True)
        # The metrics of a worker that has ended meanwhile are among those of ended workers.
        counts = [one.is_alive or question != METRICS for one in others]
        found: list[Any] = [one for one in compress(answers, counts) if not isinstance(one, BaseException)]
        if question == METRICS:
            found.append(self._ended)
        asker.channel.send(MessageKind.ANSWERS, number, pickle.dumps(found))

    async def _ask(self, other: Member, question: str, payload: bytes) -> Any:
        self._asked += 1
        number, waiting = self._asked, asyncio.get_running_loop().create_future()
        self._waiting[number] = (other, waiting)
        if other.row.hung:
            waiting.set_result(None)
        other.channel.send(MessageKind.ASKED, number, payload)
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_SEC):
                answer = await waiting
        except TimeoutError:
            answer = None
        finally:
            del self._waiting[number]
        if question != METRICS:
            return answer
        if answer is None or not other.is_alive:
            return other.counted
        other.count(answer)
        return answer

    def answered(self, number: int, payload: bytes) -> None:
        """Record a worker's answer to the question with this number."""
        if number in self._waiting:
            _, waiting = self._waiting[number]
            if not waiting.done():
                waiting.set_result(pickle.loads(payload))

    def ended(self, member: Member) -> None:
        """Add the last metrics of an ended worker to those of earlier ones, and stop waiting for its answers."""
        self._ended = summed([self._ended, member.counted])
        for other, waiting in self._waiting.values():
            if other is member and not waiting.done():
                waiting.set_result(None)
