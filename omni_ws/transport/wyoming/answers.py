"""The answers to the requests of a peer, as events: transcripts, speech, texts, and turns of a satellite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final

from msgspec import UNSET, UnsetType

from omni_ws.core.chunks import AudioFormat, OutputChunk, OutputModality, heard_language
from omni_ws.errors import OmniError
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame
from omni_ws.wire.wyoming import PipelineFields, encode_event, error_event

#: The sound of all answers: pcm16, mono.
SOUND: Final = AudioFormat(sample_rate=24_000)
_PCM: Final = {"rate": SOUND.sample_rate, "width": 2, "channels": 1}


class WyomingAnswer(ABC):
    """The answer to one request of a peer: renders the outputs of a request as events."""

    #: Whether the connection ends with a failure: a client that waits for an answer passes over error events.
    ends_in_error = True

    @abstractmethod
    def render(self, chunk: OutputChunk) -> Iterator[bytes]:
        """Render an output."""

    @abstractmethod
    def finish(self) -> Iterator[bytes]:
        """Render the end of the whole answer."""

    def fail(self, error: OmniError) -> Iterator[bytes]:
        """Render the error that ends the request."""
        yield error_event(error)


class SpeechToText(WyomingAnswer):
    """Speech that is written down, piece by piece as its words are settled."""

    def __init__(self, language: str | None) -> None:
        """``language`` is the one that the client named."""
        self._language = language
        self._text = ""
        self._begun = False

    def render(self, chunk: OutputChunk) -> Iterator[bytes]:
        if chunk.modality is not OutputModality.TRANSCRIPT or chunk.interim:
            return
        self._language = heard_language(chunk.hearing) or self._language
        if chunk.text:
            yield from self._begin()
            self._text += chunk.text
            yield encode_event("transcript-chunk", {"text": chunk.text})

    def finish(self) -> Iterator[bytes]:
        yield from self._begin()
        yield encode_event("transcript", {"text": self._text.strip(), **self._named})
        yield encode_event("transcript-stop")

    def _begin(self) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield encode_event("transcript-start", self._named)

    @property
    def _named(self) -> dict[str, Any]:
        return {} if self._language is None else {"language": self._language}


class _Sounding:
    """The sound of one answer."""

    def __init__(self) -> None:
        self.begun = False
        #: Milliseconds so far.
        self.ms = 0.0

    def play(self, audio: bytes) -> Iterator[bytes]:
        if not audio:
            return
        yield from self.begin()
        yield encode_event("audio-chunk", {**_PCM, "timestamp": round(self.ms)}, audio)
        self.ms += SOUND.duration_ms(len(audio))

    def begin(self) -> Iterator[bytes]:
        if not self.begun:
            self.begun = True
            yield encode_event("audio-start", {**_PCM, "timestamp": 0})

    def stop(self) -> Iterator[bytes]:
        yield from self.begin()
        yield encode_event("audio-stop", {"timestamp": round(self.ms)})


class TextToSpeech(WyomingAnswer):
    """A text that is read aloud; ``streamed`` if it comes in pieces."""

    def __init__(self, *, streamed: bool) -> None:
        self._streamed = streamed
        self._sound = _Sounding()

    def render(self, chunk: OutputChunk) -> Iterator[bytes]:
        if chunk.modality is OutputModality.AUDIO:
            yield from self._sound.play(chunk.payload)

    def finish(self) -> Iterator[bytes]:
        yield from self._sound.stop()
        if self._streamed:
            yield encode_event("synthesize-stopped")


class TextAnswered(WyomingAnswer):
    """What a user said, as text, and its answer. ``answered`` is called with the whole answer."""

    ends_in_error = False

    def __init__(self, context: dict[str, Any] | None, answered: Callable[[str], None]) -> None:
        self._context = {} if context is None else {"context": context}
        self._answered = answered
        self._text = ""

    def render(self, chunk: OutputChunk) -> Iterator[bytes]:
        if chunk.modality is not OutputModality.TEXT or not chunk.text:
            return
        if not self._text:
            yield encode_event("handled-start", self._context)
        self._text += chunk.text
        yield encode_event("handled-chunk", {"text": chunk.text})

    def finish(self) -> Iterator[bytes]:
        if not self._text.strip():
            yield encode_event("not-handled", self._context)
            return
        self._answered(self._text)
        yield encode_event("handled", {"text": self._text, **self._context})
        yield encode_event("handled-stop")

    def fail(self, error: OmniError) -> Iterator[bytes]:
        yield error_event(error)
        yield encode_event("not-handled", {"text": error.message, **self._context})


class SatelliteTurn(WyomingAnswer):
    """A turn that a user speaks at a satellite, with its answer: the events that Home Assistant sends, in its order."""

    ends_in_error = False

    def __init__(self, pipeline: PipelineFields) -> None:
        self.pipeline = pipeline
        #: Whether sound is still taken: until the user has stopped speaking.
        self.listening = True
        #: The request of the turn, once somebody speaks, and the id of the speech.
        self.request_id: str | None = None
        self.turn_id: str | UnsetType = UNSET
        #: Milliseconds of sound so far.
        self.heard_ms = 0.0
        self.sound = _Sounding()
        self._words = ""
        self._words_told = False
        self._text = ""

    def speech_started(self, frame: SpeechStartedFrame) -> Iterator[bytes]:
        """Render the beginning of the speech."""
        self.request_id, self.turn_id = frame.request_id, frame.turn_id
        yield encode_event("voice-started", {"timestamp": frame.audio_ms})

    def speech_stopped(self, frame: SpeechStoppedFrame) -> Iterator[bytes]:
        """Render the end of the speech, after which nothing more is heard."""
        self.request_id = frame.request_id or self.request_id
        self.listening = frame.request_id is None
        yield encode_event("voice-stopped", {"timestamp": frame.audio_ms})

    def render(self, chunk: OutputChunk) -> Iterator[bytes]:
        match chunk.modality:
            case OutputModality.TRANSCRIPT:
                if not chunk.interim and not self._words_told:
                    self._words += chunk.text
            case OutputModality.TEXT:
                yield from self._tell_words()
                self._text += chunk.text
            case OutputModality.AUDIO:
                yield from self._tell_words()
                yield from self.sound.play(chunk.payload)

    def finish(self) -> Iterator[bytes]:
        yield from self._tell_words()
        if self.pipeline.end_stage == "handle":
            yield encode_event("handled", {"text": self._text})
        if self.sound.begun:
            yield encode_event("synthesize", {"text": self._text})
            yield from self.sound.stop()

    def _tell_words(self) -> Iterator[bytes]:
        """Render the words of the user, which are all known as the answer begins."""
        if not self._words_told:
            self._words_told = True
            yield encode_event("transcript", {"text": self._words.strip()})
