"""RequestInput: the input of one request, from its first chunk to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from msgspec import Struct

from omni_ws.core.chunks import DEFAULT_INPUT_AUDIO, AudioFormat, InputChunk, InputMode, StartTrigger
from omni_ws.core.start_policy import ALIGNMENT_WINDOW_MS, Alignment, InputSummary, StartPolicy, by_timestamp
from omni_ws.errors import EmptyInput, SessionConflict

#: Chunks whose own name for the request is remembered where it is not the one that counts.
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
    alignment: Alignment = Alignment.ARRIVAL
    #: Under ``Alignment.TIMESTAMP``, see TimestampOrder; 0 for the order of arrival after the start.
    alignment_window_ms: float = ALIGNMENT_WINDOW_MS
    #: Whether input of nothing but results of tools starts at its end, whatever the policy.
    results_wait: bool = False


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """The work on the request starts, with the input buffered so far.

    ``sequence_id`` is the number of the chunk that triggered the start; None for a bare end of input and unnumbered
    input.
    """

    trigger: StartTrigger
    sequence_id: int | None
    chunks: tuple[InputChunk, ...]


class InputAppended(Struct, frozen=True):
    """A chunk extends the input of a request that has started."""

    chunk: InputChunk


@dataclass(frozen=True, slots=True)
class InputEnded:
    """The input is complete. ``error`` is set when it was empty, so that the request never starts."""

    error: EmptyInput | None = None


InputEvent: TypeAlias = GenerationStarted | InputAppended | InputEnded


class SavedRequestInput(Struct, kw_only=True):
    """A RequestInput in a form that can be written to bytes."""

    state: InputState
    bytes_after_start: int
    ref: str | None
    other_refs: list[tuple[int | None, str]]
    received: InputSummary
    #: The chunks before the start.
    buffered: tuple[InputChunk, ...]


class RequestInput:
    """The state machine of one request's input.

    It takes chunks in order and returns events: GenerationStarted once, InputAppended for each later chunk, InputEnded
    at the end. The transitions are those of ``InputState``.

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
        #: Bytes of this request that the engine has not consumed, as the InputStream that it belongs to counts them.
        self.held_bytes = 0
        #: The names that later chunks carried, by their numbers, where they are others.
        self._other_refs: dict[int | None, str] = {}
        #: The input before the start, in the order of its sequence.
        self._buffered: list[InputChunk] = []
        self._bytes_per_ms = settings.audio.bytes_per_second / 1000
        #: Totals of the input received so far; the duration of compressed audio is nominal.
        self.received = InputSummary()

    @property
    def only_results(self) -> bool:
        """Whether it answers tool calls, and has nothing else so far."""
        received = self.received
        return received.tool_results > 0 and received.tool_results == received.chunks and self.settings.results_wait

    def receive_chunk(self, chunk: InputChunk) -> list[InputEvent]:
        """Take the next chunk in order. Raises SessionConflict when the input has ended."""
        if not self.input_open:
            raise SessionConflict("the input of this request has ended", sequence_id=chunk.sequence_id)
        if self.keeps_input:
            self.held_bytes += len(chunk.payload)
        events: list[InputEvent] = []
        if chunk.payload or chunk.has_content:
            self.received.add(chunk, self._bytes_per_ms)
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

    def release(self, size: int) -> int:
        """Count ``size`` bytes less, as far as there are any. Returns how many."""
        released = min(size, self.held_bytes)
        self.held_bytes -= released
        return released

    def name(self, chunk: InputChunk) -> None:
        """Take the name that a chunk carries for the request: the first counts."""
        assert chunk.ref is not None
        if self.ref is None:
            self.ref = chunk.ref
        elif chunk.ref != self.ref and len(self._other_refs) < MAX_OTHER_REFS:
            self._other_refs[chunk.sequence_id] = chunk.ref

    def ref_of(self, sequence_id: int | None) -> str | None:
        """The name that an error about this chunk carries, or about the request where that is None."""
        return self._other_refs.get(sequence_id, self.ref)

    def finish(
        self, sequence_id: int | None = None, *, trigger: StartTrigger = StartTrigger.END_OF_INPUT
    ) -> list[InputEvent]:
        """End the input; idempotent.

        A request that has not started starts now, with ``trigger`` as its reason.
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
        """All of it but its settings."""
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
        """The input that was saved, which had these settings."""
        new = cls(settings)
        new.received, new._buffered = saved.received, list(saved.buffered)
        new.ref, new.bytes_after_start = saved.ref, saved.bytes_after_start
        new._other_refs = dict(saved.other_refs)
        new._enter(saved.state)
        return new

    def cancel(self) -> None:
        """End the input because the client cancelled the request.

        Like ``expire`` and ``fail``, it discards buffered input, returns no events and does nothing when the input has
        ended.
        """
        self._close(InputState.CANCELLED)

    def expire(self) -> None:
        """End the input because the client sent nothing for too long."""
        self._close(InputState.EXPIRED)

    def fail(self) -> None:
        """End the input because the request is over before its input is."""
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
