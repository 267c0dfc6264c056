"""StepModel, a model that serves many sessions in steps on one thread, and StepProcess, its process.

The Thinker sends PromptRows and AnswerRows to the Talker; the Talker sends Codes, which become VocoderInputs for the
vocoder. TalkerSettings are the voice and the sampling parameters of a session. A StepProcess is the server's side: it
starts the process, watches it and restarts it. OmniTalker and VocoderStage are the stages that use the two processes.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.base import EngineState, OutputWriter, PartFailed
from omni_ws.engine.channel import (
    Channel,
    ChunkPace,
    ChunkPlan,
    ChunkPolicy,
    FrameChunks,
    Outputs,
    Stage,
    StageLink,
)
from omni_ws.engine.child import Backoff, Child, ChildEnded, keep_running
from omni_ws.engine.threads import end_tasks
from omni_ws.errors import EngineFailed, EngineOverloaded, InvalidValue, OmniError
from omni_ws.profiler import events


class StepModel(Protocol):
    """The interface of a Talker or vocoder in its process.

    No method is thread-safe; none but ``warm_up`` blocks longer than a step.
    """

    def warm_up(self) -> None:
        """Run, compile or capture every shape that occurs, so that the first session is as fast as the others."""
        ...

    @property
    def memory_bytes(self) -> int:
        """The bytes that weights, slots and buffers take on the device."""
        ...

    @property
    def slots(self) -> int:
        """The limit on concurrently open sessions."""
        ...

    def open(self, session: int, settings: Mapping[str, Any]) -> None:
        """Open a session. Raises EngineOverloaded without a free slot, or InvalidValue for settings."""
        ...

    def feed(self, session: int, item: Any) -> None:
        """Queue an item, which later steps process. Closes the session and raises InvalidValue for an invalid item."""
        ...

    def grant(self, session: int, frames: int) -> None:
        """Allow a Talker to make ``frames`` more codec frames; it makes none beyond its grants."""
        ...

    def close(self, session: int) -> None:
        """Free the session's slot and other resources immediately; unknown sessions are ignored."""
        ...

    @property
    def busy(self) -> bool:
        """Whether ``step`` has work to do."""
        ...

    def step(self) -> Sequence[StepResult]:
        """Do a bounded piece of work for a batch of sessions, and return the results that became ready."""
        ...


#: A result of a step: the session, and the item that was made for the session.
StepResult: TypeAlias = tuple[int, Any]
#: The result of a factory: the model, and facts about it for the server, such as its voices or its sample rate.
LoadedModel: TypeAlias = tuple[StepModel, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class PromptRows:
    """An item for the Talker: the next ``n`` tokens of the prompt.

    The items together cover the whole prompt in order, including turns that the Talker does not read. ``tokens`` (n,)
    int64; ``positions`` (3, n) int64 are the Thinker's M-RoPE positions. ``states`` (n,) bool marks the tokens whose
    hidden states are in ``hidden`` (k, hidden size) float32: all tokens for Qwen2.5, the tokens of audio, images and
    video for Qwen3.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]

    def split(self, count: int) -> tuple[PromptRows, PromptRows]:
        """Return the first ``count`` tokens, and the others."""
        hidden = int(self.states[:count].sum())
        return (
            PromptRows(self.tokens[:count], self.positions[:, :count], self.states[:count], self.hidden[:hidden]),
            PromptRows(self.tokens[count:], self.positions[:, count:], self.states[count:], self.hidden[hidden:]),
        )


@dataclass(frozen=True, slots=True)
class PromptReset:
    """An item for the Talker: the prompt begins anew, and all earlier PromptRows are void."""


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """An item for the Talker: the next ``n`` tokens of the answer. The first such item ends the prompt.

    ``tokens`` (n,) int64, without the token that ends the answer. ``hidden`` (n, hidden size) float32 for Qwen2.5,
    (0, hidden size) for Qwen3, whose Talker reads no hidden states of the answer.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.float32]

    def split(self, count: int) -> tuple[AnswerRows, AnswerRows]:
        """Return the first ``count`` tokens, and the others."""
        return (
            AnswerRows(self.tokens[:count], self.hidden[:count]),
            AnswerRows(self.tokens[count:], self.hidden[count:]),
        )


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """An item for the Talker: the answer ends, and no more AnswerRows follow."""


#: The items that a Talker reads.
TalkerItem = PromptRows | PromptReset | AnswerRows | AnswerEnd


class CodesEnd(StrEnum):
    """The reason why a Talker stopped making frames: it drew an end code, or reached a limit."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Codes:
    """The next codec frames of a Talker: ``codes`` (n, codebooks) int64; 1 codebook for Qwen2.5, 16 for Qwen3.

    ``end`` is set on the last item, which may have no frames. ``rows_used`` is the number of the answer's rows that the
    Talker has read so far.
    """

    codes: NDArray[np.int64]
    end: CodesEnd | None = None
    rows_used: int = 0


@dataclass(frozen=True, slots=True)
class VocoderInput:
    """Codec frames for a vocoder to decode: ``codes`` (n, codebooks) int64; ``last`` marks the end of the answer."""

    codes: NDArray[np.int64]
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkerSettings:
    """The voice and the sampling parameters of one session, checked.

    With ``temperature`` 0 the most probable code is drawn; ``top_k`` 0 and -1 disable this limit. ``max_tokens`` is the
    limit on codec frames. With ``seed`` None, ``changed`` draws a random seed.
    """

    voice: str
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float = 1.05
    max_tokens: int = 4096
    seed: int | None = None

    def changed(self, settings: Mapping[str, Any], voices: Sequence[str]) -> TalkerSettings:
        """Return a copy with the values of ``settings`` that are not None; without any ``seed``, a random one is drawn.

        ``voices`` are the names of the model's voices. Raises InvalidValue for unknown names and invalid values.
        """
        asked = {name: value for name, value in settings.items() if value is not None}
        if unknown := asked.keys() - {field.name for field in fields(self)}:
            raise InvalidValue(f"unknown setting of the Talker: {min(unknown)}")
        for name, reason in wrong_settings(asked).items():
            raise InvalidValue(f"talker.{name} {reason}")
        if "voice" in asked:
            asked["voice"] = known_voice(asked["voice"], voices)
        if asked.get("seed", self.seed) is None:
            asked["seed"] = secrets.randbits(63)
        return replace(self, **asked)


def wrong_settings(asked: Mapping[str, Any]) -> dict[str, str]:
    """Check the sampling parameters of a Talker; return the names of invalid ones, with the reasons.

    Names that are not sampling parameters are ignored.
    """
    return {
        name: f"must be {rule}, got {asked[name]!r}"
        for name, (rule, holds) in _RULES.items()
        if asked.get(name) is not None and not holds(asked[name])
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


#: The rule for each sampling parameter, in words and as a test.
_RULES: Final[Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "temperature": ("a number from 0 to 100", lambda value: _is_number(value) and 0 <= value <= 100),
    "top_p": ("a number above 0, at most 1", lambda value: _is_number(value) and 0 < value <= 1),
    "top_k": ("a whole number from 1, or 0 or -1 for all", lambda value: _is_whole(value) and value >= -1),
    "repetition_penalty": ("a number above 0, at most 100", lambda value: _is_number(value) and 0 < value <= 100),
    "seed": ("a whole number", _is_whole),
    "max_tokens": ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
}


def known_voice(voice: Any, voices: Sequence[str]) -> str:
    """Return the name of ``voice`` as in ``voices``; the case does not matter. Raises InvalidValue if it is unknown."""
    known = {name.lower(): name for name in voices}
    if not isinstance(voice, str) or voice.lower() not in known:
        raise InvalidValue(f"unknown voice {voice!r}; the model has {', '.join(voices)}")
    return known[voice.lower()]


log = logging.getLogger(__name__)

WORKER_MODULE: Final = "omni_ws.engine.omni.worker"

#: The limit on input of a session that the model has not taken yet, in bytes; the item that exceeds it is still sent.
INPUT_BYTES: Final = 1 << 20
#: How often the process is pinged while it has sessions, and how long it may be silent until it is killed.
WATCH_SEC: Final = 5.0
SILENCE_SEC: Final = 60.0
#: The limit on rows in a message: 64 hidden states of 3584 values are 0.9 MB.
ROWS_PER_MESSAGE: Final = 64
#: The estimated bytes of a message besides its rows or codes.
_OVERHEAD_BYTES: Final = 128
#: The weight of the latest measurement in the moving average.
_SMOOTHING: Final = 0.3


class StepProcess:
    """The process of one StepModel, as the server uses it.

    ``role`` is the name of the process in logs and errors. ``factory``, in the form ``package.module:function``, is
    called in the process with ``arguments``, and returns a LoadedModel. When the process dies, or is silent for
    SILENCE_SEC while it has sessions, its sessions fail, ``state`` becomes UNHEALTHY, and a new process is started,
    with increasing delays until this succeeds.
    """

    def __init__(self, role: str, factory: str, arguments: Mapping[str, Any]) -> None:
        self.role = role
        self.state = EngineState.STARTING
        #: The report of the process that it is ready; None while none runs.
        self.ready: Loaded | None = None
        #: What the factory told about the model; empty before ``start``.
        self.facts: Mapping[str, Any] = {}
        #: A vocoder's average decoding time, queueing included, in milliseconds per frame with context; 0 if unknown.
        self.ms_per_frame = 0.0
        self._load = LoadModel(factory, dict(arguments))
        self._sessions: dict[int, StepSession] = {}
        self._next_session = 1
        self._child: Child | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = 0.0
        self._next_question = 1
        self._questions: dict[int, asyncio.Future[Status]] = {}

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self._child is None else self._child.pid

    @property
    def open_sessions(self) -> int:
        """The number of sessions that have a slot or wait for one."""
        return len(self._sessions)

    async def start(self) -> None:
        """Start the process, and wait until the model is loaded and warmed up. Raises EngineFailed."""
        await self._launch()
        self.state = EngineState.OK
        self._tasks = [
            asyncio.create_task(
                keep_running(f"the {self.role}", self._until_death, self._start_again, Backoff()),
                name=f"keep the {self.role}",
            ),
            asyncio.create_task(self._watch(), name=f"watch over the {self.role}"),
        ]

    async def stop(self) -> None:
        """End the process; sessions fail with EngineFailed. Idempotent."""
        self.state = EngineState.STARTING
        tasks, self._tasks = self._tasks, []
        await end_tasks(*tasks)
        self._fail_all(f"the {self.role} has stopped")
        await self._end()

    @asynccontextmanager
    async def open(self, settings: Mapping[str, Any]) -> AsyncIterator[StepSession]:
        """Open a session for the block; the end of the block frees the slot.

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
            self.send(OpenSlot(number), dict(settings))
            await session.until_open()
            yield session
        finally:
            # Not found if the process has died or has refused the session: then there is nothing to close.
            if self._sessions.pop(number, None) is not None:
                self.send(CloseSlot(number))
            session.made.discard()

    async def occupation(self) -> Status:
        """Return the Status of the process, after it has handled all earlier messages. Raises EngineFailed."""
        return await self._ask()

    async def trace(self, path: Path | None) -> None:
        """Begin to trace torch's operations; with ``path`` None, end the trace and write it to the path given before.

        A trace that is running already is ended and written first. Raises EngineFailed.
        """
        file = None if path is None else str(path)
        status = await self._ask(trace=file)
        if status.error is not None:
            raise self._failed(f"tracing the {self.role} failed: {status.error}")

    async def _ask(self, trace: str | msgspec.UnsetType | None = msgspec.UNSET) -> Status:
        """Send an Ask with a new number, and return the Status with the same number. Raises EngineFailed."""
        if self.ready is None:
            raise self._failed(f"the {self.role} is not available")
        number, self._next_question = self._next_question, self._next_question + 1
        answer: asyncio.Future[Status] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self.send(Ask(number, trace))
            return await answer
        finally:
            self._questions.pop(number, None)

    def send(self, message: ToStepWorker, content: Any = None) -> None:
        """Send a message with the body ``content`` to the process; without a process, do nothing."""
        if self._child is not None:
            self._child.send(message, packed(content))

    def note_decoding(self, frames: int, seconds: float) -> None:
        """Add a measurement to ``ms_per_frame``: decoding ``frames`` frames took ``seconds``."""
        per_frame = seconds * 1000 / (frames + self.facts["context_frames"])
        weight = _SMOOTHING if self.ms_per_frame else 1.0
        self.ms_per_frame += weight * (per_frame - self.ms_per_frame)

    def overloaded(self) -> EngineOverloaded:
        """Return the error for a session that finds no free slot."""
        slots = self.ready.slots if self.ready is not None else 0
        return EngineOverloaded(f"all {slots} sessions of the {self.role} are taken; retry later", retry_after_ms=1000)

    def _failed(self, message: str) -> EngineFailed:
        return EngineFailed(message, param="tts", fatal=True)

    async def _launch(self) -> None:
        """Start a process and wait until it is ready. Raises EngineFailed."""
        try:
            self._child = child = await Child.start(f"the {self.role}", WORKER_MODULE, kinds=FromStepWorker)
            child.send(self._load)
            said, _ = await child.receive()
            assert isinstance(said, Loaded)
            if said.error is not None:
                raise self._failed(f"the {self.role} failed to start: {said.error}")
            self.ready, self.facts = said, said.facts
        except ChildEnded:
            await self._end()
            raise self._failed(f"the {self.role} failed to start: its process ended") from None
        except OSError as error:
            raise self._failed(f"the {self.role} failed to start") from error
        except BaseException:
            await self._end()
            raise

    async def _start_again(self) -> None:
        await self._launch()
        self.state = EngineState.OK

    async def _until_death(self) -> str:
        """Handle messages until the process ends; return the reason for its end."""
        assert self._child is not None
        try:
            while True:
                message, body = await self._child.receive()
                self._heard_at = time.monotonic()
                self._take(message, body)
        except ChildEnded:
            pass
        self.state = EngineState.UNHEALTHY
        self._fail_all(f"the {self.role} died")
        return f"exit status {await self._end()}"

    def _take(self, message: Any, body: bytes) -> None:
        if isinstance(message, Status):
            question = self._questions.get(message.number)
            if question is not None and not question.done():
                question.set_result(message)
            return
        session = self._sessions.get(message.session)
        if session is None:
            return  # closed while the message was on its way
        if isinstance(message, SlotRefused):
            del self._sessions[message.session]  # the process has closed it
        session.take(message, body)

    async def _watch(self) -> None:
        """Kill the process if it has sessions and sends no message for SILENCE_SEC; runs until cancelled."""
        while True:
            await asyncio.sleep(WATCH_SEC)
            if self.ready is None or not self._sessions:
                continue
            if time.monotonic() - self._heard_at > SILENCE_SEC and self._child is not None:
                log.error("the %s has been silent for %.0f s and is killed", self.role, SILENCE_SEC)
                self._child.kill()
            self.send(Ask(0))  # a ping: the answer, which no question waits for, sets ``_heard_at``

    def _fail_all(self, message: str) -> None:
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            session.fail(self._failed(message))
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._failed(message))

    async def _end(self) -> int | None:
        """End the process, even if the call is cancelled, and return its exit status; None if no process is left."""
        child, self._child, self.ready = self._child, None, None
        return None if child is None else await child.end()


class StepSession:
    """The server's side of a session in a StepProcess, for one answer; ``StepProcess.open`` opens and closes it.

    Iterating over the session yields a Talker's Codes, up to the item whose ``end`` is set. The iteration, ``feed`` and
    ``decode`` raise InvalidValue for input that the model refuses, and EngineFailed once the process has ended.
    """

    def __init__(self, process: StepProcess, number: int) -> None:
        #: The items that the model made. The caller bounds their number, by grants or by feeding one item at a time.
        self.made: Channel[Any] = Channel(0, cost=lambda item: 1)
        self._process = process
        self._number = number
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: OmniError | None = None
        self._on_the_way = 0
        self._room = asyncio.Event()

    async def feed(self, item: TalkerItem | VocoderInput) -> None:
        """Send ``item`` to the process; wait while the model has not taken INPUT_BYTES of this session's input yet."""
        for piece, cost in _pieces(item):
            await self._feed(piece, cost)

    async def _feed(self, item: TalkerItem | VocoderInput, cost: int) -> None:
        while self._error is None and self._on_the_way >= INPUT_BYTES:
            self._room.clear()
            await self._room.wait()
        if self._error is not None:
            raise self._error
        self._on_the_way += cost
        self._process.send(FeedItem(self._number, cost), item)

    def grant(self, frames: int) -> None:
        """Allow ``frames`` more codec frames; without a grant the Talker makes none."""
        if self._error is None:
            self._process.send(GrantFrames(self._number, frames))

    async def __aiter__(self) -> AsyncIterator[Codes]:
        async for codes in self.made:
            yield codes
            if codes.end is not None:
                return

    async def decode(self, item: VocoderInput) -> NDArray[np.float32]:
        """Send codes to the vocoder, and return the samples that they complete.

        The process batches them with codes of other sessions. Calls must not overlap. Decoding a chunk takes as long as
        if it had ``context_frames`` more frames, so ``ms_per_frame`` counts these frames, too.
        """
        began = time.monotonic()
        await self.feed(item)
        samples: NDArray[np.float32] = await anext(self.made)
        if len(item.codes):
            self._process.note_decoding(len(item.codes), time.monotonic() - began)
        return samples

    def take(self, message: object, body: bytes) -> None:
        """Handle a message from the process about this session."""
        match message:
            case SlotOpened():
                if not self._opened.done():
                    self._opened.set_result(None)
            case SlotRefused(_, reason, overloaded):
                self.fail(self._process.overloaded() if overloaded else InvalidValue(reason))
            case ItemTaken(_, cost):
                self._on_the_way -= cost
                self._room.set()
            case ItemMade() if not self.made.closed:
                self.made.put_nowait(pickle.loads(body))

    def fail(self, error: OmniError) -> None:
        """End the session with ``error``."""
        self._error = error
        self._room.set()
        self.made.fail(error)
        if not self._opened.done():
            self._opened.set_exception(error)

    async def until_open(self) -> None:
        """Wait until the session has a slot. Raises the errors of ``StepProcess.open``."""
        await self._opened


def _pieces(item: TalkerItem | VocoderInput) -> Iterator[tuple[TalkerItem | VocoderInput, int]]:
    """Cut an item with many rows into short ones, and yield each with its size in bytes.

    So a message that closes the session never waits behind a long message.
    """
    while isinstance(item, PromptRows | AnswerRows) and len(item.tokens) > ROWS_PER_MESSAGE:
        piece, item = item.split(ROWS_PER_MESSAGE)
        yield piece, _cost(piece)
    yield item, _cost(item)


def _cost(item: TalkerItem | VocoderInput) -> int:
    match item:
        case PromptRows() | AnswerRows():
            return item.tokens.nbytes + item.hidden.nbytes + _OVERHEAD_BYTES
        case VocoderInput():
            return item.codes.nbytes + _OVERHEAD_BYTES
    return _OVERHEAD_BYTES


# Messages. The items of models follow as the body of a message, pickled: both ends are this program, and nobody else
# can write to the pipes.


def packed(content: Any) -> bytes:
    """Return ``content`` as the pickled body of a message; an empty body for None."""
    return b"" if content is None else pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """The first message to the process. ``factory`` is ``module:function``, which returns a LoadedModel."""

    factory: str
    arguments: Mapping[str, Any]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A report that the model is loaded and warmed up or, with ``error``, a text for the operator, that this failed."""

    slots: int = 0
    memory_bytes: int = 0
    facts: Mapping[str, Any] = {}
    error: str | None = None


class OpenSlot(msgspec.Struct, frozen=True, tag=True):
    """An order to open a session with the settings in the body; the process answers SlotOpened or SlotRefused."""

    session: int


class SlotOpened(msgspec.Struct, frozen=True, tag=True):
    """A report that the session has a slot."""

    session: int


class SlotRefused(msgspec.Struct, frozen=True, tag=True):
    """A report that the model did not open the session, or closed it because of an invalid item.

    ``overloaded``: there was no free slot.
    """

    session: int
    message: str
    overloaded: bool = False


class FeedItem(msgspec.Struct, frozen=True, tag=True):
    """An order to queue the item in the body for the session. The item counts as ``cost`` bytes until ItemTaken."""

    session: int
    cost: int


class ItemTaken(msgspec.Struct, frozen=True, tag=True):
    """A report that the model has queued, or dropped, an item of ``cost`` bytes."""

    session: int
    cost: int


class GrantFrames(msgspec.Struct, frozen=True, tag=True):
    """An order to allow the session ``frames`` more codec frames."""

    session: int
    frames: int


class CloseSlot(msgspec.Struct, frozen=True, tag=True):
    """An order to close the session and free its slot."""

    session: int


class ItemMade(msgspec.Struct, frozen=True, tag=True):
    """A message with an item that the model made for the session, in the body."""

    session: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A request for a Status with the same number.

    ``trace``, if set, is the path of a file: a trace of torch's operations begins, to be written to this file; None
    ends the trace and writes it.
    """

    number: int
    trace: str | msgspec.UnsetType | None = msgspec.UNSET


class Status(msgspec.Struct, frozen=True, tag=True):
    """The answer to an Ask: the number of open sessions, whether the model has work, and a tracing error, if any."""

    number: int
    sessions: int
    busy: bool
    error: str | None = None


ToStepWorker: TypeAlias = LoadModel | OpenSlot | FeedItem | GrantFrames | CloseSlot | Ask
FromStepWorker: TypeAlias = Loaded | SlotOpened | SlotRefused | ItemTaken | ItemMade | Status


# The stages that speak an answer with an omni model: its Talker and its vocoder, each in a process of its own.
#
# A stage opens a session in its StepProcess for each answer.


#: The names in ``stage_sampling.talker``; ``max_tokens`` is the limit on the codec frames of the answer.
OMNI_TALKER_SAMPLING: Final = frozenset({"temperature", "top_p", "top_k", "repetition_penalty", "seed", "max_tokens"})

#: How far the Talker may be ahead of the vocoder, in milliseconds of audio.
AHEAD_MS: Final = 5_000.0

#: The link from the Thinker to the Talker; its capacity is in rows. The Thinker waits while it is full.
ROWS_LINK: Final = StageLink(1_024, lambda item: len(item.tokens) if isinstance(item, PromptRows | AnswerRows) else 1)

#: The first item to the vocoder, so that an answer takes its slot there as soon as it has its slot in the Talker. An
#: answer whose Talker has ended still holds a slot of the vocoder, so a later request might be refused half-way.
_NO_CODES: Final = Codes(np.zeros((0, 0), np.int64))


class OmniTalker:
    """The Stage of one request that runs the Talker: TalkerItems in, Codes out.

    ``settings`` are ``voice`` and the names in OMNI_TALKER_SAMPLING. The stage opens a session in the Talker's process
    when the first row of the answer arrives, and holds the rows of the prompt until then: the user may speak for
    minutes, which must not occupy a slot. If the source ends without rows of an answer, for instance after tool calls
    alone, no session is opened, and there are no Codes. ``frame_ms`` is the duration of a codec frame in milliseconds.
    """

    name = "talker"

    def __init__(self, process: StepProcess, settings: Mapping[str, Any], *, frame_ms: float) -> None:
        #: For the usage of the request: rows of prompt and answer that the Talker got, and frames that it made.
        self.prompt_tokens = 0
        self.tokens = 0
        #: Whether speech was cut off by ``max_tokens`` or by the longest speech of the model.
        self.cut = False
        self._process = process
        self._settings = settings
        self._granted = max(1, round(AHEAD_MS / frame_ms))
        self._speaks = False

    async def run(self, source: AsyncIterator[TalkerItem], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Feed rows to the process as they arrive, and put frames into ``sink`` as fast as the vocoder takes them.

        If the speech ends before ``source``, the rest of ``source`` is read and dropped. Raises the errors of
        ``StepProcess.open`` and StepSession.
        """
        assert sink is not None, "the Talker requires a stage after it"
        begun = await self._begun_answer(source)
        if not self._speaks:
            return
        async with self._process.open(self._settings) as session:
            await sink.put(_NO_CODES)
            # As many as fit into the link to the vocoder; then each frame that was put into the link.
            session.grant(self._granted)
            feeding = asyncio.create_task(self._feed(session, begun, source), name="talker rows")
            speaking = asyncio.create_task(self._speak(session, sink), name="talker codes")
            try:
                await asyncio.wait((feeding, speaking), return_when=asyncio.FIRST_COMPLETED)
                if feeding.done():
                    await feeding
                await speaking
            finally:
                await end_tasks(feeding, speaking)
        # The speech may end before the text; the Thinker is to write the text to its end.
        async for _ in source:
            pass

    async def _begun_answer(self, source: AsyncIterator[TalkerItem]) -> list[TalkerItem]:
        """Read and return the items up to the first row of the answer; set ``_speaks`` if there is such a row."""
        begun: list[TalkerItem] = []
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            if isinstance(item, PromptReset):
                begun.clear()
            begun.append(item)
            self._count(item)
            if self._speaks:
                break
        return begun

    async def _feed(self, session: StepSession, begun: list[TalkerItem], source: AsyncIterator[TalkerItem]) -> None:
        """Feed ``begun`` and the rest of ``source`` to the session; the end of the source ends the answer, too."""
        for item in begun:
            await session.feed(item)
        begun.clear()  # not kept for as long as the answer lasts
        async for item in source:
            if isinstance(item, AnswerEnd):
                break
            self._count(item)
            await session.feed(item)
        await session.feed(AnswerEnd())

    async def _speak(self, session: StepSession, sink: Channel[Codes]) -> None:
        async for codes in events.generated(self.name, aiter(session)):
            frames = len(codes.codes)
            self.tokens += frames
            self.cut = codes.end is CodesEnd.LENGTH
            await sink.put(codes)
            if frames:
                session.grant(frames)

    def _count(self, item: TalkerItem) -> None:
        match item:
            case PromptRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
            case AnswerRows(tokens=tokens):
                self.prompt_tokens += len(tokens)
                self._speaks = self._speaks or len(tokens) > 0
            case PromptReset():
                self.prompt_tokens = 0


class VocoderStage:
    """The Stage of one request that runs the vocoder: Codes in, AudioOutputs to the client.

    A session in the vocoder's process, with ``settings``, is open from the first codes to the end. Chunks grow as time
    allows (ChunkPace, with ``policy``). A vocoder that decodes in fixed windows has a ``block`` instead: the number of
    frames that its shortest window makes final. Codes are then decoded as they arrive, at most ``block`` frames at a
    time, so that the audio of one window does not wait for the next. ``clock`` is a monotonic clock in seconds. Create
    the stage after the start of ``process``.
    """

    name = "code2wav"

    def __init__(
        self,
        process: StepProcess,
        *,
        settings: Mapping[str, Any] | None = None,
        policy: ChunkPolicy | None = None,
        block: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._process = process
        self._settings = settings or {}
        self._block = block
        policy, facts = policy or ChunkPolicy(), process.facts
        pace = ChunkPace(
            policy,
            frame_ms=facts["frame_ms"],
            context_frames=facts["context_frames"],
            decode_ms_per_frame=process.ms_per_frame,
        )
        self._chunks: FrameChunks[Codes] = FrameChunks(
            self.name,
            pace,
            sample_rate=facts["sample_rate"],
            # Enough for two chunks.
            most_held=2 * (block or policy.largest),
            clock=clock,
        )
        #: Codes to decode, (frames, codebooks), and whether they include the last ones of the Talker.
        self._ready: NDArray[np.int64] = np.zeros((0, 0), np.int64)
        self._complete = False

    @property
    def audio_ms(self) -> float:
        """The duration of the audio sent, in milliseconds, for the usage of the request."""
        return self._chunks.audio_ms

    async def run(self, source: AsyncIterator[Codes], sink: Channel[Any] | None, outputs: OutputWriter) -> None:
        """Decode the codes that ``source`` yields, up to its end, and write the audio to ``outputs``.

        Without codes no session is opened. Raises the errors of ``StepProcess.open`` and StepSession.
        """
        async with self._chunks.reading(source):
            if await self._chunks.has_more():
                async with self._process.open(self._settings) as session:
                    await self._decode_all(session, outputs)

    async def _decode_all(self, session: StepSession, outputs: OutputWriter) -> None:
        began = ended = False
        while not ended:
            self._take_over()
            plan = self._plan()
            # The Talker may say only after its last codes, which are decoded by then, that they were the last.
            rest_alone = self._complete and not len(self._ready)
            if plan.frames or (rest_alone and began):
                codes, self._ready = self._ready[: plan.frames], self._ready[plan.frames :]
                ended = self._complete and not len(self._ready)
                item = VocoderInput(codes, last=ended)
                await self._chunks.send(len(codes), session.decode(item), outputs)
                began = True
            elif rest_alone:
                return
            else:
                await self._chunks.wait(plan.wait_ms)

    def _plan(self) -> ChunkPlan:
        """Return the ChunkPlan for the frames in ``_ready``."""
        if self._block is not None:
            return ChunkPlan(min(len(self._ready), self._block))
        return self._chunks.plan(len(self._ready), complete=self._complete)

    def _take_over(self) -> None:
        """Move the codes in the inbox to ``_ready``."""
        while self._chunks.inbox:
            item = self._chunks.inbox.popleft()
            if len(item.codes):
                self._ready = np.concatenate((self._ready, item.codes)) if len(self._ready) else item.codes
            self._complete = self._complete or item.end is not None
        # The source may also end without an item whose ``end`` is set.
        self._complete = self._complete or self._chunks.ended


class SpeechPart:
    """A Stage around a Talker's or vocoder's stage: if the process fails or has no free slot, only the text goes on.

    The client is then told with a PartFailed. InvalidValue still fails the request.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.name = stage.name
        self._stage = stage

    async def run(self, source: AsyncIterator[Any], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Run the stage. If it fails, read and drop the rest of ``source``, so that earlier stages go on."""
        try:
            await self._stage.run(source, sink, outputs)
        except (EngineFailed, EngineOverloaded) as error:
            told: OmniError
            if isinstance(error, EngineOverloaded):
                told = EngineOverloaded(error.message, param=error.param, retry_after_ms=error.retry_after_ms)
            else:
                told = EngineFailed(error.message, param=error.param)
            outputs.write(PartFailed(told))
            await outputs.drain()
            # Returning now would cancel the stages before this one, which write the text.
            async for _ in source:
                pass
