"""RequestInput: the input of one request, from its first chunk to its end.

A StartPolicy (``start_policy``) decides when work on the request starts. ``by_timestamp`` orders the chunks that
arrived before the start, TimestampOrder those that arrive after it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Final, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import DEFAULT_INPUT_AUDIO, AudioFormat, InputChunk, InputMode, Modality, StartTrigger
from omni_ws.core.start_policy import InputSummary, StartPolicy
from omni_ws.errors import EmptyInput, SessionConflict

#: Nearly all chunks are audio; a module global is faster to look up than an enum member.
_AUDIO: Final = Modality.AUDIO


# The order of the input, before the start and after it.

#: Milliseconds by which other modalities may lag behind a chunk after the start: the default and the maximum.
ALIGNMENT_WINDOW_MS: Final = 200
MAX_ALIGNMENT_WINDOW_MS: Final = 2000


class Alignment(StrEnum):
    """How chunks of different modalities are ordered: by sequence number or by ``timestamp_ms``."""

    ARRIVAL = "arrival"
    TIMESTAMP = "timestamp"


def by_timestamp(chunks: list[InputChunk]) -> tuple[InputChunk, ...]:
    """Return ``chunks`` sorted by ``timestamp_ms``.

    The sort is stable. A chunk without a timestamp counts as having the timestamp of the chunk before it, or 0.
    """
    latest = 0
    keyed: list[tuple[int, InputChunk]] = []
    for chunk in chunks:
        if chunk.timestamp_ms is not None:
            latest = chunk.timestamp_ms
        keyed.append((latest, chunk))
    return tuple(chunk for _, chunk in sorted(keyed, key=lambda pair: pair[0]))


@dataclass(order=True, slots=True)
class _Waiting:
    """A waiting chunk, ordered by its time and then by its arrival; ``chunk`` is None after it has passed."""

    timestamp_ms: int
    arrival: int
    due: float = field(compare=False)
    chunk: InputChunk | None = field(compare=False)

    def take(self) -> InputChunk:
        """Remove and return the chunk, which no longer waits."""
        chunk, self.chunk = self.chunk, None
        assert chunk is not None
        return chunk


class TimestampOrder:
    """Orders the chunks that arrive after the start of a request by ``timestamp_ms``.

    A chunk with timestamp T waits until each other modality of the request has a chunk of at least T - ``window_ms``,
    but at most for ``window_ms`` of real time. Waiting chunks pass in the order of their timestamps. A chunk without a
    timestamp passes immediately.

    ``before`` are the chunks before the start. ``now`` is the time of any monotonic clock, in seconds.
    """

    def __init__(self, window_ms: float, before: Iterable[InputChunk] = ()) -> None:
        #: The bytes of the waiting chunks.
        self.held_bytes = 0
        self._window_ms = window_ms
        #: The highest timestamp of each modality.
        self._reached: dict[Modality, float] = {}
        self._arrivals = 0
        #: The waiting chunks by time, the earliest on top, and by arrival; both may contain chunks that have passed.
        self._by_time: list[_Waiting] = []
        self._by_arrival: deque[_Waiting] = deque()
        for chunk in before:
            self._note(chunk)

    def __len__(self) -> int:
        """The number of chunks that wait."""
        return len(self._by_time)

    @property
    def waiting(self) -> list[InputChunk]:
        """The chunks that wait, in the order of their arrival."""
        return [one.chunk for one in self._by_arrival if one.chunk is not None]

    def put(self, chunk: InputChunk, *, now: float) -> list[InputChunk]:
        """Add the next chunk. Return the chunks that pass now, in order."""
        self._note(chunk)
        if chunk.timestamp_ms is None:
            return [chunk, *self._take_ready()]
        self._arrivals += 1
        waiting = _Waiting(chunk.timestamp_ms, self._arrivals, now + self._window_ms / 1000, chunk)
        heapq.heappush(self._by_time, waiting)
        self._by_arrival.append(waiting)
        self.held_bytes += len(chunk.payload)
        return self._take_ready()

    def get_timer(self) -> float | None:
        """Return the time at which the first waiting chunk is due to pass; None if no chunk waits."""
        while self._by_arrival and self._by_arrival[0].chunk is None:
            self._by_arrival.popleft()
        return self._by_arrival[0].due if self._by_arrival else None

    def handle_timer(self, *, now: float) -> list[InputChunk]:
        """Remove and return the chunks that are due by ``now``, and those with lower timestamps."""
        passed: list[InputChunk] = []
        while (due := self.get_timer()) is not None and now >= due:
            late = self._by_arrival[0]
            while late.chunk is not None:
                passed.append(self._take())
        return passed

    def take_all(self) -> list[InputChunk]:
        """Remove and return all waiting chunks: the input has ended."""
        return [self._take() for _ in range(len(self))]

    def _note(self, chunk: InputChunk) -> None:
        if not chunk.has_content:
            return
        time = -math.inf if chunk.timestamp_ms is None else chunk.timestamp_ms
        self._reached[chunk.modality] = max(time, self._reached.get(chunk.modality, -math.inf))

    def _take_ready(self) -> list[InputChunk]:
        passed: list[InputChunk] = []
        while self._by_time and self._is_ready(self._by_time[0]):
            passed.append(self._take())
        return passed

    def _is_ready(self, waiting: _Waiting) -> bool:
        assert waiting.chunk is not None
        own, least = waiting.chunk.modality, waiting.timestamp_ms - self._window_ms
        return all(reached >= least for modality, reached in self._reached.items() if modality is not own)

    def _take(self) -> InputChunk:
        chunk = heapq.heappop(self._by_time).take()
        self.held_bytes -= len(chunk.payload)
        return chunk


# The input of one request.

#: The most chunks of a request whose own ``ref``, differing from that of the request, is remembered.
MAX_OTHER_REFS: Final = 64


class InputState(Enum):
    """The states of a request's input.

    OPEN and STARTED take input, the others are final::

        OPEN ─────▶ STARTED ─────▶ FINISHED     the input is complete
         │             │
         └─────────────┴─────────▶ EXPIRED      the client fell silent
                                   CANCELLED    the client cancelled the request
                                   FAILED       the request ended before its input, or has no input

    OPEN buffers input until the start policy fires or the input ends; in STARTED the engine works on it.
    """

    OPEN = "open"
    STARTED = "started"
    FINISHED = "finished"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


#: Compared for every chunk; a module global is faster to look up than an enum member.
_OPEN: Final = InputState.OPEN

_TRANSITIONS: dict[InputState, frozenset[InputState]] = {
    InputState.OPEN: frozenset(set(InputState) - {InputState.OPEN, InputState.FINISHED}),
    InputState.STARTED: frozenset(set(InputState) - {InputState.OPEN, InputState.STARTED}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings:
    """How the input of a request is processed; fixed when the request opens."""

    start_policy: StartPolicy
    mode: InputMode
    audio: AudioFormat = DEFAULT_INPUT_AUDIO
    #: Reads the ``format`` of a chunk of audio; what it leaves open is that of ``audio``.
    parse_format: Callable[[str, AudioFormat], AudioFormat] = lambda text, audio: audio
    alignment: Alignment = Alignment.ARRIVAL
    #: For ``Alignment.TIMESTAMP``, see TimestampOrder; with 0, chunks after the start keep the order of arrival.
    alignment_window_ms: float = ALIGNMENT_WINDOW_MS
    #: Whether input that consists of tool results alone starts at its end, whatever the policy.
    results_wait: bool = False


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """The event that work on the request starts, with the input buffered so far.

    ``sequence_id`` is the number of the chunk that triggered the start; None for a bare end of input and for unnumbered
    input.
    """

    trigger: StartTrigger
    sequence_id: int | None
    chunks: tuple[InputChunk, ...]


class InputAppended(Struct, frozen=True):
    """The event that a chunk extends the input of a request that has started."""

    chunk: InputChunk


@dataclass(frozen=True, slots=True)
class InputEnded:
    """The event that the input is complete. ``error`` is set if the input was empty: the request never starts."""

    error: EmptyInput | None = None


InputEvent: TypeAlias = GenerationStarted | InputAppended | InputEnded


class SavedRequestInput(Struct, kw_only=True):
    """The state of a RequestInput, for serialisation."""

    state: InputState
    bytes_after_start: int
    ref: str | None
    other_refs: list[tuple[int | None, str]]
    received: InputSummary
    #: The chunks that arrived before the start.
    buffered: tuple[InputChunk, ...]


class RequestInput:
    """The state machine of one request's input.

    RequestInput takes chunks in order and returns events: GenerationStarted once, InputAppended for each later chunk,
    InputEnded at the end. The transitions are those of ``InputState``.

    Under ``InputMode.SNAPSHOT`` the input is fixed at the start: chunks after it are counted in ``bytes_after_start``
    and cause no event.
    """

    def __init__(self, settings: InputSettings, *, ref: str | None = None) -> None:
        self.settings = settings
        self.state = InputState.OPEN
        #: Whether the state is OPEN or STARTED.
        self.input_open = True
        #: Whether the next chunk will be kept for the engine, not just counted.
        self.keeps_input = True
        self.bytes_after_start = 0
        #: The client's name for the request: the first that one of its chunks carried.
        self.ref = ref
        #: The bytes of this request that the engine has not consumed, as counted by the InputStream that it belongs to.
        self.held_bytes = 0
        #: The names that later chunks carried, by chunk number, if they differ from ``ref``.
        self._other_refs: dict[int | None, str] = {}
        #: The input before the start, in the order of its numbers.
        self._buffered: list[InputChunk] = []
        self._bytes_per_ms = settings.audio.bytes_per_second / 1000
        #: The totals of the input received so far; the duration of compressed audio is nominal.
        self.received = InputSummary()

    @property
    def buffered(self) -> tuple[InputChunk, ...]:
        """The chunks that wait for the start; empty once the request has started."""
        return tuple(self._buffered)

    @property
    def only_results(self) -> bool:
        """Whether the input so far is tool results alone, and ``settings.results_wait`` is set."""
        received = self.received
        return received.tool_results > 0 and received.tool_results == received.chunks and self.settings.results_wait

    def receive_chunk(self, chunk: InputChunk) -> list[InputEvent]:
        """Add the next chunk in order; return the resulting events. Raises SessionConflict if the input has ended."""
        if not self.input_open:
            raise SessionConflict("the input of this request has ended", sequence_id=chunk.sequence_id)
        if self.keeps_input:
            self.held_bytes += len(chunk.payload)
        events: list[InputEvent] = []
        if chunk.payload or chunk.has_content:
            self.received.add(chunk, self._bytes_per_ms if chunk.format is None else self._rate_of(chunk))
            if self.state is _OPEN:
                self._buffered.append(chunk)
                policy = self.settings.start_policy
                if policy.should_start(self.received) and not self.only_results:
                    events.append(self._start(policy.trigger, chunk.sequence_id))
            else:
                self.bytes_after_start += len(chunk.payload)
                if self.keeps_input:
                    events.append(InputAppended(chunk))
        if chunk.end_of_input:
            events += self.finish(chunk.sequence_id)
        return events

    def _rate_of(self, chunk: InputChunk) -> float:
        """Return the bytes in a millisecond of a chunk that names its own format."""
        audio = self.settings.audio
        if chunk.modality is _AUDIO and chunk.format is not None:
            audio = self.settings.parse_format(chunk.format, audio)
        return audio.bytes_per_second / 1000

    def hold(self, size: int) -> None:
        """Add ``size`` to the held bytes, for input that was restored."""
        self.held_bytes += size

    def release(self, size: int) -> int:
        """Subtract ``size`` from the held bytes, but not below 0. Return by how much they decreased."""
        released = min(size, self.held_bytes)
        self.held_bytes -= released
        return released

    def name(self, chunk: InputChunk) -> None:
        """Record the name that a chunk gives the request.

        The first name becomes that of the request; a later one is kept for errors about its chunk (``ref_of``).
        """
        assert chunk.ref is not None
        if self.ref is None:
            self.ref = chunk.ref
        elif chunk.ref != self.ref and len(self._other_refs) < MAX_OTHER_REFS:
            self._other_refs[chunk.sequence_id] = chunk.ref

    def ref_of(self, sequence_id: int | None) -> str | None:
        """Return the client's name to put into an error about the chunk ``sequence_id`` (None: the whole request)."""
        return self._other_refs.get(sequence_id, self.ref)

    def finish(
        self, sequence_id: int | None = None, *, trigger: StartTrigger = StartTrigger.END_OF_INPUT
    ) -> list[InputEvent]:
        """End the input, and return the events. Idempotent.

        A request that has not started starts now, with ``trigger`` as its reason. If there is no input, it fails
        instead: its InputEnded has an error.
        """
        if not self.input_open:
            return []
        events: list[InputEvent] = []
        if self.state is InputState.OPEN:
            if not self.received.chunks:
                self._set_state(InputState.FAILED)
                return [InputEnded(EmptyInput("the request has no input"))]
            events.append(self._start(trigger, sequence_id))
        self._set_state(InputState.FINISHED)
        events.append(InputEnded())
        return events

    def saved(self) -> SavedRequestInput:
        """Return the state without the settings."""
        return SavedRequestInput(
            state=self.state,
            bytes_after_start=self.bytes_after_start,
            ref=self.ref,
            other_refs=list(self._other_refs.items()),
            received=self.received,
            buffered=tuple(self._buffered),
        )

    @classmethod
    def restored(cls, settings: InputSettings, saved: SavedRequestInput) -> RequestInput:
        """Return the input whose state was saved, with the settings that it had. No bytes are held; see ``hold``."""
        new = cls(settings)
        new._restore(saved)
        return new

    def _restore(self, saved: SavedRequestInput) -> None:
        self.received, self._buffered = saved.received, list(saved.buffered)
        self.ref, self.bytes_after_start = saved.ref, saved.bytes_after_start
        self._other_refs = dict(saved.other_refs)
        self._enter(saved.state)

    def cancel(self) -> None:
        """End the input because the client cancelled the request.

        Like ``expire`` and ``fail``, it discards buffered input, returns no events and does nothing if the input has
        ended.
        """
        self._close(InputState.CANCELLED)

    def expire(self) -> None:
        """End the input because the client sent nothing for too long."""
        self._close(InputState.EXPIRED)

    def fail(self) -> None:
        """End the input because the request ended before its input did."""
        self._close(InputState.FAILED)

    def _start(self, trigger: StartTrigger, sequence_id: int | None) -> GenerationStarted:
        self._set_state(InputState.STARTED)
        chunks, self._buffered = self._buffered, []
        by_time = self.settings.alignment is Alignment.TIMESTAMP
        return GenerationStarted(trigger, sequence_id, by_timestamp(chunks) if by_time else tuple(chunks))

    def _close(self, state: InputState) -> None:
        if self.input_open:
            self._buffered.clear()
            self._set_state(state)

    def _set_state(self, state: InputState) -> None:
        if state not in _TRANSITIONS.get(self.state, frozenset()):
            raise RuntimeError(f"illegal transition from {self.state.name} to {state.name}")
        self._enter(state)

    def _enter(self, state: InputState) -> None:
        self.state = state
        self.input_open = state in _TRANSITIONS
        self.keeps_input = self.input_open and self.settings.mode is InputMode.EXTEND
