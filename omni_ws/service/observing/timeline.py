"""Timelines: what happened to a session and to each of its requests, and when.

A conversation records each fact once, through the ``mark_*`` methods of its request's timeline, which then reports it
to the observers. Metrics, log, profile and traces read the timeline; none of them keeps times of its own.

Times are seconds on the event loop's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, NamedTuple, Protocol, TypeAlias

from omni_ws.core.chunks import FinalChunk, InputMode, OutputModality, StartTrigger, Task
from omni_ws.core.request_input import GenerationStarted
from omni_ws.errors import OmniError


class RequestStage(StrEnum):
    """Where a request is: its input is collected, it waits for the engine, or the engine works on it."""

    INPUT = "input"
    QUEUE = "queue"
    ENGINE = "engine"


class PassedStage(NamedTuple):
    """A stage that a request has left."""

    stage: RequestStage
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Milestone(Enum):
    """The steps of a request that ``RequestReached`` reports.

    Not every request reaches all of them, and only OPENED is always first: input may end while the engine works, and
    after a cancellation the final precedes ENGINE_ENDED. CANCELLED may repeat while a request waits for its final.
    """

    OPENED = auto()
    POLICY_FIRED = auto()
    INPUT_ENDED = auto()
    ENGINE_STARTED = auto()
    CANCELLED = auto()
    ENGINE_ENDED = auto()


class PolicyStart(NamedTuple):
    """What fired the start policy; ``sequence_id`` is None for a bare end of input."""

    at: float
    trigger: StartTrigger
    sequence_id: int | None
    #: Chunks that the engine gets at once.
    chunks: int


class CancelCause(StrEnum):
    """What cancelled a request: its client by name, detected speech, or a later request."""

    CANCEL = "cancel"
    SPEECH = "speech"
    REQUEST = "request"


class Cancellation(NamedTuple):
    """``by`` is the id of the request that interrupted this one; None where the client cancelled it by name."""

    at: float
    cause: CancelCause
    by: str | None


class EngineEnd(NamedTuple):
    """How the engine's work ended: ``status`` is ``ok``, ``cancelled`` or the code of an error."""

    at: float
    status: str


class PlayerStatistics(NamedTuple):
    """How a client that reports its playback kept up; see ``Playback``."""

    underruns: int
    underrun_sec: float
    least_lead_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a request ended with. ``error`` is the reason why there is no whole answer."""

    at: float
    final: FinalChunk
    error: OmniError | None
    received_chunks: int
    received_bytes: int
    player: PlayerStatistics


class RequestContent(Protocol):
    """The words of a request, for the log that is asked to have them. Making them takes time."""

    @property
    def user_text(self) -> str: ...

    @property
    def answer_text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RequestReached:
    """A request has reached a step. A refused request ends right after OPENED."""

    timeline: RequestTimeline
    milestone: Milestone


@dataclass(frozen=True, slots=True)
class OutputBegan:
    """The first output of its modality goes into the outbox."""

    timeline: RequestTimeline
    modality: OutputModality


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request has its outcome; its final goes into the outbox next."""

    timeline: RequestTimeline
    outcome: Outcome
    content: RequestContent


#: The steps of a request from its opening to its end, which every observer gets.
RequestProgress: TypeAlias = RequestReached | OutputBegan | RequestEnded


class SessionTimeline:
    """When a session opened, and its requests so far."""

    __slots__ = ("opened", "request_count", "unfinished")

    def __init__(self, opened: float) -> None:
        self.opened: Final = opened
        #: Requests that were opened, refused ones included.
        self.request_count = 0
        #: Requests without a final, or on which the engine still works; in the order of their opening.
        self.unfinished: dict[str, RequestTimeline] = {}


class RequestTimeline:
    """What happened to one request, and when.

    ``mark_*`` records a step at the present time and reports it. A time is None until its step is reached; a step is
    marked at most once, but for cancellations.
    """

    __slots__ = (
        "_report",
        "_session",
        "_wall_ns",
        "admitted",
        "by_speech",
        "cancellations",
        "engine_end",
        "first_outputs",
        "input_ended",
        "input_mode",
        "now",
        "opened",
        "outcome",
        "passed",
        "policy",
        "request_id",
        "stage",
        "stage_began",
        "task",
    )

    def __init__(
        self,
        request_id: str,
        *,
        task: Task,
        input_mode: InputMode,
        by_speech: bool,
        session: SessionTimeline,
        report: Callable[[RequestProgress], None],
        now: Callable[[], float],
    ) -> None:
        """``by_speech``: detected speech opened it. Use ``ObservedSession.open_request``, which also reports it."""
        self.request_id: Final = request_id
        self.task: Final = task
        self.input_mode: Final = input_mode
        self.by_speech: Final = by_speech
        self.now: Final = now
        self.opened: Final = now()
        self._wall_ns = time.time_ns()
        self._session = session
        self._report = report
        #: Whether it was not refused as it opened.
        self.admitted = False
        #: The stage under way; None once the request is through.
        self.stage: RequestStage | None = RequestStage.INPUT
        self.stage_began = self.opened
        self.passed: list[PassedStage] = []
        self.policy: PolicyStart | None = None
        self.input_ended: float | None = None
        #: When the first output of each modality went out, in that order.
        self.first_outputs: dict[OutputModality, float] = {}
        #: A request that waits for its final can be cancelled again; one that is being answered, once.
        self.cancellations: list[Cancellation] = []
        self.engine_end: EngineEnd | None = None
        self.outcome: Outcome | None = None
        session.request_count += 1
        session.unfinished[request_id] = self

    # reading

    @property
    def first_answer_modality(self) -> OutputModality | None:
        """The modality that the answer began with. A transcript of the input is an answer to ``transcribe`` only."""
        return next((modality for modality in self.first_outputs if self._answers(modality)), None)

    def first_output_sec(self, modality: OutputModality | None) -> float | None:
        """Seconds from the end of the input to the first output; 0 if the output was first, None without output."""
        if modality is None or (began := self.first_outputs.get(modality)) is None:
            return None
        return 0.0 if self.input_ended is None else max(0.0, began - self.input_ended)

    @property
    def is_over(self) -> bool:
        """Whether nothing more happens: the final is out, and no engine works on the request."""
        return self.outcome is not None and self.stage is None

    @property
    def reached_engine(self) -> bool:
        """Whether the engine ever got the request."""
        return self.stage is RequestStage.ENGINE or self.engine_end is not None

    def wall_ns(self, when: float) -> int:
        """A time of this timeline as nanoseconds since 1970."""
        return self._wall_ns + round((when - self.opened) * 1e9)

    def _answers(self, modality: OutputModality) -> bool:
        if modality is OutputModality.THOUGHT:
            return False
        return modality is not OutputModality.TRANSCRIPT or self.task is Task.TRANSCRIBE

    # recording

    def mark_policy_fired(self, event: GenerationStarted) -> None:
        """The request waits for the engine from here on."""
        now = self.now()
        self.policy = PolicyStart(now, event.trigger, event.sequence_id, len(event.chunks))
        self._enter(RequestStage.QUEUE, now)
        self._reached(Milestone.POLICY_FIRED)

    def mark_input_ended(self) -> None:
        """All input has arrived."""
        self.input_ended = self.now()
        self._reached(Milestone.INPUT_ENDED)

    def mark_engine_started(self) -> None:
        """The engine gets the request."""
        self._enter(RequestStage.ENGINE, self.now())
        self._reached(Milestone.ENGINE_STARTED)

    def mark_output_began(self, modality: OutputModality) -> None:
        """The first output of this modality goes into the outbox."""
        self.first_outputs[modality] = self.now()
        self._report(OutputBegan(self, modality))

    def mark_cancelled(self, by: RequestTimeline | None) -> None:
        """``by`` is the request that interrupts this one, if one does."""
        if by is None:
            cancellation = Cancellation(self.now(), CancelCause.CANCEL, None)
        else:
            cause = CancelCause.SPEECH if by.by_speech else CancelCause.REQUEST
            cancellation = Cancellation(self.now(), cause, by.request_id)
        self.cancellations.append(cancellation)
        self._reached(Milestone.CANCELLED)

    def mark_engine_ended(self, *, whole: bool, error: OmniError | None) -> None:
        """The engine has released the request: at its own end, with an error, or, without either, cancelled."""
        now = self.now()
        status = "ok" if whole else "cancelled" if error is None else error.code
        self.engine_end = EngineEnd(now, status)
        self._enter(None, now)
        self._reached(Milestone.ENGINE_ENDED)

    def mark_ended(
        self,
        final: FinalChunk,
        error: OmniError | None,
        *,
        received_chunks: int,
        received_bytes: int,
        player: PlayerStatistics,
        content: RequestContent,
    ) -> None:
        """The request has its final, which goes into the outbox next."""
        now = self.now()
        self.outcome = Outcome(
            at=now,
            final=final,
            error=error,
            received_chunks=received_chunks,
            received_bytes=received_bytes,
            player=player,
        )
        if self.stage is not RequestStage.ENGINE:  # which may wind up a cancelled answer yet
            self._enter(None, now)
        self._report(RequestEnded(self, self.outcome, content))

    def _reached(self, milestone: Milestone) -> None:
        self._report(RequestReached(self, milestone))

    def _enter(self, stage: RequestStage | None, now: float) -> None:
        if self.stage is not None:
            self.passed.append(PassedStage(self.stage, self.stage_began, now))
        self.stage, self.stage_began = stage, now
        if self.outcome is not None and stage is None:
            self._session.unfinished.pop(self.request_id, None)
