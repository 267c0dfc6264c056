"""Member: one worker as the supervisor sees it, with its process and the channel to it."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from omni_ws.service.sessions.shared_counts import WorkerRow, WorkerState
from omni_ws.workers.channel import MessageKind, ProcessChannel, WorkerMessage
from omni_ws.workers.metrics_sum import Family
from omni_ws.workers.start import WorkerStart

#: Time in which the last messages of an ended process arrive: they have been sent before.
_LAST_MESSAGES_SEC = 5.0


@dataclass(frozen=True, slots=True)
class GivenConnection:
    """A connection on its way to a worker: its file descriptor, and what other workers have read of it."""

    descriptor: int
    received: bytes = b""
    passed_on: bool = False


class Member:
    """A worker of the supervisor. ``received`` is called with its messages."""

    def __init__(self, start: WorkerStart, row: WorkerRow, received: Callable[[Member, WorkerMessage], None]) -> None:
        self.serial = start.serial
        #: Its place among the workers that are wanted; its successor has the same.
        self.seat = (start.serial - 1) % start.wanted
        self.row = row
        #: For how many looks in a row it has owed an answer, and the processor's time that it had used at the last one.
        self._silent_looks = 0
        self._used = -1.0
        #: Those that it has not taken yet. They stay open here, so that none is lost if it ends before it has.
        self._untaken: deque[GivenConnection] = deque()
        self.listening = False
        self.ready = asyncio.Event()
        #: Whether it is to end, so that nobody takes its place.
        self.leaving = False
        self.ended = asyncio.Event()
        #: Its exit status; negative: the signal that killed it.
        self.status: int | None = None
        #: What it had counted when it was last asked.
        self.counted: list[Family] = []
        self._start = start
        self._received = received
        self._closed = asyncio.Event()
        self._process: asyncio.subprocess.Process
        self.channel: ProcessChannel

    async def start(self, counts: int) -> None:
        """Start the process, which maps the file ``counts``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # A program that imports the package by other means than the environment still finds it in its workers.
        path = os.pathsep.join(place or os.curdir for place in sys.path)
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "omni_ws.workers.process", str(theirs.fileno()), str(counts)),
                    pass_fds=(theirs.fileno(), counts),
                    stdin=asyncio.subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": path},
                    # A terminal's Ctrl-C reaches the supervisor alone, which ends its workers in order.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        self.channel = ProcessChannel(ours, received=self._receive, closed=self._closed.set)
        self.channel.send(MessageKind.START, payload=pickle.dumps(self._start))

    def _receive(self, message: WorkerMessage) -> None:
        self._silent_looks = 0
        self._received(self, message)

    def silent_looks(self) -> int:
        """Look whether it answers: for how many looks in a row it has not. Asks it again.

        One that does not listen yet may compute for long before its event loop runs, but it computes.
        """
        if not self.listening and (used := _processor_sec(self.pid)) != self._used:
            self._used, self._silent_looks = used, 0
            return 0
        if self.listening and not self._silent_looks:
            self.channel.send(MessageKind.ALIVE)
        self._silent_looks += 1
        return self._silent_looks - 1

    async def wait(self) -> int:
        """Wait until the process has ended and all that it sent has arrived. Returns its status."""
        status = await self._process.wait()
        try:
            async with asyncio.timeout(_LAST_MESSAGES_SEC):
                await self._closed.wait()
        except TimeoutError:  # a process that it started has kept the channel open
            self.channel.close()
        self.status = status
        self.ended.set()
        return status

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def load(self) -> int:
        """Its connections and sessions, with what is on its way to it."""
        return self.row.connections + self.row.slots + self.row.given - self.row.received

    @property
    def takes_sessions(self) -> bool:
        return self.ready.is_set() and not self.leaving and not self.row.hung and self.row.state is WorkerState.OK

    @property
    def is_alive(self) -> bool:
        return self.status is None

    def give(self, connection: GivenConnection) -> None:
        """Have it serve a connection."""
        self.row.give()
        self._untaken.append(connection)
        number, received = int(connection.passed_on), connection.received
        self.channel.send(MessageKind.CONNECTION, number, received, descriptor=connection.descriptor, lent=True)

    def taken(self) -> None:
        """It has the first of the connections on their way to it."""
        os.close(self._untaken.popleft().descriptor)

    def take_back(self) -> list[GivenConnection]:
        """The connections that it has not taken, once it has ended. Their descriptors are the caller's."""
        back = list(self._untaken)
        self._untaken.clear()
        return back

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    def ask(self, number: int, question: bytes) -> None:
        self.channel.send(MessageKind.ASKED, number, question)


def _processor_sec(pid: int) -> float:
    """The processor's time that a process has used; where the system does not tell, the time, which always goes on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
