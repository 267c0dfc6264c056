"""The connection of one peer over Wyoming, a client of the services or a satellite; and the answers it receives."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import UNSET, Struct, UnsetType, json
from websockets.frames import CloseCode

from omni_ws import __version__
from omni_ws.audio.pcm import SampleLayout, mixed_down, pcm16_from_samples, samples_from_bytes
from omni_ws.core.chunks import (
    AudioFormat,
    FinalChunk,
    FinishReason,
    InputChunk,
    Modality,
    OutputChunk,
    OutputModality,
    Task,
    heard_language,
)
from omni_ws.core.history import Message, estimate_tokens
from omni_ws.core.json_values import primary_subtag
from omni_ws.core.quota import ByteBudget, Share, beyond_ordinary, keep_newest
from omni_ws.engine.base import Engine, EngineCapabilities
from omni_ws.engine.composed.parts import PartDescription, Role, has_model, parts_of
from omni_ws.errors import (
    EngineOverloaded,
    InvalidRequest,
    InvalidValue,
    ModelNotFound,
    OmniError,
    SessionTimeout,
    SlowConsumer,
    UnknownType,
    UnsupportedParameter,
)
from omni_ws.service import unexpected
from omni_ws.service.conversation.output_log import (
    InputHeard,
    RequestWarning,
    ServerMessage,
)
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.service.sessions.session import Session
from omni_ws.transport.native.connection import Pause, SoleConnection
from omni_ws.transport.native.endpoint import record_message
from omni_ws.transport.native.keep_alive import NO_PINGS
from omni_ws.transport.native.tcp_link import TcpLink
from omni_ws.wire.server_frames import SpeechStartedFrame, SpeechStoppedFrame
from omni_ws.wire.session_config import MAX_KEYWORDS, converted
from omni_ws.wire.wyoming import (
    EventBounds,
    NoFields,
    PcmFields,
    PingFields,
    PipelineFields,
    ProgramName,
    SpeechFields,
    TextPiece,
    TextToHandle,
    TextToSpeak,
    TranscribeFields,
    VoiceFields,
    WyomingEvent,
    decode_event,
    encode_event,
    error_event,
)

#: Unsent bytes at which writing stops: a second of 16-bit audio at 24 kHz.
MAX_UNSENT_BYTES: Final = 48_000
#: The size of a frame after which the next frame waits for another pass of the event loop.
_MUCH_FOR_A_PASS: Final = 64 * 1024


class WyomingLink(TcpLink):
    """A TcpLink whose frames are whole events. ``accepted`` is called once the link is connected.

    While the peer does not read, its input is not read either, so that answers to its events, such as pongs, do not
    pile up. A peer that does not read for ``write_timeout`` seconds is a SlowConsumer. The bytes of an incomplete event
    are charged to ``budget``.
    """

    def __init__(self, accepted: Callable[[WyomingLink], None], *, budget: ByteBudget, write_timeout: float) -> None:
        super().__init__(max_unsent=MAX_UNSENT_BYTES)
        self._accepted = accepted
        self._bounds = EventBounds()
        self._unfinished = Share(budget)
        self._write_timeout = write_timeout
        self._stall: asyncio.TimerHandle | None = None

    def write_ping(self) -> None:
        self.write_message(encode_event("ping"), is_text=False)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._accepted(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(self._write_timeout, self._stalled)
        self.pause_reading(Pause.UNWRITTEN)

    def resume_writing(self) -> None:
        self._end_stall()
        super().resume_writing()
        self.touch()  # what it sent meanwhile was not read
        self.resume_reading(Pause.UNWRITTEN)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_stall()
        self._unfinished.resize(0)
        super().connection_lost(exc)

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stalled(self) -> None:
        self._stall = None
        self._refuse(SlowConsumer(f"the client did not read for {self._write_timeout:g} seconds"))
        self.abort()  # what waits for it cannot be sent

    def _take_frame(self, received: bytearray, start: int) -> int:
        end = self._bounds.end(received, start)
        if end is None:
            self._unfinished.resize(beyond_ordinary(len(received) - start))
            return start
        if self._unfinished.size:
            self._unfinished.resize(0)
        if self._receiver is not None:
            self._receiver.receive_message(bytes(received[start:end]), is_text=False)
        if end - start > _MUCH_FOR_A_PASS:
            self.end_pass()
        return end


# What was said in conversations that go on over several connections, by the names that their clients gave them.


#: The most conversations that are remembered, and for how long after their last answer (Home Assistant's own time).
MAX_TALKS: Final = 64
KEPT_SEC: Final = 300.0


class Talks:
    """The latest messages of each conversation. Home Assistant opens a new connection for each sentence.

    A conversation keeps at most ``max_tokens``. Of too many conversations, the one that was silent longest is
    forgotten.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        #: The messages of each conversation, and the time at which they are forgotten, by name.
        self._talks: dict[str, tuple[tuple[Message, ...], float]] = {}

    def messages(self, name: str, *, now: float) -> tuple[Message, ...]:
        """Return the messages of the conversation ``name`` so far."""
        while self._talks and self._talks[oldest := next(iter(self._talks))][1] <= now:
            del self._talks[oldest]
        return self._talks.get(name, ((), now))[0]

    def add(self, name: str, said: Sequence[Message], *, now: float) -> None:
        """Add a message of the user and its answer to the conversation ``name``."""
        messages, tokens = [*self.messages(name, now=now), *said], 0
        first = len(messages)
        while first and (tokens := tokens + estimate_tokens(messages[first - 1].text)) <= self._max_tokens:
            first -= 1
        self._talks.pop(name, None)
        self._talks[name] = tuple(messages[first:]), now + KEPT_SEC
        keep_newest(self._talks, MAX_TALKS)


# What a peer is answered, as events: services (``info``), transcripts, speech, texts, and turns of a satellite.


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
    """Return the data of an ``info`` event: the services, models and voices of this server."""
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
    """Return the languages of a voice; if the engine does not say, all languages that it speaks."""
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
    """Return the first voice of a language, if possible of its region; None if no voice is known to speak it."""
    wanted = language.replace("_", "-").lower()
    found = {voice: tag.lower() for voice, tag in able.voice_languages.items()}
    exact = (voice for voice, tag in found.items() if tag == wanted)
    near = (voice for voice, tag in found.items() if primary_subtag(tag) == primary_subtag(wanted))
    return next(exact, None) or next(near, None)


#: The sound of all answers: pcm16, mono.
SOUND: Final = AudioFormat(sample_rate=24_000)
_PCM: Final = {"rate": SOUND.sample_rate, "width": 2, "channels": 1}


class WyomingAnswer(ABC):
    """The answer to one request of a peer: renders outputs of the engine as events of Wyoming."""

    #: Whether a failure of the request ends the connection: a client that waits for an answer ignores error events.
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
    """The answer to speech that is to be transcribed: sends the words as they are settled."""

    def __init__(self, language: str | None) -> None:
        """``language`` is the language that the client named; None if it named none."""
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
    """The audio of one answer: renders ``audio-start``, ``audio-chunk`` and ``audio-stop``."""

    def __init__(self) -> None:
        self.begun = False
        #: Milliseconds of audio so far.
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
    """The answer to a text that is to be read aloud. ``streamed``: whether the text comes in pieces."""

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
    """The answer to a text of the user, as text. ``answered`` is called with the whole answer.

    The client's ``context`` is returned in the events.
    """

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
    """A spoken turn at a satellite, with its answer. Sends the events that Home Assistant sends, in the same order."""

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
        """Count ``ms`` milliseconds of audio that the satellite has sent."""
        self.heard_ms += ms

    def stop_listening(self) -> None:
        """Ignore further audio of the satellite."""
        self.listening = False

    def speech_started(self, frame: SpeechStartedFrame) -> Iterator[bytes]:
        """Render the beginning of the speech."""
        self.request_id, self.turn_id = frame.request_id, frame.turn_id
        yield encode_event("voice-started", {"timestamp": frame.audio_ms})

    def speech_stopped(self, frame: SpeechStoppedFrame) -> Iterator[bytes]:
        """Render the end of the speech. If the speech was a turn, further audio is ignored."""
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
        """Render the user's words, once: the transcript is complete when the answer begins."""
        if not self._words_told:
            self._words_told = True
            yield encode_event("transcript", {"text": self._words.strip()})


# WyomingConnection: the connection of one peer, a client of the services or a satellite, with its session.


#: How much audio a satellite may send without any speech (Home Assistant's own limit).
LISTEN_MS: Final = 15_000
#: How much longer than its audio an answer may take to be played, before the satellite is heard again.
PLAYED_MARGIN_SEC: Final = 1.0
#: The lead of an answer over its playback: practically unlimited, as the peer has buffers of its own.
_UNPACED_MS: Final = 3_600_000
#: The prefix of the ids of answers to empty inputs, which have no requests.
_EMPTY: Final = "empty "
_WRITE_BATCH_MESSAGES: Final = 128
_LAYOUTS: Final = {1: SampleLayout.U8, 2: SampleLayout.S16, 3: SampleLayout.S24, 4: SampleLayout.S32}
#: Events that ask for services that are not in ``info``.
UNSERVED: Final = {"detect": "detection of wake words", "recognize": "recognition of intents"}


def mono_pcm16(payload: bytes, pcm: PcmFields) -> bytes:
    """Return the audio of an ``audio-chunk`` as mono pcm16. Raises InvalidValue if the audio ends within a sample."""
    if len(payload) % (pcm.width * pcm.channels):
        raise InvalidValue("audio must be whole samples of all channels", param="payload_length")
    if pcm.width == 2 and pcm.channels == 1:
        return payload
    samples = mixed_down(samples_from_bytes(payload, _LAYOUTS[pcm.width]), pcm.channels)
    return pcm16_from_samples(samples).tobytes()


def answer_without_session(event: WyomingEvent, link: WyomingLink, factory: SessionFactory) -> bool:
    """Answer an event if it needs no session. Returns whether it needed none.

    Raises EngineOverloaded or EngineFailed while the engine is not ready, and InvalidValue.
    """
    match event.type:
        case "describe":
            factory.check_ready()
            link.write_message(encode_event("info", describe_services(factory.engine)), is_text=False)
        case "ping":
            text = converted(event.data, PingFields).text
            link.write_message(encode_event("pong", {"text": text}), is_text=False)
        case "select-program":
            check_program(converted(event.data, ProgramName).name)
        case _:
            return False
    return True


class WyomingConnection(SoleConnection):
    """The connection of one peer with its session: takes requests, and answers them in order.

    A session ends with its connection. A ``lasting`` connection stays open if its session ends because of silence. An
    error ends the connection, except an error in a turn of a satellite or in the answer to a text.
    """

    def __init__(
        self, link: WyomingLink, session: Session, factory: SessionFactory, talks: Talks, *, lasting: bool
    ) -> None:
        super().__init__(link, session, rounds=NO_PINGS)
        self._link = link
        self._factory = factory
        self._talks = talks
        self._lasting = lasting
        #: The answers that are not complete, in their order, by the ids of their requests.
        self._answers: dict[str, WyomingAnswer] = {}
        #: Whether the error that ends the session was sent.
        self._reported = False
        # speech to text: how the next speech is to be written down, whether some is expected, and its rate once it came
        self._transcribe = TranscribeFields()
        self._hears = False
        self._rate: int | None = None
        # text to speech: the text that comes in pieces, and whether any has come
        self._reading: TextToSpeech | None = None
        self._reads = False
        # satellites
        self._is_satellite = False
        self._turn: SatelliteTurn | None = None
        self._again: asyncio.TimerHandle | None = None

    async def serve(self, first: bytes) -> bool:
        """Serve the peer to the end of the session. ``first`` is an event that was received before.

        Returns True if the connection stays open without the session; otherwise the connection is closed. Call
        ``session.attach`` with this object before.
        """
        try:
            self.receive_message(first, is_text=False)
            self._link.attach(self, self._conversation.account)
            error = await self._over
            self._flush()
            if self._lasting and isinstance(error, SessionTimeout) and self._link.is_open:
                return True
            if error is not None and not self._reported:
                self._write([error_event(error)])
            await self._link.close_in_time(CloseCode.NORMAL_CLOSURE, "")
            return False
        finally:
            self._end_pause()
            self._session.detach(self)

    def connection_closing(self) -> None:
        self._session.end(None)

    # input

    def receive_message(self, data: bytes | bytearray | memoryview, *, is_text: bool) -> None:
        if not self._listening:
            return
        try:
            event = decode_event(bytes(data))
            if not answer_without_session(event, self._link, self._factory) and event.type != "pong":
                self._conversation.stream.touch(now=self._link.heard_at)
                self._receive(event)
        except InvalidRequest as error:
            if not self._is_satellite:
                self._session.end(error)
                return
            self._write([error_event(error)])
            if self._turn is not None and self._again is None:
                self._conversation.cancel()
                self._end_turn()
        except OmniError as error:
            self._session.end(error)
        except Exception as error:
            self._session.end(unexpected(error, where="the input of a Wyoming session"))
        self._pause_if_blocked()

    def _receive(self, event: WyomingEvent) -> None:
        if event.type == "audio-chunk":
            self._hear(event)
        elif event.type in UNSERVED:
            raise UnknownType(f"{UNSERVED[event.type]} is not served here, see info", param="type")
        elif (found := _HANDLERS.get(event.type)) is not None:
            kind, handle = found
            handle(self, converted(event.data, kind))

    def _fields(self, task: Task, *modalities: str, **given: Any) -> Mapping[str, Any]:
        """Return the fields of ``session_config`` for requests of one kind. It sets all fields that any kind sets."""
        return {
            "task": task.value,
            "modalities": list(modalities),
            "input_audio": {"format": "pcm16", "sample_rate": SOUND.sample_rate, "language": None, "keywords": None},
            "output_audio": {"format": "pcm16", "sample_rate": SOUND.sample_rate},
            "turn_detection": None,
            "voice": None,
            "overlap": "wait",
            "history": False,
            "max_lead_ms": _UNPACED_MS,
            "idle_prompt": {"after_sec": 0},
            "instructions": self._factory.config.wyoming.instructions,
            **given,
        }

    def _take(self, chunk: InputChunk) -> None:
        self._conversation.configuration.check_chunk(chunk)
        self._conversation.receive_chunk(chunk, now=self._link.heard_at)

    def _hear(self, event: WyomingEvent) -> None:
        """Take audio of a satellite, or audio to be transcribed. Ignores audio that was not announced."""
        turn = self._turn
        if not (turn.listening if turn is not None else self._hears):
            return
        pcm = converted(event.data, PcmFields)
        if not (sound := mono_pcm16(event.payload, pcm)):
            return
        if self._rate not in (None, pcm.rate):
            raise InvalidValue(f"the rate of a stream must not change, here from {self._rate}", param="rate")
        if self._session.recording is not None:
            self._session.recording.sound(sound, AudioFormat(sample_rate=pcm.rate), by_user=True)
        if turn is not None:
            self._hear_satellite(turn, sound, pcm.rate)
        elif self._rate is None:
            self._begin_speech(sound, pcm.rate)
        else:
            self._take(InputChunk(Modality.AUDIO, sound))

    def _opened(self, answer: WyomingAnswer) -> bool:
        """Set the answer to the request that has just opened. Returns False if the request was refused as it opened."""
        request = self._conversation.receiving
        if request is not None:
            self._answers[request.request_id] = answer
        return request is not None

    def _finish_empty(self, answer: WyomingAnswer) -> None:
        """Finish the answer to an empty input, which needs no request, once all earlier answers are complete."""
        if len(self._answers) > (may_wait := self._conversation.limits.max_pending_requests):
            raise EngineOverloaded(f"at most {may_wait} requests may wait per session", retry_after_ms=1000)
        if self._answers:
            self._answers[f"{_EMPTY}{id(answer)}"] = answer
        else:
            self._write(answer.finish())

    def _check_streams(self) -> None:
        """Raise InvalidValue if this is the connection of a satellite, whose input is only that of its pipelines."""
        if self._is_satellite:
            raise InvalidValue("this connection runs pipelines: stream to the services over another", param="type")

    # speech to text

    def _expect_speech(self, fields: TranscribeFields) -> None:
        check_recogniser(fields.name, self._factory.engine)
        self._expect_sound()
        self._transcribe = fields

    def _begin_sound(self, fields: PcmFields) -> None:
        if not self._is_satellite:
            self._expect_sound()

    def _expect_sound(self) -> None:
        """Expect the audio of new speech. If earlier speech was not ended, its request is cancelled."""
        self._check_streams()
        if self._reading is not None:
            raise InvalidValue("a text to synthesize is not complete: end it with synthesize-stop", param="type")
        if self._rate is not None and (given_up := self._conversation.receiving) is not None:
            self._conversation.cancel(given_up.request_id)
        self._hears, self._rate = True, None

    def _begin_speech(self, sound: bytes, rate: int) -> None:
        fields = self._transcribe
        language = None if fields.language is None else fields.language.replace("_", "-")
        names = [*(fields.transcript_names or ()), *(fields.transcript_terms or ())]
        able = self._factory.engine.capabilities
        keywords = [name for name in names if name.strip() and len(name) <= 64][:MAX_KEYWORDS] if able.keywords else []
        audio = {"format": "pcm16", "sample_rate": rate, "language": language, "keywords": keywords or None}
        self._conversation.configure(self._fields(Task.TRANSCRIBE, "text", input_audio=audio))
        self._rate = rate
        self._take(InputChunk(Modality.AUDIO, sound))
        self._hears = self._opened(SpeechToText(language))

    def _end_sound(self, fields: NoFields) -> None:
        """End the audio: of speech to transcribe, or of a satellite, once turn detection has heard all of it."""
        turn, listener = self._turn, self._conversation.listener
        if turn is not None and turn.listening:
            turn.stop_listening()
            if turn.heard_ms and listener is not None:
                listener.mark()
            else:
                self._write(turn.finish())
                self._end_turn()
        if self._is_satellite:
            return
        expected, rate, self._hears, self._rate = self._hears, self._rate, False, None
        if rate is not None:
            self._conversation.finish()
        elif expected:
            self._finish_empty(SpeechToText(self._transcribe.language))

    # text to speech

    def _speech(self, fields: SpeechFields) -> Mapping[str, Any]:
        """Return the session settings to read a text aloud. Raises InvalidValue or UnsupportedParameter."""
        if fields.text_format not in (None, "text"):
            raise UnsupportedParameter("text to synthesize must be plain", param="text_format")
        wanted = fields.voice or VoiceFields()
        if wanted.speaker is not None:
            raise UnsupportedParameter("voices have no speakers here, see info", param="voice.speaker")
        voice, audio = wanted.name, dict[str, Any]()
        able = self._factory.engine.capabilities
        if voice is None and wanted.language is not None:
            voice, spoken = voice_of(wanted.language, able), primary_subtag(wanted.language.replace("_", "-"))
            if voice is None and spoken in able.speech_languages & able.languages:
                audio = {"language": spoken}
            elif voice is None and able.voice_languages:
                raise InvalidValue(f"no voice speaks {wanted.language!r}, see info", param="voice.language")
        return self._fields(Task.SPEECH, "audio", voice=voice, input_audio=audio)

    def _read(self, fields: TextToSpeak) -> None:
        if self._reading is not None:
            return  # the same text again, for servers that do not take pieces
        config = self._conversation.configuration.with_patch(self._speech(fields))
        answer = TextToSpeech(streamed=False)
        if fields.text.strip():
            self._record_text(fields.text)
            text = InputChunk(Modality.TEXT, fields.text.encode())
            self._answers[self._conversation.respond([text], config, input_kept=False, answer_kept=False)] = answer
        else:
            self._finish_empty(answer)

    def _begin_text(self, fields: SpeechFields) -> None:
        self._check_streams()
        if self._hears or self._reading is not None:
            raise InvalidValue("synthesize-start came within another stream", param="type")
        self._conversation.configure(self._speech(fields))
        self._reading, self._reads = TextToSpeech(streamed=True), False

    def _read_on(self, fields: TextPiece) -> None:
        if self._reading is None:
            raise InvalidValue("synthesize-chunk must follow synthesize-start", param="type")
        if not fields.text or (not self._reads and not fields.text.strip()):
            return
        self._take(InputChunk(Modality.TEXT, fields.text.encode()))
        self._record_text(fields.text)
        if not self._reads:
            self._reads = True
            self._opened(self._reading)

    def _end_text(self, fields: NoFields) -> None:
        reading, self._reading = self._reading, None
        if reading is None:
            raise InvalidValue("synthesize-stop must follow synthesize-start", param="type")
        if self._reads:
            self._conversation.finish()
        else:
            self._finish_empty(reading)

    # texts to answer

    def _handle(self, fields: TextToHandle) -> None:
        conversation, now = self._conversation, self._loop.time()
        name = fields.conversation_id or self._session.session_id
        said = Message("user", fields.text)

        def answered(text: str) -> None:
            self._talks.add(name, (said, Message("assistant", text)), now=self._loop.time())

        answer = TextAnswered(fields.context, answered)
        if not fields.text.strip():
            self._finish_empty(answer)
            return
        config = self._factory.config
        # Home Assistant reads the answer aloud.
        instructions = config.wyoming.instructions or config.spoken_instructions
        patch = self._fields(Task.CHAT, "text", instructions=instructions)
        patched = conversation.configuration.with_patch(patch)
        self._record_text(fields.text)
        request_id = conversation.respond(
            [InputChunk(Modality.TEXT, fields.text.encode())],
            patched,
            input_kept=False,
            answer_kept=False,
            context=self._talks.messages(name, now=now),
        )
        self._answers[request_id] = answer

    # turns of satellites

    def _run(self, pipeline: PipelineFields) -> None:
        """Run a pipeline. It replaces a pipeline that is still running."""
        self._is_satellite = True
        if pipeline.start_stage != "asr":
            what = "detects no wake words" if pipeline.start_stage == "wake" else "hears satellites"
            raise UnsupportedParameter(f"this server {what}: a pipeline must start with asr", param="start_stage")
        if pipeline.end_stage == "intent":
            raise UnsupportedParameter("this server recognises no intents, see info", param="end_stage")
        if self._hears or self._reading is not None:
            raise InvalidValue("run-pipeline came within another stream", param="type")
        self._leave_turn()
        self._turn = SatelliteTurn(pipeline)
        self._write([encode_event("transcribe")])

    def _leave_turn(self) -> None:
        """Cancel an incomplete turn, and separate the audio of the next turn from that of the last."""
        if self._turn is not None:
            self._conversation.cancel()
        self._conversation.configure({"turn_detection": None})
        self._end_pause()
        self._turn, self._rate = None, None

    def _hear_satellite(self, turn: SatelliteTurn, sound: bytes, rate: int) -> None:
        if self._rate is None:
            self._conversation.configure(self._turn_settings(turn.pipeline, rate))
            self._rate = rate
        self._take(InputChunk(Modality.AUDIO, sound))
        turn.hear(AudioFormat(sample_rate=rate).duration_ms(len(sound)))
        if turn.heard_ms > LISTEN_MS and turn.request_id is None:
            self._write(turn.finish())
            self._end_turn()

    def _turn_settings(self, pipeline: PipelineFields, rate: int) -> Mapping[str, Any]:
        known = self._factory.speech_workers.turn_detection_types
        task = Task.TRANSCRIBE if pipeline.end_stage == "asr" else Task.CHAT
        modalities = ("text", "audio") if pipeline.end_stage == "tts" else ("text",)
        return self._fields(
            task,
            *modalities,
            input_audio={"format": "pcm16", "sample_rate": rate, "language": None, "keywords": None},
            # Commands are short: no turn ends later after the speech than Home Assistant's own do, by default.
            turn_detection={"type": "semantic_vad", "eagerness": "high"}
            if "semantic_vad" in known
            else {"type": "server_vad"},
            history=True,
        )

    def _end_turn(self) -> None:
        """End the turn. If the satellite wants to restart, expect the next turn once the user has heard the answer."""
        if self._again is not None:
            return  # it has ended before
        turn, self._turn = self._turn, None
        if turn is None or not turn.pipeline.restart_on_end:
            return
        self._turn = turn
        turn.stop_listening()
        seconds = turn.sound.ms / 1000 + PLAYED_MARGIN_SEC if turn.sound.begun else 0.0
        self._again = self._loop.call_later(seconds, self._run_again)

    def _played(self, fields: NoFields) -> None:
        if self._again is not None:
            self._run_again()

    def _run_again(self) -> None:
        self._end_pause()
        turn, self._turn = self._turn, None
        if turn is not None and self._listening:
            self._run(turn.pipeline)

    def _end_pause(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None

    # output

    def resume_output(self) -> None:
        self.output_ready()

    def _write(self, events: Iterable[bytes]) -> None:
        for event in events:
            self._link.write_message(event, is_text=False)

    def _flush(self) -> None:
        """Write a batch of the messages in the outbox, as long as the socket takes them."""
        self._flush_scheduled = False
        for _ in range(_WRITE_BATCH_MESSAGES):
            if not self._link.is_open or self._link.paused or (message := self._outbox.take()) is None:
                return
            record_message(self._session.recording, message)
            try:
                self._write(self._render(message))
            except Exception as error:
                self._loop.call_soon(self._session.end, unexpected(error, where="the output of a Wyoming session"))
                return
        self.output_ready()

    def _render(self, message: ServerMessage) -> Iterator[bytes]:
        match message:
            case OutputChunk(request_id=request_id):
                if (answer := self._answer_to(request_id)) is not None:
                    self._record(message)
                    yield from answer.render(message)
            case FinalChunk():
                yield from self._finished(message)
            case OmniError(request_id=None):
                self._reported = True
                yield error_event(message)
            case OmniError(request_id=str(request_id)):
                answer = self._answer_to(request_id)
                yield from [error_event(message)] if answer is None else answer.fail(message)
            case RequestWarning(error=error):
                yield error_event(error)
            case SpeechStartedFrame() if self._turn is not None and self._turn.request_id is None:
                yield from self._turn.speech_started(message)
            case SpeechStoppedFrame(turn_id=turn_id) if self._turn is not None and self._turn.turn_id == turn_id:
                yield from self._turn.speech_stopped(message)
            case InputHeard() if self._turn is not None:
                self._conversation.finish()
                if self._turn.request_id is None:
                    yield from self._turn.finish()
                    self._end_turn()

    def _answer_to(self, request_id: str) -> WyomingAnswer | None:
        if self._turn is not None and self._turn.request_id == request_id:
            return self._turn
        return self._answers.get(request_id)

    def _record(self, chunk: OutputChunk) -> None:
        if self._session.recording is not None and chunk.payload:
            self._session.recording.sound(chunk.payload, SOUND, by_user=False, request_id=chunk.request_id)

    def _record_text(self, text: str) -> None:
        """Record a text of the client, as the frame that a native client would send."""
        if self._session.recording is not None:
            self._session.recording.told(json.encode({"type": "input_chunk", "modality": "text", "text": text}))

    def _finished(self, final: FinalChunk) -> Iterator[bytes]:
        """Yield the events that end a request's answer, and then those of the answers to empty texts that are next."""
        answer = self._answer_to(final.request_id)
        self._answers.pop(final.request_id, None)
        failed = final.finish_reason is FinishReason.ERROR
        if answer is None and failed:
            answer = self._turn  # which was refused as it opened
        if answer is not None and not failed and final.finish_reason is not FinishReason.CANCELLED:
            yield from answer.finish()
        while self._answers and (first := next(iter(self._answers))).startswith(_EMPTY):
            yield from self._answers.pop(first).finish()
        if answer is not None and answer is self._turn:
            self._end_turn()
        elif failed and (answer is None or answer.ends_in_error):
            self._loop.call_soon(self._session.end, None)


#: The fields and the handler of each event but sound.
_HANDLERS: Final[Mapping[str, tuple[type[Struct], Callable[[WyomingConnection, Any], None]]]] = {
    "transcribe": (TranscribeFields, WyomingConnection._expect_speech),
    "audio-start": (PcmFields, WyomingConnection._begin_sound),
    "audio-stop": (NoFields, WyomingConnection._end_sound),
    "synthesize": (TextToSpeak, WyomingConnection._read),
    "synthesize-start": (SpeechFields, WyomingConnection._begin_text),
    "synthesize-chunk": (TextPiece, WyomingConnection._read_on),
    "synthesize-stop": (NoFields, WyomingConnection._end_text),
    "transcript": (TextToHandle, WyomingConnection._handle),
    "run-pipeline": (PipelineFields, WyomingConnection._run),
    "played": (NoFields, WyomingConnection._played),
}
