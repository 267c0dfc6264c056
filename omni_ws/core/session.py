"""StreamingInputSession: the input of one logical request, from its first chunk to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, TypeAlias

from omni_ws.core.accumulator import Alignment, InputAccumulator
from omni_ws.core.audio_format import DEFAULT_INPUT_AUDIO, AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, StartTrigger
from omni_ws.core.start_policy import StartPolicy
from omni_ws.errors import EmptyInput, SessionConflict


class SessionState(Enum):
    """OPEN and STARTED take input; the others are final."""

    OPEN = "open"
    STARTED = "started"
    FINISHED = "finished"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    FAILED = "failed"


#: Looked at for each chunk: a name of the module is found faster than a member of an enum.
_OPEN: Final = SessionState.OPEN

_TRANSITIONS: dict[SessionState, frozenset[SessionState]] = {
    SessionState.OPEN: frozenset(set(SessionState) - {SessionState.OPEN, SessionState.FINISHED}),
    SessionState.STARTED: frozenset(set(SessionState) - {SessionState.OPEN, SessionState.STARTED}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSettings:
    """How the input of a request is taken; fixed when the request opens."""

    start_policy: StartPolicy
    mode: InputMode
    audio: AudioFormat = DEFAULT_INPUT_AUDIO
    alignment: Alignment = Alignment.ARRIVAL


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """Work on the request starts with ``chunks``; ``sequence_id`` is the chunk that fired, None for a bare end."""

    trigger: StartTrigger
    sequence_id: int | None
    chunks: tuple[InputChunk, ...]


@dataclass(frozen=True, slots=True)
class InputAppended:
    """A chunk joins the request that is being worked on."""

    chunk: InputChunk


@dataclass(frozen=True, slots=True)
class InputEnded:
    """No more input for this request. ``error`` is set when there was nothing to work on."""

    error: EmptyInput | None = None


SessionEvent: TypeAlias = GenerationStarted | InputAppended | InputEnded


class StreamingInputSession:
    """Takes chunks in order; says when work starts, what joins it, and when the input is complete.

    Under InputMode.SNAPSHOT the prompt is frozen at the start: later chunks are counted in ``bytes_after_start``
    and go nowhere.
    """

    def __init__(self, settings: InputSettings) -> None:
        self.settings = settings
        self.state = SessionState.OPEN
        #: Whether the state takes input.
        self.input_open = True
        #: Whether a chunk that comes now will be held for the engine, rather than only counted.
        self.keeps_input = True
        self.bytes_after_start = 0
        #: Bytes of this request that no engine has taken over; kept by the InputStream that it belongs to.
        self.held_bytes = 0
        self._accumulator = InputAccumulator(audio=settings.audio, alignment=settings.alignment)
        #: What has been received; the lengths of compressed audio in it are nominal.
        self.received = self._accumulator.summary

    def receive_chunk(self, chunk: InputChunk) -> list[SessionEvent]:
        """The next chunk in order. Raises SessionConflict after the end."""
        if not self.input_open:
            raise SessionConflict("the input of this request has ended", sequence_id=chunk.sequence_id)
        events: list[SessionEvent] = []
        has_content = chunk.payload or chunk.has_content
        if self.state is _OPEN:
            if has_content:
                self._accumulator.append(chunk)
                policy = self.settings.start_policy
                if policy.should_start(self.received):
                    events.append(self._start(policy.trigger, chunk.sequence_id))
        else:
            self.bytes_after_start += len(chunk.payload)
            self._accumulator.append(chunk, keep=False)
            if has_content and self.keeps_input:
                events.append(InputAppended(chunk))
        if chunk.end_of_input:
            events += self.finish(chunk.sequence_id)
        return events

    def finish(
        self, sequence_id: int | None = None, *, trigger: StartTrigger = StartTrigger.END_OF_INPUT
    ) -> list[SessionEvent]:
        """The end of input, which ``trigger`` names where it starts the work. Idempotent."""
        if not self.input_open:
            return []
        events: list[SessionEvent] = []
        if self.state is SessionState.OPEN:
            if not self.received.chunks:
                self._set_state(SessionState.FAILED)
                return [InputEnded(EmptyInput("the request has no input"))]
            events.append(self._start(trigger, sequence_id))
        self._set_state(SessionState.FINISHED)
        events.append(InputEnded())
        return events

    def cancel(self) -> None:
        self._close(SessionState.CANCELLED)

    def expire(self) -> None:
        self._close(SessionState.EXPIRED)

    def fail(self) -> None:
        self._close(SessionState.FAILED)

    def _start(self, trigger: StartTrigger, sequence_id: int | None) -> GenerationStarted:
        self._set_state(SessionState.STARTED)
        return GenerationStarted(trigger, sequence_id, self._accumulator.take())

    def _close(self, state: SessionState) -> None:
        if self.input_open:
            self._accumulator.take()
            self._set_state(state)

    def _set_state(self, state: SessionState) -> None:
        if state not in _TRANSITIONS.get(self.state, frozenset()):
            raise RuntimeError(f"illegal transition from {self.state.name} to {state.name}")
        self.state = state
        self.input_open = state in _TRANSITIONS
        self.keeps_input = self.input_open and self.settings.mode is InputMode.EXTEND
