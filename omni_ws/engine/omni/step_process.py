"""StepProcess: the server's side of a StepModel in a process of its own, which is watched and restarted.

The rest are the messages between the two, and their form on the socket between them.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from omni_ws.engine.base import EngineState
from omni_ws.engine.channel import Channel
from omni_ws.engine.child import child_environment, end_process
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue, OmniError

log = logging.getLogger(__name__)

WORKER_MODULE: Final = "omni_ws.engine.omni.worker"

#: How much of a session's input may be on its way, in bytes; one item more is let through.
INPUT_BYTES: Final = 1 << 20
#: The delay before the first restart, which doubles with each attempt up to the maximum.
FIRST_BACKOFF_SEC: Final = 0.5
MAX_BACKOFF_SEC: Final = 60.0
#: A process that ran for this long is restarted with the initial delay.
STABLE_AFTER_SEC: Final = 60.0
#: How often the process is asked for a sign of life while it has sessions, and how long it may stay silent.
WATCH_SEC: Final = 5.0
SILENCE_SEC: Final = 60.0

_READ_BYTES: Final = 1 << 20


class StepProcess:
    """The process of one StepModel.

    ``role`` names it in messages. ``factory`` is ``module:function``, called in the process with ``arguments``; it
    returns a LoadedModel. ``part`` is what ``EngineFailed.param`` names. When the process dies, its sessions fail,
    ``state`` becomes UNHEALTHY, and a new process is started, with increasing delays until it succeeds.
    """

    def __init__(self, role: str, factory: str, arguments: Mapping[str, Any], *, part: str = "tts") -> None:
        self.role = role
        self.state = EngineState.STARTING
        #: What the process said when it was ready; None while none runs.
        self.ready: ModelReady | None = None
        #: None while no process runs.
        self.pid: int | None = None
        self._load = LoadModel(factory, dict(arguments))
        self._part = part
        self._sessions: dict[int, StepSession] = {}
        self._next_session = 1
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = 0.0
        self._next_question = 1
        self._questions: dict[int, asyncio.Future[Any]] = {}

    @property
    def open_sessions(self) -> int:
        """How many sessions have a slot, or are about to."""
        return len(self._sessions)

    async def start(self) -> None:
        """Start the process; returns when the model is loaded and warm. Raises EngineFailed."""
        await self._launch()
        self.state = EngineState.OK
        self._tasks = [
            asyncio.create_task(self._keep(), name=f"keep the {self.role}"),
            asyncio.create_task(self._watch(), name=f"watch over the {self.role}"),
        ]

    async def stop(self) -> None:
        """End the process; sessions fail. Idempotent."""
        self.state = EngineState.STARTING
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail_all(f"the {self.role} has stopped")
        await self._end()

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[StepSession]:
        """Open a session; leaving the block frees its slot at once.

        Raises EngineOverloaded without a free slot, InvalidValue for settings that the model refuses, EngineFailed
        without a process.
        """
        if self.ready is None or self.state is not EngineState.OK:
            raise self._failed(f"the {self.role} is not available")
        if len(self._sessions) >= self.ready.slots:
            raise self.overloaded()
        number, self._next_session = self._next_session, self._next_session + 1
        session = self._sessions[number] = StepSession(self, number)
        if len(self._sessions) == 1:
            self._heard_at = time.monotonic()
        try:
            self.send(OpenSlot(number, dict(settings)))
            await session.until_open()
            yield session
        finally:
            # Nothing to close in a process that has died since.
            if self._sessions.pop(number, None) is not None:
                self.send(CloseSlot(number))
            session.made.discard()

    async def occupation(self) -> Occupation:
        """Return what the process is occupied with, after everything that was sent to it. Raises EngineFailed."""
        answer: Occupation = await self._ask(AskOccupation)
        return answer

    async def trace(self, path: Path | None) -> None:
        """Begin a trace of torch's operations, which goes to ``path``; with None, end it and write the file.

        Raises EngineFailed.
        """
        changed: TraceChanged = await self._ask(lambda number: ChangeTrace(number, None if path is None else str(path)))
        if changed.error is not None:
            raise self._failed(f"tracing the {self.role} failed: {changed.error}")

    async def _ask(self, question: Callable[[int], object]) -> Any:
        """Send the question of a number, and return what the process answers to it. Raises EngineFailed."""
        if self.ready is None:
            raise self._failed(f"the {self.role} is not available")
        number, self._next_question = self._next_question, self._next_question + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self.send(question(number))
            return await answer
        finally:
            self._questions.pop(number, None)

    def send(self, message: object) -> None:
        """Send a message to the process, if there is one; its death is reported elsewhere."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(encode_message(message))

    def overloaded(self) -> EngineOverloaded:
        """Return the error for want of a slot."""
        slots = self.ready.slots if self.ready is not None else 0
        return EngineOverloaded(f"all {slots} sessions of the {self.role} are taken; retry later", retry_after_ms=1000)

    def _failed(self, message: str) -> EngineFailed:
        return EngineFailed(message, param=self._part, fatal=True)

    async def _launch(self) -> None:
        """Start a process and wait until it is ready. Raises EngineFailed."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", WORKER_MODULE, str(theirs.fileno())),
                    pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.PIPE,  # its end tells the process that the server is gone
                    stdout=2,
                    env=child_environment(),
                )
            self.pid = self._process.pid
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_READ_BYTES)
            self.send(self._load)
            said = await self._first_message(self._reader)
            if isinstance(said, LoadFailed):
                raise self._failed(f"the {self.role} failed to start: {said.message}")
            assert isinstance(said, ModelReady)
            self.ready = said
        except (OSError, BrokenPipeMessage) as error:
            await self._end()
            raise self._failed(f"the {self.role} failed to start") from error
        except BaseException:
            await self._end()
            raise
        finally:
            if self._writer is None:
                ours.close()

    async def _first_message(self, reader: asyncio.StreamReader) -> Any:
        buffer = MessageBuffer()
        while True:
            data = await reader.read(_READ_BYTES)
            if not data:
                raise self._failed(f"the {self.role} failed to start: its process ended")
            if messages := buffer.feed(data):
                return messages[0]

    async def _keep(self) -> None:
        """Read from the process; when it has died, start another one, forever."""
        backoff = FIRST_BACKOFF_SEC
        while True:
            started = time.monotonic()
            await self._read_all()
            if time.monotonic() - started > STABLE_AFTER_SEC:
                backoff = FIRST_BACKOFF_SEC
            self.state, self.ready = EngineState.UNHEALTHY, None
            self._fail_all(f"the {self.role} died")
            status = await self._end()
            log.error("the %s died (exit status %s); restarting it", self.role, status)
            while True:
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SEC)
                try:
                    await self._launch()
                except EngineFailed as error:
                    log.error("%s", error.message)
                else:
                    break
            self.state = EngineState.OK
            log.warning("the %s restarted", self.role)

    async def _read_all(self) -> None:
        """Take messages until the process ends."""
        assert self._reader is not None
        buffer = MessageBuffer()
        try:
            while data := await self._reader.read(_READ_BYTES):
                self._heard_at = time.monotonic()
                for message in buffer.feed(data):
                    self._take(message)
        except ConnectionError:
            return
        except BrokenPipeMessage:
            log.exception("the socket of the %s carries something else than messages", self.role)

    def _take(self, message: Any) -> None:
        if isinstance(message, Occupation | TraceChanged):
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                question.set_result(message)
            return
        session = self._sessions.get(message.session)
        if session is None:
            return  # closed while the message was on its way
        if isinstance(message, SlotRefused):
            del self._sessions[message.session]  # the process has closed it
        session.take(message)

    async def _watch(self) -> None:
        """Kill a process that has sessions and is silent for too long."""
        while True:
            await asyncio.sleep(WATCH_SEC)
            if self.ready is None or not self._sessions:
                continue
            if time.monotonic() - self._heard_at > SILENCE_SEC and self._process is not None:
                log.error("the %s has been silent for %.0f s and is killed", self.role, SILENCE_SEC)
                self._process.kill()
            self.send(AskOccupation(0))

    def _fail_all(self, message: str) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.fail(self._failed(message))
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._failed(message))

    async def _end(self) -> int | None:
        """End the process, by its input and then by force; also completes when cancelled. Returns its exit status."""
        self.ready = self.pid = None
        process, self._process = self._process, None
        writer, self._writer, self._reader = self._writer, None, None
        if writer is not None:
            writer.close()
        return None if process is None else await end_process(process, name=self.role)


class StepSession:
    """A session in the process, which ``StepProcess.open`` opens and closes."""

    def __init__(self, process: StepProcess, number: int) -> None:
        #: What the model made. The owner of the session bounds it, by grants or by asking for one item at a time.
        self.made: Channel[Any] = Channel(0, cost=lambda item: 1)
        self._process = process
        self._number = number
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: OmniError | None = None
        self._on_the_way = 0
        self._room = asyncio.Event()

    async def feed(self, item: Any, cost: int) -> None:
        """Hand an item of ``cost`` bytes over; waits while too much is on its way.

        Raises InvalidValue once the model has refused an item, EngineFailed once the process has ended.
        """
        while self._error is None and self._on_the_way >= INPUT_BYTES:
            self._room.clear()
            await self._room.wait()
        if self._error is not None:
            raise self._error
        self._on_the_way += cost
        self._process.send(FeedItem(self._number, item, cost))

    def grant(self, frames: int) -> None:
        """Allow ``frames`` frames more."""
        if self._error is None:
            self._process.send(GrantFrames(self._number, frames))

    def take(self, message: object) -> None:
        """Take a message of the process about this session."""
        match message:
            case SlotOpened():
                if not self._opened.done():
                    self._opened.set_result(None)
            case SlotRefused(_, reason, overloaded):
                self.fail(self._process.overloaded() if overloaded else InvalidValue(reason))
            case ItemTaken(_, cost):
                self._on_the_way -= cost
                self._room.set()
            case ItemMade(_, item) if not self.made.closed:
                self.made.put_nowait(item)

    def fail(self, error: OmniError) -> None:
        """End the session with ``error``."""
        self._error = error
        self._room.set()
        self.made.fail(error)
        if not self._opened.done():
            self._opened.set_exception(error)

    async def until_open(self) -> None:
        """Wait until the session has its slot. Raises what ``StepProcess.open`` says."""
        await self._opened


# A message is its length (u32, big-endian) and its pickle. Both ends are this program, and nobody else has the socket:
# the server makes it for the process, which inherits its end.

LENGTH: Final = struct.Struct(">I")
#: The longest message; one that claims to be longer is none.
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024


class BrokenPipeMessage(Exception):
    """The bytes on the socket are no message."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The first message to the process. ``factory`` is ``module:function``, which returns a LoadedModel."""

    factory: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelReady:
    """The model is loaded and warm."""

    slots: int
    memory_bytes: int
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The model cannot be loaded; the message is for the operator."""

    message: str


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Open a session; SlotOpened or SlotRefused follows."""

    session: int
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotOpened:
    """The session has a slot."""

    session: int


@dataclass(frozen=True, slots=True)
class SlotRefused:
    """The session is closed; ``overloaded`` if for want of a slot."""

    session: int
    message: str
    overloaded: bool = False


@dataclass(frozen=True, slots=True)
class FeedItem:
    """An item for the session, which counts as ``cost`` bytes until it is taken."""

    session: int
    item: Any
    cost: int


@dataclass(frozen=True, slots=True)
class ItemTaken:
    """The model took an item of ``cost`` bytes."""

    session: int
    cost: int


@dataclass(frozen=True, slots=True)
class GrantFrames:
    """Allow the session that many frames more."""

    session: int
    frames: int


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Free the session's slot."""

    session: int


@dataclass(frozen=True, slots=True)
class ItemMade:
    """The model made an item for the session."""

    session: int
    item: Any


@dataclass(frozen=True, slots=True)
class AskOccupation:
    """Ask for the Occupation."""

    number: int


@dataclass(frozen=True, slots=True)
class Occupation:
    """The answer: how many sessions are open, and whether the model has work."""

    number: int
    sessions: int
    busy: bool


@dataclass(frozen=True, slots=True)
class ChangeTrace:
    """Begin a trace of torch's operations that will be written to ``path``; without one, end it and write it."""

    number: int
    path: str | None


@dataclass(frozen=True, slots=True)
class TraceChanged:
    """The answer, with the reason if it failed."""

    number: int
    error: str | None = None


def encode_message(message: object) -> bytes:
    """Return the message's bytes. Raises BrokenPipeMessage for one that is too long."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BrokenPipeMessage(f"a message of {len(payload)} bytes")
    return LENGTH.pack(len(payload)) + payload


def decode_length(head: bytes) -> int:
    """Return the length of the pickle that follows. Raises BrokenPipeMessage."""
    (length,) = LENGTH.unpack(head)
    if length > MAX_MESSAGE_BYTES:
        raise BrokenPipeMessage(f"a message of {length} bytes")
    return int(length)


@dataclass(slots=True)
class MessageBuffer:
    """Cuts received bytes into messages."""

    _received: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> list[Any]:
        """Return the messages that ``data`` completes. Raises BrokenPipeMessage."""
        received = self._received
        received += data
        messages: list[Any] = []
        start = 0
        while len(received) - start >= LENGTH.size:
            begin = start + LENGTH.size
            end = begin + decode_length(bytes(received[start:begin]))
            if len(received) < end:
                break
            messages.append(pickle.loads(received[begin:end]))
            start = end
        del received[:start]
        return messages
