"""AnswerWatch: the events of one turn, and when each came. Times are arguments, in seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from omni_ws.client import AudioChunk, ErrorEvent, Event, ResponseStarted, SpeechStarted, TextChunk
from omni_ws.client import Final as LastEvent
from omni_ws.core.chunks import FinishReason

_BYTES_PER_SAMPLE: Final = 2


@dataclass(slots=True)
class SimulatedPlayer:
    """A loudspeaker that starts with the first audio, and is silent wherever the next has not come yet."""

    #: The silences, each where audio came too late.
    gaps: list[float] = field(default_factory=list)
    audio_sec: float = 0.0
    #: When what has come will have been played; None before the first.
    plays_until: float | None = None

    def add(self, chunk: AudioChunk, now: float) -> None:
        length = len(chunk.audio) / (_BYTES_PER_SAMPLE * chunk.sample_rate)
        until = now if self.plays_until is None else self.plays_until
        if now > until:
            self.gaps.append(now - until)
        self.plays_until = max(now, until) + length
        self.audio_sec += length


@dataclass(slots=True)
class HeardAnswer:
    """An answer as far as it has come."""

    first_text: float | None = None
    first_audio: float | None = None
    final: float | None = None
    characters: int = 0
    #: None where the server did not tell.
    output_tokens: int | None = None
    player: SimulatedPlayer = field(default_factory=SimulatedPlayer)


class AnswerWatch:
    """Follows one turn up to the end of its answer.

    With an ``open_microphone`` the server decides what a turn is. A recording with pauses may be several: what is
    answered, or cut off, before its end is counted in ``partial_answers``, and the turn goes on.
    """

    def __init__(self, *, open_microphone: bool) -> None:
        self.answer = HeardAnswer()
        self.partial_answers = 0
        #: When the input ended or, with an open microphone, the speech; None before.
        self.asked_at: float | None = None
        #: The code of the first error of the turn, and when to try again.
        self.error_code: str | None = None
        self.retry_after_ms: int | None = None
        self.is_over = False
        self._open_microphone = open_microphone
        #: Requests of this turn, and those of them that belong to speech before the latest.
        self._requests: set[str] = set()
        self._earlier: set[str] = set()

    def input_ended(self, now: float) -> None:
        self.asked_at = now

    def take(self, event: Event, now: float) -> None:
        """Record an event that came at ``now``; later ones than the end of the turn are ignored."""
        if self.is_over:
            return
        match event:
            case ErrorEvent():
                self._fail(event.error.code)
                self.retry_after_ms = event.error.retry_after_ms
                self.is_over = event.blocks_request
            case SpeechStarted(request_id=request_id) if self._open_microphone:
                self._earlier |= self._requests
                if request_id is not None:
                    self._requests.add(request_id)
                self.answer = HeardAnswer()
            case ResponseStarted(request_id=request_id):
                self._requests.add(request_id)
            case LastEvent():
                self._finished(event, now)
            case TextChunk(request_id=request_id, text=text) if request_id not in self._earlier:
                self._requests.add(request_id)
                self.answer.characters += len(text)
                if self.answer.first_text is None:
                    self.answer.first_text = now
            case AudioChunk(request_id=request_id) if request_id not in self._earlier:
                self._requests.add(request_id)
                if self.answer.first_audio is None:
                    self.answer.first_audio = now
                self.answer.player.add(event, now)

    def _fail(self, code: str) -> None:
        if self.error_code is None:
            self.error_code = code

    def _finished(self, event: LastEvent, now: float) -> None:
        if event.finish_reason is FinishReason.ERROR:
            self._fail("engine_failed")
        elif self._open_microphone and (event.request_id in self._earlier or self.asked_at is None):
            self.partial_answers += 1
            self.answer = HeardAnswer() if event.request_id not in self._earlier else self.answer
            self._requests.discard(event.request_id)
            self._earlier.discard(event.request_id)
            return
        elif event.finish_reason is FinishReason.CANCELLED:
            self._fail("cancelled")
        self.answer.final = now
        self.answer.output_tokens = event.usage.output_tokens if event.usage is not None else None
        self.is_over = True
