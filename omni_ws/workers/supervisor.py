"""Supervisor: starts the workers of a server, gives each connection to one of them, and replaces those that die."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Coroutine
from typing import IO, Any, Final

from omni_ws import __version__
from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.service.interrupting import unless
from omni_ws.service.open_files import allow_connections
from omni_ws.service.sessions.daily_use_file import DailyUseFile
from omni_ws.transport.http.connections import MAX_TURNED_AWAY
from omni_ws.transport.http.hang_up import notice_dead_networks
from omni_ws.workers.channel import MessageKind, WorkerMessage
from omni_ws.workers.member import GivenConnection, Member
from omni_ws.workers.questions import Questions
from omni_ws.workers.start import WorkerStart, shared_counts

logger = logging.getLogger(__name__)

#: Before a worker that died is replaced: so long at first, twice as long each time, and so long at most.
FIRST_PAUSE_SEC: Final = 0.5
LONGEST_PAUSE_SEC: Final = 30.0
#: A worker that has served for so long is replaced after the first pause again.
STEADY_SEC: Final = 60.0
#: Time beyond that of the drain, in which a worker closes its connections and its engine. Then it is killed.
CLOSING_SEC: Final = 20.0
#: The same after a second signal.
AT_ONCE_SEC: Final = 0.8
#: Connections that may wait in the channel of a worker; while all have so many, they wait in the system.
MOST_WAITING: Final = 64
#: Connections that are accepted in one pass of the loop.
_ACCEPTED_AT_ONCE: Final = 64
#: When to accept again after the system refused.
_ACCEPT_PAUSE_SEC: Final = 0.2
#: How often the file with the amounts of the day is brought up to date.
DAILY_INTERVAL_SEC: Final = 1.0
#: How often it is looked whether the workers answer, within the time after which one is replaced; and after how many
#: looks without an answer it is told.
_LOOKS: Final = 12
_LOOKS_UNTIL_TOLD: Final = _LOOKS // 3


class Supervisor:
    """The parent of the workers. It serves no request itself."""

    def __init__(self, config: ServerConfig, keys: tuple[ApiKey, ...]) -> None:
        self._config = config
        self._keys = keys
        self._wanted = config.workers
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._accepting = False
        self._members: list[Member] = []
        #: The worker of each seat that is to take new sessions.
        self._seated: dict[int, Member] = {}
        self._serials = [0] * self._wanted
        self._pauses = [FIRST_PAUSE_SEC] * self._wanted
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
        """Serve until a signal, and return the exit status. Raises OSError if the port is taken."""
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
                self._started = self._counts.started = True
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
                connection.close()  # each worker answers some of those that are too many
            else:
                member.give(GivenConnection(connection.detach()))

    @property
    def _open_connections(self) -> int:
        """The connections of all workers, with those on their way to one, which are open here."""
        return sum(one.row.all_connections for one in self._members)

    def _least_loaded(self, *, beside: Member | None = None) -> Member | None:
        """The worker that gets the next connection: one that takes sessions, else one that can at least say why not."""
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
            (to or sender).give(GivenConnection(message.descriptor, message.payload, passed_on=True))

    def _give_to_others(self, ended: Member) -> None:
        """What was on its way to a worker that has ended goes to the others, if there are any."""
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
                member.listening = True
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
                others = [one for one in self._members if one.listening and one.is_alive and one is not member]
                self._spawn(self._questions.ask(member, message.number, message.payload, others))
            case MessageKind.REPLY:
                self._questions.answered(message.number, message.payload)
            case MessageKind.LAST_METRICS:
                self._questions.counted(member, message.payload)

    # life of the workers

    async def _fill(self, seat: int, before: Member | None) -> None:
        """Start a worker in the place of ``before``, and end it if another has got the seat meanwhile."""
        member = await self._start_member(seat)
        if self._seated.get(seat) is before:
            self._seated[seat] = member
        else:
            member.leaving = True
            member.signal(signal.SIGTERM)

    async def _start_member(self, seat: int) -> Member:
        """Start a worker. Who starts it says whether it gets the seat."""
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
        member = Member(start, row, self._receive)
        try:
            await member.start(self._file.fileno())
        except BaseException:
            self._counts.free(row)
            raise
        member.channel.on_room = self._resume_accepting
        self._members.append(member)
        logger.info("started worker w%d (process %d)", serial, member.pid)
        self._spawn(self._watch(member))
        if self._stop.is_set():
            member.leaving = True
            member.signal(signal.SIGKILL)
        return member

    def _config_of_worker(self) -> ServerConfig:
        """What the server holds in memory and on the disk is divided among the workers."""
        limits = self._config.limits
        return self._config.model_copy(
            update={
                "limits": limits.model_copy(update={"max_held_bytes": limits.max_held_bytes // self._wanted}),
                "record_max_bytes": max(1, self._config.record_max_bytes // self._wanted),
            }
        )

    async def _watch(self, member: Member) -> None:
        """Wait for the end of a worker, and replace it if it was not to end."""
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
        if self._loop.time() - begun >= STEADY_SEC:
            self._pauses[member.seat] = FIRST_PAUSE_SEC
        pause = self._pauses[member.seat]
        self._pauses[member.seat] = min(2 * pause, LONGEST_PAUSE_SEC)
        await asyncio.sleep(pause)
        await self._start_again(member)

    async def _start_again(self, ended: Member) -> None:
        """Start a worker in the place of one that has ended, unless another has its seat or the server stops."""
        while self._seated.get(ended.seat) is ended and not self._stop.is_set():
            try:
                await self._fill(ended.seat, ended)
            except (OSError, RuntimeError) as error:
                logger.error("cannot start a worker: %s", error)
                await asyncio.sleep(LONGEST_PAUSE_SEC)

    async def _watch_answers(self) -> None:
        """Look at intervals whether each worker answers: one that does not is told, and killed in the end.

        Looks are counted, not time: when this process was held up itself, its workers have not been silent.
        """
        while True:
            await asyncio.sleep(self._config.worker_hang_timeout_sec / _LOOKS)
            for member in [one for one in self._members if one.is_alive]:
                looks = member.silent_looks()
                if looks < _LOOKS_UNTIL_TOLD:
                    if member.row.hung:
                        member.row.hung = False
                        logger.warning("worker w%d answers again", member.serial)
                        self._resume_accepting()
                elif not member.row.hung:
                    member.row.hung = True
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
        """Replace one worker after the other: each is told to drain when its successor takes sessions."""
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
                    before.leaving = True
                    before.channel.send(MessageKind.RETIRE)
                    await self._end(before)
                if self._stop.is_set():
                    return
            logger.info("all workers have been replaced")
        except (OSError, RuntimeError) as error:
            logger.error("the workers are not replaced: %s", error)
        finally:
            self._replacing = False

    async def _end(self, member: Member) -> None:
        """Wait until a worker that was told to end has done so; then kill it."""
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
            if not member.leaving:  # one that is replaced drains already, and a second signal would cut that short
                member.leaving = True
                member.signal(signal.SIGTERM)
        ends = _gathered([self._end(member) for member in self._members])
        if not await unless(self._at_once, ends, name="end of the workers"):
            for member in self._members:
                member.signal(signal.SIGTERM)
            await _within(AT_ONCE_SEC, _gathered([member.ended.wait() for member in self._members]))
            for member in self._members:
                member.signal(signal.SIGKILL)
            await _within(AT_ONCE_SEC, _gathered([member.ended.wait() for member in self._members]))

    # amounts of the day

    async def _keep_daily_use(self, file: DailyUseFile) -> None:
        while True:
            await asyncio.sleep(DAILY_INTERVAL_SEC)
            self._note_daily_use(file)

    def _note_daily_use(self, file: DailyUseFile) -> None:
        day, used = self._counts.daily()
        if day and (day, used) != (file.use.day, file.use.used):
            file.use.day, file.use.used = day, dict(used)
            file.use.changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def supervise(config: ServerConfig, keys: tuple[ApiKey, ...], listening: Callable[[int], object] | None) -> int:
    """Run a server of several workers to its end, and return the exit status."""
    supervisor = Supervisor(config, keys)
    logger.info("omni_ws %s starts %d workers", __version__, config.workers)
    return await supervisor.run(listening)


async def _gathered(works: list[Coroutine[Any, Any, Any]]) -> None:
    await asyncio.gather(*works)


async def _within(seconds: float, work: Coroutine[Any, Any, Any]) -> None:
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        pass
