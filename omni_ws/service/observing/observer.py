"""Timelines of sessions and requests, and the observers to which each event is reported.

A conversation records each event once, through the ``mark_*`` methods of its request's timeline, which then reports it
to the observers (metrics, logs, profiles and traces). No observer keeps times of its own. Times are seconds on the
event loop's clock.

Observers are registered at run time. They change nothing, and cannot harm a session: one that raises is removed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import (
    AnyOutput,
    FinalChunk,
    InputChunk,
    InputMode,
    OutputChunk,
    OutputModality,
    StartTrigger,
    Task,
)
from omni_ws.core.input_stream import InputStream
from omni_ws.core.ledger_entry import LedgerEntry
from omni_ws.core.reorder import NONE_REORDERED, ReorderStatistics
from omni_ws.core.request_input import GenerationStarted
from omni_ws.engine.base import TimedPart, TranscriptGuess, TranscriptOutput, TurnTimes
from omni_ws.errors import OmniError
from omni_ws.wire.server_frames import (
    SpeechConfirmedFrame,
    SpeechDismissedFrame,
    SpeechStartedFrame,
    SpeechStoppedFrame,
)

log = logging.getLogger(__name__)


# Timelines.


#: Where a request is: its input is collected, it waits for the engine, or the engine works on it.
Stage: TypeAlias = Literal["input", "queue", "engine"]
STAGES: Final[tuple[Stage, ...]] = ("input", "queue", "engine")
#: The steps of a request that ``RequestReached`` reports.
#:
#: Not every request reaches all of them, and only ``opened`` is always first: input may end while the engine works, and
#: after a cancellation the final precedes ``engine_ended``. ``cancelled`` may repeat while a request waits for it.
#: ``withdrawn`` is the last but ``engine_ended``: the request was a sound, and no turn.
Step: TypeAlias = Literal[
    "opened", "policy_fired", "input_ended", "engine_started", "cancelled", "engine_ended", "withdrawn"
]


class PolicyStart(NamedTuple):
    """When the start policy fired, and by what trigger. ``sequence_id`` is None for an end of input without a chunk."""

    at: float
    trigger: StartTrigger
    sequence_id: int | None
    #: How many chunks the engine gets immediately.
    chunks: int


class CancelCause(StrEnum):
    """The cause of a cancellation: a cancel of the client, or an interruption by detected speech or a later request."""

    CANCEL = "cancel"
    SPEECH = "speech"
    REQUEST = "request"


class Cancellation(NamedTuple):
    """When and why a request was cancelled. ``by`` is the id of the request that interrupted it; None if none did."""

    at: float
    cause: CancelCause
    by: str | None


class EngineEnd(NamedTuple):
    """How the engine's work ended: ``status`` is ``ok``, ``cancelled`` or the code of an error."""

    at: float
    status: str


class PlayerStatistics(NamedTuple):
    """How well playback kept up, if the client reports it: underruns, their seconds, and the least lead in ms."""

    underruns: int
    underrun_sec: float
    least_lead_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a request. ``error`` is the reason why the answer is not whole; None without an error.

    ``elsewhere``: the request ends only here. It goes on where its session is taken from the store, and counts there.
    ``new_audio_ms`` is the duration of its input audio without what counts elsewhere.
    """

    at: float
    final: FinalChunk
    error: OmniError | None
    received_chunks: int
    received_bytes: int
    player: PlayerStatistics
    elsewhere: bool
    new_audio_ms: int


@dataclass(frozen=True, slots=True)
class RequestReached:
    """A request has reached ``step``.

    A request that is refused as it opens reaches no step after ``opened``; a greeting, none after ``input_ended``.
    """

    timeline: RequestTimeline
    step: Step


@dataclass(frozen=True, slots=True)
class OutputBegan:
    """The first output of its modality goes into the outbox."""

    timeline: RequestTimeline
    modality: OutputModality


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request has its outcome; its final goes into the outbox next. ``content`` has the texts of both sides."""

    timeline: RequestTimeline
    outcome: Outcome
    content: LedgerEntry


@dataclass(frozen=True, slots=True)
class AnswerPlayed:
    """The first audio of the answer was played; see ``TurnTimes.first_audio_played``.

    Its final may have been sent already.
    """

    timeline: RequestTimeline


#: Observations of a request from its opening to its end, which every observer gets.
RequestProgress: TypeAlias = RequestReached | OutputBegan | RequestEnded | AnswerPlayed

#: How many answers of a session, which were sent and of which nothing was played, are remembered.
MAX_UNPLAYED: Final = 4

#: Stands for no requests; never changed.
_NONE: Final[dict[str, RequestTimeline]] = {}


class SessionTimeline:
    """The time at which a session opened, its requests so far, and how much input it has received."""

    __slots__ = ("_input", "before", "leaves", "opened", "request_count", "unfinished", "unplayed")

    def __init__(self, opened: float) -> None:
        self.opened: Final = opened
        self._input: InputStream | None = None
        #: How much input the session had accepted when it was restored here.
        self.before = NO_INPUT
        #: See ``goes_elsewhere``.
        self.leaves = False
        #: Requests of whose answers sound was sent, and none was played yet; the oldest first. None: none so far.
        self.unplayed: dict[str, RequestTimeline] | None = None
        #: Requests that were opened, refused ones included.
        self.request_count = 0
        #: Requests without a final, or on which the engine still works; in the order of their opening.
        self.unfinished: dict[str, RequestTimeline] = _NONE  # an idle session has no dict of its own

    def receives(self, stream: InputStream) -> None:
        """Note the stream that receives the input of the session."""
        self._input = stream

    def goes_on(self) -> None:
        """Note that the session was restored: another server has counted its input so far."""
        self.before = self.received

    @property
    def received(self) -> InputAccepted:
        """How much input has been accepted so far."""
        stream = self._input
        if stream is None:
            return NO_INPUT
        reorder = stream.reorder
        return InputAccepted(reorder.next_sequence_id, stream.received_bytes, stream.duplicates, reorder.statistics)

    def goes_elsewhere(self) -> None:
        """Note that the session leaves this process for the store, or has left it, and its open requests with it."""
        self.leaves = True

    def add(self, request: RequestTimeline) -> None:
        """Add a request that was opened."""
        self.request_count += 1
        if self.unfinished is _NONE:
            self.unfinished = {}
        self.unfinished[request.request_id] = request

    def withdraw(self) -> None:
        """Note that a request was withdrawn: it does not count among the requests."""
        self.request_count -= 1

    def speaks(self, request: RequestTimeline) -> None:
        """Note that the first audio of an answer was sent. Beyond MAX_UNPLAYED answers, the oldest is forgotten."""
        self.unplayed = self.unplayed or {}
        self.unplayed[request.request_id] = request
        if len(self.unplayed) > MAX_UNPLAYED:
            del self.unplayed[next(iter(self.unplayed))]

    def played(self, request_id: str, when: float) -> None:
        """Note that the answer to a request began to play at ``when``.

        Only the first call for each request counts, and only while the request is in ``unplayed``.
        """
        if self.unplayed and (request := self.unplayed.pop(request_id, None)) is not None:
            request.mark_played(when)


class RequestTimeline:
    """The times of one request's steps, from its opening to its end.

    Each ``mark_*`` method records a step, at the present time unless it takes another. All but ``mark_admitted`` and
    ``mark_turn_decided`` also report it to the observers. A time is None until its step is reached; a step is marked at
    most once, except cancellations.
    """

    __slots__ = (
        "_counted_audio_ms",
        "_report",
        "_session",
        "_wall_ns",
        "admitted",
        "by_speech",
        "cancellations",
        "engine_end",
        "first_outputs",
        "heard_later",
        "input_mode",
        "now",
        "opened",
        "outcome",
        "policy",
        "request_id",
        "task",
        "times",
        "withdrawn",
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
        """Use ``ObservedSession.open_request`` instead, which also reports the new timeline.

        ``by_speech``: speech opened it.
        """
        self.request_id: Final = request_id
        self.task: Final = task
        self.input_mode: Final = input_mode
        self.by_speech: Final = by_speech
        self.now: Final = now
        self.opened: Final = now()
        self._wall_ns = time.time_ns()
        self._session = session
        self._report = report
        #: Whether ``mark_admitted`` was called.
        self.admitted = False
        self.policy: PolicyStart | None = None
        #: The moments of the answer, which its engine marks as well.
        self.times: Final = TurnTimes()
        #: When the first output of each modality went out, in that order.
        self.first_outputs: dict[OutputModality, float] = {}
        #: More than one only if the request was cancelled again while it waited for its final.
        self.cancellations: list[Cancellation] = []
        #: How the work of the engine ended.
        self.engine_end: EngineEnd | None = None
        self.outcome: Outcome | None = None
        #: Whether it was taken back, and gets no outcome.
        self.withdrawn = False
        #: See ``note_heard_later``.
        self.heard_later = False
        #: See ``note_counted``.
        self._counted_audio_ms = 0
        session.add(self)

    # reading

    @property
    def first_answer_modality(self) -> OutputModality | None:
        """The modality that the answer began with; None while it has not begun.

        Thoughts do not count, and a transcript of the input counts only with the task ``transcribe``.
        """
        return next((modality for modality in self.first_outputs if self._answers(modality)), None)

    def first_output_sec(self, modality: OutputModality | None) -> float | None:
        """Return the seconds from the end of the input to the first output of ``modality``; None without one.

        0 if the output came before the end of the input.
        """
        if modality is None or (began := self.first_outputs.get(modality)) is None:
            return None
        ended = self.times.input_ended
        return 0.0 if ended is None else max(0.0, began - ended)

    @property
    def stage(self) -> Stage | None:
        """The stage under way; None once the last stage has ended."""
        if self.times.engine_started is not None:
            return "engine" if self.engine_end is None else None
        if (self.outcome is not None and not self.heard_later) or self.withdrawn:
            return None
        return "input" if self.policy is None else "queue"

    def stages(self, now: float) -> list[TimedPart]:
        """Return the stages so far; the stage under way ends at ``now``."""
        ends = now if self.outcome is None else self.outcome.at
        if self.policy is None:
            return [TimedPart("input", self.opened, ends)]
        passed, started = [TimedPart("input", self.opened, self.policy.at)], self.times.engine_started
        if started is None:
            return [*passed, TimedPart("queue", self.policy.at, ends)]
        # A cut turn, which is only transcribed, may have its final before the engine gets it.
        passed.append(TimedPart("queue", self.policy.at, min(ends, started)))
        return [*passed, TimedPart("engine", started, self.engine_end.at if self.engine_end else now)]

    @property
    def is_over(self) -> bool:
        """Whether the request has its final, or was withdrawn, and no engine works on it any more."""
        return (self.outcome is not None or self.withdrawn) and self.stage is None

    def wall_ns(self, when: float) -> int:
        """Return a time of this timeline in nanoseconds since 1970."""
        return self._wall_ns + round((when - self.opened) * 1e9)

    def _answers(self, modality: OutputModality) -> bool:
        if modality is OutputModality.THOUGHT:
            return False
        return modality is not OutputModality.TRANSCRIPT or self.task is Task.TRANSCRIBE

    # recording

    def mark_admitted(self) -> None:
        """Record that the request was admitted as it opened, so that its end releases what was reserved for it.

        What the server says unasked reserves nothing, and neither does a request that another server has admitted.
        """
        self.admitted = True

    def note_counted(self, audio_ms: int) -> None:
        """Note that so much input audio counts elsewhere, where the session was before, or goes on."""
        self._counted_audio_ms = audio_ms

    def mark_policy_fired(self, event: GenerationStarted) -> None:
        """Record that the start policy has fired: from now on the request waits for the engine."""
        now = self.now()
        self.policy = PolicyStart(now, event.trigger, event.sequence_id, len(event.chunks))
        self._reached("policy_fired")

    def mark_input_ended(self) -> None:
        """Record that all input has arrived."""
        self.times.input_ended = self.now()
        self._reached("input_ended")

    def note_heard_later(self) -> None:
        """Note that the engine will get the request, to transcribe its speech alone; its final may come before that."""
        self.heard_later = True

    def mark_engine_started(self) -> None:
        """Record that the engine gets the request."""
        self.times.engine_started = self.now()
        self._reached("engine_started")

    def mark_output_began(self, modality: OutputModality) -> None:
        """Record that the first output of this modality goes into the outbox."""
        now = self.first_outputs[modality] = self.now()
        if modality is OutputModality.AUDIO:
            self.times.first_audio_sent = now
            self._session.speaks(self)
        self._report(OutputBegan(self, modality))

    def note_words(self, words: TranscriptOutput | TranscriptGuess) -> None:
        """Note the time of a settled transcript, or of a guess of it at a pause; ignore interim transcripts."""
        if isinstance(words, TranscriptGuess):
            self.times.guess(words.text, self.now())
        elif not words.interim:
            self.times.settle(words.text, self.now())

    def note_all_sent(self) -> None:
        """Note that the engine's call has ended, and all of the answer is in the outbox."""
        self.times.all_sent(self.now())

    def mark_turn_decided(self, speech_ended: float, *, audio_ms: int) -> None:
        """Record that turn detection has ended the turn, ``audio_ms`` of audio after the end of its speech."""
        self.times.decide_turn(speech_ended, self.now(), audio_ms)

    def mark_played(self, when: float) -> None:
        """Record that the first audio of the answer was played at ``when``, or when it was sent if that was later."""
        self.times.play(when)
        self._report(AnswerPlayed(self))

    def mark_cancelled(self, by: RequestTimeline | None) -> None:
        """Record a cancellation. ``by`` is the request that interrupts this one; None if the client cancels it."""
        if by is None:
            cancellation = Cancellation(self.now(), CancelCause.CANCEL, None)
        else:
            cause = CancelCause.SPEECH if by.by_speech else CancelCause.REQUEST
            cancellation = Cancellation(self.now(), cause, by.request_id)
        self.cancellations.append(cancellation)
        self.times.interrupted = self.cancellations[0].at
        self._reached("cancelled")

    def mark_engine_ended(self, *, whole: bool, error: OmniError | None) -> None:
        """Record that the engine's call for the request has ended.

        ``whole``: the engine ended the answer itself. ``error``: the engine failed. Without either, it was cancelled.
        """
        status = "ok" if whole else "cancelled" if error is None else error.code
        self.engine_end = EngineEnd(self.now(), status)
        self._forget_if_over()
        self._reached("engine_ended")

    def mark_ended(
        self,
        final: FinalChunk,
        error: OmniError | None,
        *,
        received_chunks: int,
        received_bytes: int,
        player: PlayerStatistics,
        content: LedgerEntry,
    ) -> None:
        """Record the final of the request, which goes into the outbox next.

        ``error`` and the statistics enter the Outcome; ``content`` has the texts of both sides.
        """
        self.outcome = Outcome(
            at=self.now(),
            final=final,
            error=error,
            received_chunks=received_chunks,
            received_bytes=received_bytes,
            player=player,
            elsewhere=self._session.leaves,
            new_audio_ms=max(0, final.usage.input_audio_ms - self._counted_audio_ms),
        )
        self._forget_if_over()
        self._report(RequestEnded(self, self.outcome, content))

    def mark_withdrawn(self) -> None:
        """Record that the request was withdrawn: its onset was no turn."""
        self.withdrawn = True
        self._session.withdraw()
        self._forget_if_over()
        self._reached("withdrawn")

    def _reached(self, step: Step) -> None:
        self._report(RequestReached(self, step))

    def _forget_if_over(self) -> None:
        if self.is_over:  # an engine may wind up a cancelled answer yet
            self._session.unfinished.pop(self.request_id, None)


# What observers get.


class Origin(StrEnum):
    """The front end of a session, as a label in metrics and logs. Other front ends define labels of their own."""

    WEBSOCKET = "websocket"
    HTTP = "http"
    #: Mode B: several HTTP requests to one session.
    SESSIONS = "sessions"


@dataclass(frozen=True, slots=True)
class SessionIdentity:
    """The session that an observation is about. ``owner`` is the name of the API key that opened the session."""

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
    """A session has ended. An engine may still be working on one of its requests."""

    timeline: SessionTimeline


class InputReceived(Struct, frozen=True):
    """A chunk as it arrived, before it was put in order. Only for observers of every chunk."""

    chunk: InputChunk


class InputAccepted(Struct, frozen=True):
    """How much input of the session has been accepted in order so far, with duplicates and reordering.

    Everything below ``next_sequence_id`` has arrived; ``duplicates`` is the number of chunks dropped as duplicates.
    Reported with each acknowledgement, but only to observers of every output; the others read
    ``SessionTimeline.received``.
    """

    next_sequence_id: int
    received_bytes: int
    duplicates: int
    reordering: ReorderStatistics


NO_INPUT: Final = InputAccepted(0, 0, 0, NONE_REORDERED)


class OutputMade(Struct, frozen=True):
    """An output goes into the outbox. Only for observers of every output."""

    chunk: OutputChunk


class OutputWritten(Struct, frozen=True):
    """An output was handed to the socket. Only for observers of every output."""

    chunk: AnyOutput


@dataclass(frozen=True, slots=True)
class OutputStalled:
    """The outbox was full for ``seconds``, and has room again. ``request_id`` is the request being answered."""

    request_id: str | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SpeechHeard:
    """Turn detection has found the beginning or the end of speech, or has decided an uncertain onset."""

    event: SpeechStartedFrame | SpeechConfirmedFrame | SpeechDismissedFrame | SpeechStoppedFrame


Observation: TypeAlias = (
    SessionOpened
    | SessionEnded
    | InputReceived
    | InputAccepted
    | RequestProgress
    | OutputMade
    | OutputWritten
    | OutputStalled
    | SpeechHeard
)


# Observers.


class Observer(Protocol):
    """A receiver of observations; ``Observers`` reports to it."""

    def observe(self, session: SessionIdentity, observation: Observation) -> None:
        """Receive an observation, without blocking: this runs on the event loop, inside the step that is reported.

        The sessions and requests may have begun before this observer was added.
        """


class Observers:
    """The observers of one server, which may change while it runs.

    Check ``listening`` before making an observation; for those of every chunk or output, check ``listening_to_chunks``
    or ``listening_to_outputs``. Making an observation for nobody costs more than the check.
    """

    def __init__(self) -> None:
        self.listening = False
        self.listening_to_chunks = False
        self.listening_to_outputs = False
        #: The observations that each observer did not ask for.
        self._unwanted: dict[Observer, frozenset[type[Observation]]] = {}
        #: The items of ``_unwanted`` as a tuple, so that an observer can be removed while all are notified.
        self._registered: tuple[tuple[Observer, frozenset[type[Observation]]], ...] = ()

    def add(self, observer: Observer, *, every_chunk: bool = False, every_output: bool = True) -> None:
        """Report to ``observer`` from now on.

        ``every_chunk``: also report each chunk. ``every_output``: also report each output and acknowledgement.
        """
        unwanted: set[type[Observation]] = set() if every_chunk else {InputReceived}
        if not every_output:
            unwanted |= {OutputMade, OutputWritten, InputAccepted}
        self._unwanted[observer] = frozenset(unwanted)
        self._update()

    def remove(self, observer: Observer) -> None:
        """Stop reporting to ``observer``. Idempotent."""
        self._unwanted.pop(observer, None)
        self._update()

    def notify(self, session: SessionIdentity, observation: Observation) -> None:
        """Pass an observation to all observers. Never raises."""
        for observer, unwanted in self._registered:
            if type(observation) in unwanted:
                continue
            try:
                observer.observe(session, observation)
            except Exception:
                # An observer that failed once would fail, and fill the log, with every observation.
                log.exception("%s failed and was removed", type(observer).__name__)
                self.remove(observer)

    def _update(self) -> None:
        self._registered = tuple(self._unwanted.items())
        self.listening = bool(self._unwanted)
        self.listening_to_chunks = any(InputReceived not in unwanted for unwanted in self._unwanted.values())
        self.listening_to_outputs = any(OutputMade not in unwanted for unwanted in self._unwanted.values())


class ObservedSession:
    """Reports the observations of one session to the observers, and opens the timelines of its requests."""

    def __init__(self, identity: SessionIdentity, observers: Observers, *, now: Callable[[], float]) -> None:
        self.identity = identity
        self.observers = observers
        self.timeline = SessionTimeline(now())
        self._now = now

    def notify(self, observation: Observation) -> None:
        """Report an observation of this session to the observers, if there are any."""
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
        self.notify(RequestReached(timeline, "opened"))
        return timeline

    @classmethod
    def unobserved(cls, now: Callable[[], float]) -> ObservedSession:
        """Return an ObservedSession without observers."""
        return cls(SessionIdentity("", Origin.HTTP), Observers(), now=now)
