"""Observers: whoever wants to know what becomes of a server's sessions and requests. They change nothing.

Profiles, metrics, logs and recordings are observers; the service tells them, and knows none of them by name.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import InputChunk, OutputModality
from omni_ws.core.output import AnyOutput, FinalChunk, OutputChunk
from omni_ws.core.reorder import ReorderStatistics
from omni_ws.core.session import GenerationStarted
from omni_ws.errors import OmniError
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame

if TYPE_CHECKING:
    from omni_ws.service.conversation.request import Request

log = logging.getLogger(__name__)


class Origin(StrEnum):
    """The label of a session in metrics and logs, by its front end. Other front ends have labels of their own."""

    WEBSOCKET = "websocket"
    HTTP = "http"
    #: Mode B: several HTTP requests to one session.
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """``owner`` is the name of the API key that opened it."""

    session_id: str
    origin: str
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class SessionOpened:
    pass


@dataclass(frozen=True, slots=True)
class SessionEnded:
    pass


class InputReceived(Struct, frozen=True):
    """A chunk as it arrived, before it was put in order. Only for observers of every chunk."""

    chunk: InputChunk


class InputAcknowledged(Struct, frozen=True):
    """So much of the session's input has come so far; ``request`` is the one that takes input, if any does."""

    request: Request | None
    next_sequence_id: int
    received_bytes: int
    duplicates: int
    reordering: ReorderStatistics


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """A first chunk came. It may be refused: then RequestEnded follows at once."""

    request: Request
    by_speech: bool


@dataclass(frozen=True, slots=True)
class PolicyFired:
    request: Request
    event: GenerationStarted


@dataclass(frozen=True, slots=True)
class InputEnded:
    request: Request


@dataclass(frozen=True, slots=True)
class AnswerStarted:
    """The engine gets the request."""

    request: Request


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """The engine has let go of the request; ``whole`` where it came to its own end, uncancelled and unbroken."""

    request: Request
    whole: bool


@dataclass(frozen=True, slots=True)
class OutputBegan:
    """The first output of its modality goes into the outbox."""

    request: Request
    modality: OutputModality


class OutputMade(Struct, frozen=True):
    """An output is in the outbox. Only for observers of every output."""

    request: Request
    chunk: OutputChunk


class OutputWritten(Struct, frozen=True):
    """The socket has got an output. Only for observers of every output."""

    chunk: AnyOutput


@dataclass(frozen=True, slots=True)
class OutputStalled:
    """For so many seconds the client read too little for any more output."""

    request: Request | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SpeechHeard:
    """A detected turn began or ended."""

    request: Request | None
    event: SpeechStartedFrame | SpeechStoppedFrame


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """A client cancelled a request, or, where there is a ``by``, interrupted it with another one."""

    request: Request
    by: Request | None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The final is in the outbox. ``error`` says why there is no whole answer."""

    request: Request
    final: FinalChunk
    error: OmniError | None


#: How a request comes from its opening to its end, whoever listens.
RequestProgress: TypeAlias = (
    PolicyFired | InputEnded | AnswerStarted | AnswerEnded | OutputBegan | RequestCancelled | RequestEnded
)
Observation: TypeAlias = (
    SessionOpened
    | SessionEnded
    | InputReceived
    | InputAcknowledged
    | RequestOpened
    | RequestProgress
    | OutputMade
    | OutputWritten
    | OutputStalled
    | SpeechHeard
)


class Observer(Protocol):
    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Runs on the loop, in the middle of things: quick, and without a wait. What it hears it may not change.

        It may hear of sessions and requests that began before it listened.
        """


@dataclass(frozen=True, slots=True)
class _Interest:
    every_chunk: bool
    every_output: bool

    def covers(self, observation: Observation) -> bool:
        kind = type(observation)
        if kind is InputReceived:
            return self.every_chunk
        return self.every_output or kind not in (OutputMade, OutputWritten)


class Observers:
    """Those who listen to a server.

    Look at ``listening``, or for what comes with every chunk or output at ``listening_to_chunks`` and
    ``listening_to_outputs``, before making an observation.
    """

    def __init__(self) -> None:
        self.listening = False
        self.listening_to_chunks = False
        self.listening_to_outputs = False
        self._observers: dict[Observer, _Interest] = {}
        self._told: tuple[tuple[Observer, _Interest], ...] = ()

    def add(self, observer: Observer, *, every_chunk: bool = False, every_output: bool = True) -> None:
        self._observers[observer] = _Interest(every_chunk, every_output)
        self._look()

    def remove(self, observer: Observer) -> None:
        """Idempotent."""
        self._observers.pop(observer, None)
        self._look()

    def tell(self, session: SessionIdentity, observation: Observation) -> None:
        for observer, interest in self._told:
            if not interest.covers(observation):
                continue
            try:
                observer.observe(session, observation)
            except Exception:
                # Looking on must never harm what is looked at; who fails once would fail, and complain, all the time.
                log.exception("%s failed and hears no more", type(observer).__name__)
                self.remove(observer)

    def _look(self) -> None:
        self._told = tuple(self._observers.items())
        self.listening = bool(self._observers)
        self.listening_to_chunks = any(one.every_chunk for one in self._observers.values())
        self.listening_to_outputs = any(one.every_output for one in self._observers.values())


class ObservedSession:
    """What one session tells the observers of its server."""

    def __init__(self, identity: SessionIdentity, observers: Observers) -> None:
        self.identity = identity
        #: Look at what they listen to before making an observation that comes often.
        self.observers = observers

    @property
    def listening(self) -> bool:
        return self.observers.listening

    @property
    def listening_to_outputs(self) -> bool:
        return self.observers.listening_to_outputs

    def tell(self, observation: Observation) -> None:
        if self.observers.listening:
            self.observers.tell(self.identity, observation)

    def ended(self) -> None:
        self.tell(SessionEnded())

    @classmethod
    def unobserved(cls) -> ObservedSession:
        return cls(SessionIdentity("", Origin.HTTP), Observers())
