"""What a conversation does with the events of the server: it shows, plays and keeps them."""

from __future__ import annotations

import time

from omni_ws.client import (
    AudioChunk,
    ErrorEvent,
    Event,
    Reconnected,
    Reconnecting,
    ResponseStarted,
    Resumed,
    SpeechConfirmed,
    SpeechDismissed,
    SpeechStarted,
    SpeechStopped,
    TextChunk,
    TranscriptChunk,
    TranscriptView,
)
from omni_ws.client import Final as LastEvent
from omni_ws.core.chunks import FinishReason
from omni_ws.errors import OmniError
from omni_ws.talk.display import JsonDisplay
from omni_ws.talk.sound_devices import LoudspeakerDevice


class AnswerListener:
    """Shows, plays and keeps what the server sends."""

    def __init__(
        self, display: JsonDisplay, loudspeaker: LoudspeakerDevice | None, *, interruptible: bool = False
    ) -> None:
        """``interruptible``: whether barge-in is configured."""
        self.display = display
        self.loudspeaker = loudspeaker
        #: What was understood so far, by request.
        self.transcripts: dict[str, TranscriptView] = {}
        self.reply = bytearray()
        self.reply_rate = 0
        #: Id of the running request.
        self.answering: str | None = None
        self.silenced: str | None = None
        #: The names of requests that were sent and have no id yet.
        self.asked: set[str] = set()
        self.unwanted: set[str] = set()
        self.input_ended_at: float | None = None
        #: That of a turn that ended while the answer to the one before was going on.
        self.next_input_ended_at: float | None = None
        self._interruptible = interruptible
        #: What was heard of an answer that speech has interrupted, until it ends or goes on.
        self.paused: tuple[str, float] | None = None
        self.first: dict[str, float] = {}
        self.error: OmniError | None = None

    def input_ended(self) -> None:
        if self.first and self.input_ended_at is not None:
            self.next_input_ended_at = time.perf_counter()
        else:
            self.input_ended_at = time.perf_counter()
        self.display.state("thinking")

    def silence(self) -> None:
        """Stops playback of the current answer, for good."""
        self.silenced = self.answering
        self.paused = None
        self.stop_playing()

    def stop(self) -> None:
        """Stops playback, and wants no answer to what was asked."""
        self.unwanted |= self.asked
        self.asked.clear()
        self.silence()

    @property
    def stoppable(self) -> list[str]:
        """The requests whose answers run, or still sound."""
        sound = self.loudspeaker.buffer.answers if self.loudspeaker else []
        return [*dict.fromkeys([*sound, *([self.answering] if self.answering else [])])]

    def stop_playing(self) -> None:
        if self.loudspeaker:
            self.loudspeaker.buffer.clear()

    def duck(self, lowered: bool) -> None:
        """Lowers what plays, or raises it to its full level."""
        if self.loudspeaker:
            self.loudspeaker.ducker.duck(lowered)

    @property
    def played(self) -> tuple[str, float] | None:
        """The answer that is played, and how many milliseconds of it were; None if there is nothing to report."""
        return self.paused or (self.loudspeaker.buffer.heard if self.loudspeaker else None)

    def take(self, event: Event) -> None:
        match event:
            case ResponseStarted(request_id=request_id, ref=ref):
                self.asked.discard(ref or "")
                self.answering = request_id
                if ref in self.unwanted:
                    self.silenced = request_id
                self.reply.clear()
            case SpeechStarted() | SpeechConfirmed() | SpeechDismissed() | SpeechStopped():
                self.take_speech(event)
            case TranscriptChunk():
                self.take_transcript(event)
            case TextChunk(text=text):
                self.first.setdefault("text", time.perf_counter())
                self.display.show("text", text=text)
                self.display.state("answering")
            case AudioChunk():
                self.take_audio(event)
            case ErrorEvent(error=error):
                # Each piece of what cannot be taken has the same error.
                if self.error is None or self.error.message != error.message:
                    self.display.show("error", code=error.code, message=f"{error.code}: {error.message}")
                self.error = error
                if event.blocks_request:
                    self.asked.discard(event.ref or "")
            case Reconnected() | Resumed() | Reconnecting():
                self.take_connection(event)
            case LastEvent():
                self.take_final(event)

    def take_speech(self, event: SpeechStarted | SpeechConfirmed | SpeechDismissed | SpeechStopped) -> None:
        match event:
            case SpeechStarted(certain=False):  # the voice is lowered until it is known whether this interrupts
                kind = "speech_uncertain"
                self.duck(True)
            case SpeechStarted() | SpeechConfirmed():
                kind = "speech_started"
                if (
                    self._interruptible
                ):  # the server sends no more of the answer, unless this turns out to have no words
                    self.paused = self.played
                    self.stop_playing()
                self.duck(False)
            case SpeechDismissed():
                kind = "speech_dismissed"
                self.duck(False)
            case SpeechStopped():
                kind = "speech_stopped"
                self.input_ended()
        self.display.show(kind, audio_ms=event.audio_ms)

    def take_connection(self, event: Reconnected | Resumed | Reconnecting) -> None:
        match event:
            case Reconnected(resent_chunks=count):
                self.start_over()
                message = f"the connection was lost; a new one has {count} chunks again"
            case Resumed():
                message = "the connection was lost and is back; nothing is missing"
            case Reconnecting(seconds=seconds, error=error):
                message = f"no connection ({error}); the next attempt is in {seconds:.0f} s"
        self.display.show("note", message=message)

    def take_transcript(self, event: TranscriptChunk) -> None:
        if event.late:
            self.display.show("note", message=f"before that you said: {event.text}")
            return
        transcript = self.transcripts.setdefault(event.request_id, TranscriptView())
        transcript.add(event)
        self.display.show("transcript", text=transcript.text, interim=event.interim)

    def take_audio(self, event: AudioChunk) -> None:
        if event.request_id == self.silenced:
            return
        self.first.setdefault("audio", time.perf_counter())
        self.reply += event.audio
        self.reply_rate = event.sample_rate
        self.display.show("audio", bytes=len(event.audio), start_ms=event.start_ms, sample_rate=event.sample_rate)
        if self.loudspeaker:
            self.paused = None
            self.loudspeaker.buffer.play(event)

    def take_final(self, event: LastEvent) -> None:
        for names in (self.asked, self.unwanted):
            names.discard(event.ref or "")
        self.transcripts.pop(event.request_id, None)
        if self.answering not in (None, event.request_id):  # of another request than the one that is answered
            if event.finish_reason is FinishReason.STOP:
                self.display.show("note", message="there were no words in that; the answer goes on")
            return
        if event.finish_reason is FinishReason.CANCELLED:
            self.silence()
        if self.loudspeaker:
            self.loudspeaker.buffer.end()
        usage = {name: getattr(event.usage, name) for name in event.usage.__slots__} if event.usage else None
        self.display.show("final", finish_reason=event.finish_reason.value, usage=usage)
        self.display.show("latency", first_audio_ms=self.since_input("audio"), first_text_ms=self.since_input("text"))
        self.answering = self.silenced = None
        self.input_ended_at, self.next_input_ended_at = self.next_input_ended_at, None
        self.first.clear()

    def since_input(self, what: str) -> int | None:
        """Milliseconds since the end of the input; negative if the answer preceded it."""
        if what not in self.first or self.input_ended_at is None:
            return None
        return round((self.first[what] - self.input_ended_at) * 1000)

    def start_over(self) -> None:
        """Discards the partial answer."""
        self.duck(False)
        self.reply.clear()
        self.first.clear()
        self.transcripts.clear()
        self.stop_playing()
