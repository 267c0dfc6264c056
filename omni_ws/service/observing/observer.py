"""Observers of a server's sessions and requests: metrics, logs, profiles and traces.

The service reports observations to whatever observers are registered and knows none of them by name. Observers change
nothing, and none of them can harm a session: one that raises is removed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import AnyOutput, InputChunk, InputMode, OutputChunk, Task
from omni_ws.core.reorder import ReorderStatistics
from omni_ws.service.observing.timeline import (
    Milestone,
    RequestProgress,
    RequestReached,
    RequestTimeline,
    SessionTimeline,
)
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame

log = logging.getLogger(__name__)


class Origin(StrEnum):
    """The label of a session in metrics and logs, by its front end. Other front ends have labels of their own."""

    WEBSOCKET = "websocket"
    HTTP = "http"
    #: Mode B: several HTTP requests to one session.
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """Which session an observation is about. ``owner`` is the name of the API key that opened it."""

    session_id: str
    origin: str
    owner: str | None = None
    #: Whether its client is on this machine.
    near: bool = False


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session begins. Reported in the task that opens it, with that task's context variables."""

    timeline: SessionTimeline


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is over. An engine may still be winding up one of its requests."""

    timeline: SessionTimeline


class InputReceived(Struct, frozen=True):
    """A chunk as it arrived, before it was put in order. Only for observers of every chunk."""

    chunk: InputChunk


class InputAcknowledged(Struct, frozen=True):
    """How much input of the session has been accepted in order so far, and what was irregular about it.

    Everything below ``next_sequence_id`` has arrived; ``duplicates`` were dropped.
    """

    next_sequence_id: int
    received_bytes: int
    duplicates: int
    reordering: ReorderStatistics


class OutputMade(Struct, frozen=True):
    """An output goes into the outbox. Only for observers of every output."""

    chunk: OutputChunk


class OutputWritten(Struct, frozen=True):
    """An output was handed to the socket. Only for observers of every output."""

    chunk: AnyOutput


@dataclass(frozen=True, slots=True)
class OutputStalled:
    """The outbox was full for ``seconds``, and has room again; ``request_id`` is the request being answered."""

    request_id: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SpeechHeard:
    """Turn detection found the beginning or the end of speech."""

    event: SpeechStartedFrame | SpeechStoppedFrame


Observation: TypeAlias = (
    SessionOpened
    | SessionEnded
    | InputReceived
    | InputAcknowledged
    | RequestProgress
    | OutputMade
    | OutputWritten
    | OutputStalled
    | SpeechHeard
)


class Observer(Protocol):
    """What ``Observers`` report to."""

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Take note of an observation, without blocking: it runs on the event loop, inside the step it reports.

        The sessions and requests may have begun before this observer was added.
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
    """The observers of one server, which may change while it runs.

    Check ``listening`` before making an observation; for those of every chunk or output, check
    ``listening_to_chunks`` or ``listening_to_outputs``. Making one for nobody costs more than the check.
    """

    def __init__(self) -> None:
        self.listening = False
        self.listening_to_chunks = False
        self.listening_to_outputs = False
        self._interests: dict[Observer, _Interest] = {}
        #: The same, as a value that does not change while it is iterated over.
        self._registered: tuple[tuple[Observer, _Interest], ...] = ()

    def add(self, observer: Observer, *, every_chunk: bool = False, every_output: bool = True) -> None:
        """Report to this observer from here on, each chunk and each output only where it asks for them."""
        self._interests[observer] = _Interest(every_chunk, every_output)
        self._update()

    def remove(self, observer: Observer) -> None:
        """Report to it no longer. Idempotent."""
        self._interests.pop(observer, None)
        self._update()

    def notify(self, session: SessionIdentity, observation: Observation) -> None:
        """Pass an observation to all observers. Never raises."""
        for observer, interest in self._registered:
            if not interest.covers(observation):
                continue
            try:
                observer.observe(session, observation)
            except Exception:
                # An observer that failed once would fail, and fill the log, with every observation.
                log.exception("%s failed and was removed", type(observer).__name__)
                self.remove(observer)

    def _update(self) -> None:
        self._registered = tuple(self._interests.items())
        self.listening = bool(self._interests)
        self.listening_to_chunks = any(one.every_chunk for one in self._interests.values())
        self.listening_to_outputs = any(one.every_output for one in self._interests.values())


class ObservedSession:
    """One session as its observers see it: reports observations under its identity and opens its timelines."""

    def __init__(self, identity: SessionIdentity, observers: Observers, *, now: Callable[[], float]) -> None:
        self.identity = identity
        self.observers = observers
        self.timeline = SessionTimeline(now())
        self._now = now

    @property
    def listening(self) -> bool:
        """Whether there is any observer."""
        return self.observers.listening

    @property
    def listening_to_outputs(self) -> bool:
        """Whether any observer takes every output."""
        return self.observers.listening_to_outputs

    def notify(self, observation: Observation) -> None:
        """Report an observation of this session, if anything observes it."""
        if self.observers.listening:
            self.observers.notify(self.identity, observation)

    def opened(self) -> None:
        """Report that the session begins."""
        self.notify(SessionOpened(self.timeline))

    def ended(self) -> None:
        """Report that the session is over."""
        self.notify(SessionEnded(self.timeline))

    def open_request(self, request_id: str, *, task: Task, input_mode: InputMode, by_speech: bool) -> RequestTimeline:
        """Begin the timeline of a new request and report that it opened."""
        timeline = RequestTimeline(
            request_id,
            task=task,
            input_mode=input_mode,
            by_speech=by_speech,
            session=self.timeline,
            report=self.notify,
            now=self._now,
        )
        self.notify(RequestReached(timeline, Milestone.OPENED))
        return timeline

    @classmethod
    def unobserved(cls, now: Callable[[], float]) -> ObservedSession:
        """A session without observers."""
        return cls(SessionIdentity("", Origin.HTTP), Observers(), now=now)
