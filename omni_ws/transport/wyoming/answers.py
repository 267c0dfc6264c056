"""What a peer is answered, as events: services (``info``), transcripts, speech, texts, and turns of a satellite."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Final

from msgspec import UNSET, UnsetType

from omni_ws import __version__
from omni_ws.core.chunks import AudioFormat, OutputChunk, OutputModality, Task, heard_language
from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.base import Engine, EngineCapabilities
from omni_ws.engine.composed.parts import PartDescription, Role, parts_of
from omni_ws.engine.llm.coming import has_model
from omni_ws.errors import InvalidValue, ModelNotFound, OmniError
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame
from omni_ws.wire.wyoming import PipelineFields, encode_event, error_event

#: The name of all programs in ``info``: they are one server.
PROGRAM: Final = "omni_ws"
_DESCRIPTION: Final = "a real-time speech server"
#: The language of engines that do not say which they know: the rules and the smallest Whisper know no other.
_ENGLISH: Final = "en"
#: Who made what our engines run, and where it is from.
_MAKERS: Final = {
    "whisper": ("OpenAI", "https://github.com/openai/whisper"),
    "hibari": ("Maureese Williams", "https://github.com/MMWilliams/hibari"),
    "kokoro": ("hexgrad", "https://huggingface.co/hexgrad/Kokoro-82M"),
    "espeak-ng": ("espeak-ng", "https://github.com/espeak-ng/espeak-ng"),
}


def describe_services(engine: Engine) -> dict[str, Any]:
    """Return the data of ``info``."""
    able, parts = engine.capabilities, parts_of(engine)
    llm = parts[Role.LLM.value]

    def part_of(role: Role) -> PartDescription:
        found = parts[role.value] or llm  # which does that work itself
        return found or PartDescription(engine.name, engine.model)

    services: dict[str, Any] = {name: [] for name in ("asr", "tts", "handle", "intent", "wake", "mic", "snd")}
    if Task.TRANSCRIBE in able.tasks:
        ears = part_of(Role.ASR)
        model = _artifact(ears.model, ears, languages=_heard(able))
        services["asr"] = [
            _program(
                models=[model],
                supports_transcript_streaming=True,
                requires_external_vad=True,
                prefers_auto_gain_enabled=False,
                prefers_noise_reduction_enabled=False,
            )
        ]
    if Task.SPEECH in able.tasks:
        mouth = part_of(Role.TTS)
        voices = [_artifact(voice, mouth, languages=_read_by(voice, able)) for voice in able.voices]
        services["tts"] = [_program(voices=voices, supports_synthesize_streaming=able.extend)]
    if Task.CHAT in able.tasks and not able.chat_refusal:
        mind = part_of(Role.LLM)
        languages = sorted({_ENGLISH, *_heard(able), *able.speech_languages}) if has_model(engine) else [_ENGLISH]
        model = _artifact(mind.model, mind, languages=languages)
        services["handle"] = [_program(models=[model], supports_handled_streaming=True, supports_home_control=False)]
    return services


def _program(**more: Any) -> dict[str, Any]:
    return {
        "name": PROGRAM,
        "description": _DESCRIPTION,
        "attribution": {"name": PROGRAM, "url": ""},
        "installed": True,
        "version": __version__,
        **more,
    }


def _artifact(name: str, part: PartDescription, *, languages: list[str]) -> dict[str, Any]:
    maker, url = _MAKERS.get(part.name, (part.name, ""))
    where = f" at {', '.join(part.hosts)}" if part.hosts else ""
    return {
        "name": name,
        "description": f"{part.name}: {name}{where}",
        "attribution": {"name": maker, "url": url},
        "installed": True,
        "version": None,
        "languages": languages,
    }


def _heard(able: EngineCapabilities) -> list[str]:
    return sorted(able.languages) or [_ENGLISH]


def _read_by(voice: str, able: EngineCapabilities) -> list[str]:
    """Return the languages of a voice; of one that does not say, all that are spoken."""
    found = able.voice_languages.get(voice)
    if found is not None:
        language, _, region = found.partition("-")
        return [f"{language}-{region.upper()}" if len(region) == 2 else found]
    return sorted(able.speech_languages) or [_ENGLISH]


# What of it clients may name.


def check_program(name: str) -> None:
    """Raise InvalidValue for a program that is not in ``info``."""
    if name != PROGRAM:
        raise InvalidValue(f"there is no program {name[:64]!r}; info has {PROGRAM!r}", param="name")


def check_recogniser(name: str | None, engine: Engine) -> None:
    """Raise ModelNotFound for a model of speech recognition that is not in ``info``."""
    known = [model["name"] for program in describe_services(engine)["asr"] for model in program["models"]]
    if name is not None and name not in known:
        raise ModelNotFound(f"the model {name[:64]!r} is not served here; info has {', '.join(known)}", param="name")


def voice_of(language: str, able: EngineCapabilities) -> str | None:
    """Return the first voice of a language, of its region if there is one; None if no voice is known to have it."""
    wanted = language.replace("_", "-").lower()
    found = {voice: tag.lower() for voice, tag in able.voice_languages.items()}
    exact = (voice for voice, tag in found.items() if tag == wanted)
    near = (voice for voice, tag in found.items() if primary_subtag(tag) == primary_subtag(wanted))
    return next(exact, None) or next(near, None)


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

    def hear(self, ms: float) -> None:
        """Note that so much sound was taken."""
        self.heard_ms += ms

    def stop_listening(self) -> None:
        """Take no more sound."""
        self.listening = False

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
