"""RemoteEngine, RemoteVoice and RemoteRecogniser: LLM, TTS and ASR on other servers with the OpenAI API."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import httpx
import msgspec
import orjson

from omni_ws.audio.container import parse_audio_mime, wav_header
from omni_ws.audio.pcm import Pcm16
from omni_ws.config.model import RemoteConfig
from omni_ws.config.parts import LOCAL_PORTS
from omni_ws.core.chunks import (
    AudioEncoding,
    AudioFormat,
    FinishReason,
    HeardSegment,
    Hearing,
    Modality,
    OutputModality,
    Task,
    Word,
    context_full,
)
from omni_ws.core.history import Message
from omni_ws.core.json_values import MAX_BODY_VALUES, json_or_none, language_name
from omni_ws.engine.answer_limit import (
    count_history,
    count_words,
    counted,
    rest_of,
)
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    ListenerSlots,
    Recognised,
    Utterance,
    UtteranceLimits,
    asr_capabilities,
)
from omni_ws.engine.base import (
    AudioOutput,
    EngineCapabilities,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputFilter,
    OutputWriter,
)
from omni_ws.engine.clauses import is_speakable, whole_turns
from omni_ws.engine.composed.engine import ComposedEngine
from omni_ws.engine.composed.parts import Role
from omni_ws.engine.remote.answer_stream import CLOSING_TAG, ChatAnswer
from omni_ws.engine.remote.event_stream import (
    DONE,
    ServerSentEvent,
    UpstreamAudio,
    event_content,
    whole_text,
)
from omni_ws.engine.remote.settings import (
    CLOSE_AFTER_STREAM,
    CONTINUES,
    DEFAULT_SAMPLING,
    IGNORED_SAMPLING,
    Dialect,
    Prompt,
    RemoteAsrSettings,
    RemoteLlmSettings,
    RemoteTtsSettings,
    chat_body,
    key_of,
    patience,
    read_prompt,
)
from omni_ws.engine.remote.upstream import ContextWindow, OnUpstreams, Upstream, UpstreamAnswer, normalised
from omni_ws.engine.threads import run_in_thread
from omni_ws.engine.tts.speech_engine import SpeechEngine, clause_by_clause, speech_capabilities
from omni_ws.errors import ContextLengthExceeded, EngineFailed, InvalidRequest, OmniError, UnsupportedParameter
from omni_ws.wire.openai_fields import UPSTREAM_FIELDS, MediaLimitFields

_EVENT_STREAM: Final = "text/event-stream"


class RemoteVoice(OnUpstreams):
    """A Voice that sends clauses to an upstream. Its AudioOutputs have ``text_end``, but no word times."""

    measures_memory = False

    def __init__(self, settings: RemoteTtsSettings) -> None:
        super().__init__(settings, says="speech ")
        self.settings = settings

    @property
    def capabilities(self) -> EngineCapabilities:
        return speech_capabilities(self.settings.voices, speed=True)

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        # Converts the audio of all clauses of a request to one rate.
        audio = UpstreamAudio(sample_rate=self.settings.audio_sample_rate)
        await clause_by_clause(request, text, out, partial(self._say, request, audio))

    async def _say(
        self, request: GenerationRequest, audio: UpstreamAudio, clause: str
    ) -> AsyncGenerator[AudioOutput, None]:
        """Yield the audio of a clause as it arrives. Raises the error for an upstream's refusal, or EngineFailed."""
        if not is_speakable(clause):
            return
        headers = {
            "X-Request-Id": request.request_id,
            "Accept": "audio/*, application/json, text/event-stream",
        }
        async with self.pool.post("audio/speech", self._body(request, clause), headers=headers) as answer:
            is_stream = answer.content_type.startswith(_EVENT_STREAM)
            outputs = _events(answer, audio) if is_stream else self._samples(answer, audio)
            async with aclosing(outputs):
                async for output in outputs:
                    yield output
        for output in audio.flush():
            yield output

    def _body(self, request: GenerationRequest, clause: str) -> bytes:
        body: dict[str, Any] = {
            "model": self.pool.model,
            "input": clause,
            "response_format": "pcm",
            # Two servers' parameters for streaming; each ignores the other's.
            "stream": True,
            "stream_format": "audio",
        }
        if request.voice is not None:
            body["voice"] = request.voice
        if request.speed != 1:
            body["speed"] = request.speed
        return orjson.dumps(body)

    async def _samples(self, answer: UpstreamAnswer, audio: UpstreamAudio) -> AsyncGenerator[AudioOutput, None]:
        rate = self._rate_of(answer.content_type)
        async with aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                for output in audio.feed(chunk, sample_rate=rate):
                    yield output

    def _rate_of(self, content_type: str) -> int:
        if content_type.partition(";")[0].strip().lower() in ("", "application/octet-stream"):
            return self.settings.audio_sample_rate
        try:
            format = parse_audio_mime(content_type, default=AudioFormat(sample_rate=self.settings.audio_sample_rate))
        except OmniError:
            raise EngineFailed("the upstream's speech is no audio that can be read") from None
        if format.encoding not in (AudioEncoding.PCM16, AudioEncoding.WAV) or format.channels != 1:
            raise EngineFailed("the upstream's speech is neither pcm nor wav")
        return format.sample_rate


async def _events(answer: UpstreamAnswer, audio: UpstreamAudio) -> AsyncGenerator[AudioOutput, None]:
    async with aclosing(answer.events()) as pieces:
        async for events, grows in pieces:
            said = False
            for event in events:
                outputs, done = _read_event(event, audio, answer.upstream)
                for output in outputs:
                    said = True
                    yield output
                if done:
                    await answer.finish(pieces)
                    return
            answer.note(shows_work=said or grows)
    raise EngineFailed("the upstream's speech ended before its end")


def _read_event(event: ServerSentEvent, audio: UpstreamAudio, upstream: str) -> tuple[list[AudioOutput], bool]:
    """Return the audio of an event, in either of the two dialects, and whether it is the last event."""
    if event.data.strip() == DONE:
        return [], True
    content = event_content(event, upstream=upstream)
    told = content.get("audio")
    if isinstance(told, str):
        return audio.feed_base64(told), False
    done = content.get("type") == "speech.audio.done" or content.get("finish_reason") is not None
    if isinstance(told, Mapping) and isinstance(data := told.get("data"), str):
        rate = told.get("sample_rate")
        return audio.feed_base64(data, sample_rate=rate if type(rate) is int else None), done
    return [], done


# RemoteRecogniser: speech recognition by any server that has ``/v1/audio/transcriptions``.


#: Most models process at most half a minute at once.
_UTTERANCE_LIMITS: Final = UtteranceLimits(cut_after=24 * SAMPLE_RATE, longest=29 * SAMPLE_RATE)
#: The limit on the size of a transcript, in bytes: a thousand times what anybody says in half a minute.
_MOST_BYTES: Final = 1 << 20
#: Recognises a server's message that it does not support streaming, but not the word "upstream".
_STREAMING: Final = re.compile(r"\bstream", re.IGNORECASE)

_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]


class RemoteRecogniser(OnUpstreams):
    """A Recogniser that sends complete utterances to an upstream. Texts that the upstream streams are interim texts.

    With ``word_times`` in the settings, word times are requested instead of a stream: no server supports both.
    """

    def __init__(self, settings: RemoteAsrSettings) -> None:
        super().__init__(settings, says="transcription ")
        self.settings = settings
        #: No limit by speed: an upstream that is overloaded refuses requests itself.
        self.slots = ListenerSlots(sys.maxsize)
        #: Whether to request streams: no upstream has refused to stream so far.
        self.streams = not settings.word_times

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("temperature", "max_tokens", "stop"),
            languages=self.settings.languages,
            word_times=self.settings.word_times,
            keywords=True,
            transcript_guesses=self.speculates,
        )

    @property
    def speculates(self) -> bool:
        """Whether utterances are transcribed at each pause; by default only if all upstreams are on this machine."""
        wanted = self.settings.speculate
        return all(one.is_local for one in self.pool.upstreams) if wanted is None else wanted

    async def start(self) -> None:
        await super().start()
        self.streams = not self.settings.word_times

    def note_no_stream(self) -> None:
        """Stop requesting streams, because an upstream has refused to stream."""
        self.streams = False

    def transcriber(self, request: GenerationRequest) -> RemoteTranscriber:
        return RemoteTranscriber(self, request)


class RemoteTranscriber:
    """A Transcriber on an upstream, and its LiveText, which is always "": an upstream gets only complete utterances."""

    def __init__(self, recogniser: RemoteRecogniser, request: GenerationRequest) -> None:
        self.limits = _UTTERANCE_LIMITS
        self.readings = 0
        self._recogniser = recogniser
        self._pool = recogniser.pool
        self.speculates = recogniser.speculates
        self._headers = {"X-Request-Id": request.request_id, "Accept": "application/json, text/event-stream"}
        temperature = request.sampling.get("temperature")
        self._fields = {
            "language": request.language or "",
            "prompt": request.expected,
            "temperature": "" if temperature is None else f"{temperature:g}",
        }

    def live_text(self) -> RemoteTranscriber:
        return self

    def read(self, utterance: Utterance) -> str:
        return ""

    def end(self) -> None:
        pass

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool,
        tell: Callable[[str], None],
        tell_untimed: Callable[[Recognised], None],
    ) -> asyncio.Task[Recognised]:
        return asyncio.create_task(self._transcribed(pcm, tell), name="transcript")

    async def _transcribed(self, pcm: Pcm16, tell: Callable[[str], None]) -> Recognised:
        """Return an upstream's transcript of ``pcm``. Raises the error for an upstream's refusal, or EngineFailed."""
        streams = self._recogniser.streams
        try:
            return await self._ask(pcm, tell, streams=streams)
        except InvalidRequest as refused:
            if not streams or _STREAMING.search(refused.message) is None:
                raise
        self._recogniser.note_no_stream()
        return await self._ask(pcm, tell, streams=False)

    async def _ask(self, pcm: Pcm16, tell: Callable[[str], None], *, streams: bool) -> Recognised:
        form = {"model": self._pool.model or "", "response_format": "json", **self._fields}
        if self._recogniser.settings.word_times:
            form |= {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        elif streams:
            form["stream"] = "true"
        samples = pcm.astype("<i2").tobytes()
        wav = wav_header(sample_rate=SAMPLE_RATE, channels=1, data_bytes=len(samples)) + samples
        told = {name: value for name, value in form.items() if value}
        # The pool chooses the upstream; this URL only serves to encode the form.
        body = httpx.Request("POST", "http://upstream", data=told, files={"file": ("speech.wav", wav, "audio/wav")})
        headers = {"Content-Type": body.headers["Content-Type"], **self._headers}
        async with self._pool.post("audio/transcriptions", body.read(), headers=headers) as answer:
            if answer.content_type.startswith("text/event-stream"):
                return await _streamed(answer, tell)
            return await _whole(answer)


async def _whole(answer: UpstreamAnswer) -> Recognised:
    """Read the response, one JSON object, and return the transcript in it."""
    body = bytearray()
    async with aclosing(answer.chunks()) as chunks:
        async for chunk in chunks:
            body += chunk
            if len(body) > _MOST_BYTES:
                raise EngineFailed("the upstream's transcript has no end")
    content = json_or_none(body, MAX_BODY_VALUES)
    if not isinstance(content, dict) or not isinstance(text := content.get("text"), str):
        raise EngineFailed("the upstream sent a transcript that cannot be read")
    return Recognised(text.strip(), _words(content.get("words")), _hearing(content))


def _hearing(content: Mapping[str, Any]) -> Hearing:
    """Return the upstream's details of the transcript; without segments if any of them is incomplete."""
    language, told = content.get("language"), content.get("segments")
    found = language_name(language.lower()) if isinstance(language, str) and language else None
    segments: list[HeardSegment] = []
    for one in told if isinstance(told, list) else ():
        try:
            segment = msgspec.convert(one, _Segment)
        except msgspec.ValidationError:
            return Hearing(found)
        segments.append(segment.heard())
    return Hearing(found, tuple(segments))


class _Segment(msgspec.Struct, frozen=True):
    """A segment of a transcript in OpenAI's format ``verbose_json``."""

    text: str
    start: _Seconds
    end: _Seconds
    tokens: list[int]
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    temperature: float = 0.0

    def heard(self) -> HeardSegment:
        return HeardSegment(
            self.text.strip(),
            round(self.start * 1000),
            round(self.end * 1000),
            tokens=tuple(self.tokens),
            avg_logprob=self.avg_logprob,
            compression_ratio=self.compression_ratio,
            no_speech_prob=self.no_speech_prob,
            temperature=self.temperature,
        )


def _words(told: object) -> tuple[Word, ...]:
    """Return the words with their times; () if the words are not in order or a time is invalid."""
    words: list[Word] = []
    for entry in told if isinstance(told, list) else ():
        if not isinstance(entry, dict) or not isinstance(text := entry.get("word"), str):
            return ()
        start, end = entry.get("start"), entry.get("end")
        if not isinstance(start, int | float) or not isinstance(end, int | float) or not 0 <= start <= end < 1e6:
            return ()
        words.append(Word(text.strip(), round(start * 1000), round(end * 1000)))
    return tuple(words)


async def _streamed(answer: UpstreamAnswer, tell: Callable[[str], None]) -> Recognised:
    """Read the response, a stream of events, and return the transcript; ``tell`` is called with each interim text."""
    transcript, shown = _StreamedTranscript(answer.upstream), ""
    async with aclosing(answer.events()) as pieces:
        async for events, grows in pieces:
            for event in events:
                transcript.read(event)
            if transcript.done:
                await answer.finish(pieces)
                break
            text = transcript.text
            is_new = bool(text) and text != shown
            answer.note(shows_work=is_new or grows)
            if is_new:
                shown = text
                tell(text)
    if not transcript.complete:
        raise EngineFailed("the upstream's transcript ended before its end")
    return Recognised(transcript.text)


class _StreamedTranscript:
    """A reader of the events of one transcript, in OpenAI's or vLLM's form, or as objects with a piece of text each."""

    def __init__(self, upstream: str) -> None:
        #: Whether an event has ended the transcript.
        self.done = False
        self._upstream = upstream
        self._pieces: list[str] = []
        self._bytes = 0
        self._bare = False

    @property
    def complete(self) -> bool:
        """Whether the stream may end here. Objects with pieces of text have no event for the end."""
        return self.done or self._bare

    @property
    def text(self) -> str:
        return whole_text("".join(self._pieces)).strip()

    def read(self, event: ServerSentEvent) -> None:
        """Read an event. Raises the error of an error event, or EngineFailed for an event that cannot be read."""
        if self.done:
            return
        if event.data.strip() == DONE:
            self.done = True
            return
        content = event_content(event, upstream=self._upstream)
        match content.get("type"):
            case "transcript.text.delta":
                self._add(content.get("delta"))
            case "transcript.text.done":
                if isinstance(text := content.get("text"), str):
                    self._pieces, self._bytes = [], 0
                    self._add(text)
                self.done = True
            case None if isinstance(choices := content.get("choices"), list):
                for choice in choices[:1]:
                    delta = choice.get("delta") if isinstance(choice, dict) else None
                    self._add(delta.get("content") if isinstance(delta, dict) else None)
            case None if isinstance(text := content.get("text"), str):
                self._bare = True
                self._add(text)

    def _add(self, text: Any) -> None:
        if isinstance(text, str):
            self._bytes += len(text)
            if self._bytes > _MOST_BYTES:
                raise EngineFailed("the upstream's transcript has no end")
            self._pieces.append(text)


# RemoteEngine: a language model, and a voice, on any servers with the OpenAI API.


T = TypeVar("T")


class RemoteEngine(ComposedEngine):
    """The engine of the configuration ``remote.*``: a RemoteLlmEngine and, with a speech upstream, a RemoteVoice.

    If the model itself speaks, it speaks its answers, and the speech upstream only does the task ``speech``.
    """

    def __init__(
        self, config: RemoteConfig, *, log_content: bool = False, max_spoken_tokens: int | None = None
    ) -> None:
        self.config = config
        self.llm = RemoteLlmEngine(replace(_llm_settings(config), log_content=log_content))
        self._speaks_itself = OutputModality.AUDIO.value in config.modalities
        tts = None
        if config.speech_upstream is not None:
            voice = RemoteVoice(replace(_tts_settings(config, config.speech_upstream), log_content=log_content))
            tts = SpeechEngine(voice)
        super().__init__(
            self.llm, tts=tts, name="remote", first_byte_timeout_sec=None, max_spoken_tokens=max_spoken_tokens
        )

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if request.task is Task.CHAT and self._speaks_itself:
            await self._alone(Role.LLM, self.llm, self._within_speech(request), out)
        else:
            await super().generate(request, out)


def _llm_settings(config: RemoteConfig) -> RemoteLlmSettings:
    return RemoteLlmSettings(
        urls=config.upstreams,
        model=config.model,
        api_key=key_of(config.api_key),
        input_modalities=config.input_modalities,
        modalities=config.modalities,
        options=config.options,
        sampling=config.sampling,
        stage_params=config.stage_params,
        stage_sampling=config.stage_sampling,
        voices=config.voices,
        audio_format=config.audio_format,
        audio_sample_rate=config.audio_sample_rate,
        **patience(config),
    )


def _tts_settings(config: RemoteConfig, url: str) -> RemoteTtsSettings:
    key = key_of(config.speech_api_key)
    if key is None and normalised(url) in map(normalised, config.upstreams):
        # A key for one server may be used for the same server, but must not be sent to another one.
        key = key_of(config.api_key)
    return RemoteTtsSettings(
        urls=(url,),
        model=config.speech_model,
        api_key=key,
        key_variable="OMNI_WS_REMOTE__SPEECH_API_KEY",
        voices=config.voices,
        audio_sample_rate=config.audio_sample_rate,
        **patience(config),
    )


# The language model.

#: The estimated size of a message besides its text, in bytes: about what a chat template puts around it.
_MESSAGE_BYTES: Final = 16
#: Arguments of chat templates that turn thinking off.
_THINKING_ARGUMENTS: Final = ("enable_thinking", "thinking")


#: Software that runs a model for one person, often on the cores of this machine.
_ON_ONE_MACHINE: Final = frozenset({Dialect.LLAMA_CPP, Dialect.LM_STUDIO, Dialect.OLLAMA})
#: The number of threads that decode audio, and encode and decode large JSON.
_THREADS: Final = 4
#: Larger JSON, in bytes, is encoded and decoded in a thread; for smaller JSON the switch to a thread would take longer.
_INLINE_BYTES: Final = 256 * 1024


class RemoteLlmEngine(OnUpstreams):
    """An engine for the task ``chat``, which sends each request to an upstream as a streamed chat completion.

    The engine waits for the whole input, because a request cannot be extended after it was sent. If the history does
    not fit into the model's context, the oldest turns are dropped. An answer that another server has begun is
    continued, with its text as the last message; if an upstream cannot do so, or refuses, the answer is made anew.
    """

    def __init__(self, settings: RemoteLlmSettings) -> None:
        super().__init__(settings, reads_context=True)
        self.settings = settings
        self.active_requests = 0
        self._running_threads: ThreadPoolExecutor | None = None
        self._window = ContextWindow()
        self._capabilities = _capabilities(settings, upstreams=())

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """The upstreams; empty unless the engine is running."""
        return self.pool.upstreams

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._capabilities

    async def start(self) -> None:
        """Wait until an upstream can be used. Idempotent.

        Raises EngineFailed if none can, or if no model is set and the upstreams list none.
        """
        await super().start()
        if self.pool.model is None:
            is_ollama = any(upstream.dialect is Dialect.OLLAMA for upstream in self.upstreams)
            pull = "; Ollama gets one with: ollama pull NAME" if is_ollama else ""
            await self.pool.stop()
            raise EngineFailed(
                f"the upstreams list no model; name one with {self.settings.section}.model{pull}", fatal=True
            )
        if self._running_threads is None:
            self._running_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix=self.name)
        found = _capabilities(self.settings, upstreams=[one for one in self.upstreams if one.models])
        self._capabilities = replace(found, context=self.pool.context)

    async def stop(self) -> None:
        threads, self._running_threads = self._running_threads, None
        await super().stop()
        if threads is not None:
            threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _threads(self) -> ThreadPoolExecutor:
        if self._running_threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        return self._running_threads

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        threads = self._threads
        self.active_requests += 1
        try:
            self._check(request)
            with request.media_room.share() as share:
                prompt = await read_prompt(
                    request, executor=threads, max_bytes=self.settings.max_request_bytes, share=share
                )
                await self._continued_answer(request, prompt, out)
        except EngineFailed as error:
            if request.near:
                error.tell_private()
            raise
        finally:
            self.active_requests -= 1

    def _check(self, request: GenerationRequest) -> None:
        if OutputModality.AUDIO not in request.modalities:
            return
        if OutputModality.AUDIO.value not in self.settings.modalities:
            raise UnsupportedParameter("this server has no voice", param="modalities")
        if request.options.choices > 1:
            raise UnsupportedParameter("one answer alone can be spoken", param="n")

    async def _continued_answer(self, request: GenerationRequest, prompt: Prompt, out: OutputWriter) -> None:
        """Write the answer; if another server began it, only the rest after ``request.begun``."""

        async def again(anew: GenerationRequest, out: OutputWriter) -> None:
            await self._fitted_answer(anew, prompt, out)

        if not request.begun:
            await self._fitted_answer(request, prompt, out)
        elif _dialect(self.pool.upstreams) not in CONTINUES:
            await rest_of(again, request, out)
        else:
            begun = _Begun(out, count_words(request.begun))
            try:
                await self._fitted_answer(begun.limited(request), prompt, begun)
            except ContextLengthExceeded:
                raise
            except InvalidRequest:
                if begun.has_outputs:
                    raise
                await rest_of(again, request, out)

    async def _fitted_answer(self, request: GenerationRequest, prompt: Prompt, out: OutputWriter) -> None:
        """Write the answer to the input with as many of the newest turns as fit into the upstream's context."""
        turns, stays = _droppable(request.history, prompt.tool_results)
        sizes = [_size(turn) for turn in turns]
        fixed = _fixed_size(request, prompt) + _size(stays)
        window, limit = self._window, request.sampling.get("max_tokens")
        window.tell(self.pool.context)
        left_out = window.left_out(sizes, fixed=fixed, answer=limit)
        for attempt in count(1):
            kept = (*(message for turn in turns[left_out:] for message in turn), *stays)
            answer = ChatAnswer(
                sample_rate=self.settings.audio_sample_rate,
                choices=request.options.choices,
                log_content=self.settings.log_content,
            )
            size = fixed + sum(sizes[left_out:])
            try:
                finished = await self._with_tools_or_without(replace(request, history=kept), prompt, answer, out)
            except ContextLengthExceeded as refused:
                if answer.begun or left_out == len(turns):
                    raise
                window.refuse(refused.limit, refused.tokens if prompt.is_text else None, size)
                left_out = window.left_out_next(left_out, sizes, fixed=fixed, answer=limit, attempt=attempt)
                continue
            if answer.prompt_tokens is not None:
                finished = _told_if_full(finished, window.limit, wanted=limit)
                if prompt.is_text:
                    window.count(answer.prompt_tokens, size)
            out.write(finished)
            return

    async def _with_tools_or_without(
        self, request: GenerationRequest, prompt: Prompt, answer: ChatAnswer, out: OutputWriter
    ) -> Finished:
        """Write the answer and return its Finished; if an upstream refuses tools, leave this server's own tools out."""
        if not request.tools or not (rule := request.options.tool_rule):
            return await self._answer(request, prompt, answer, out)
        without = replace(
            request, tools=(), tool_choice=None, instructions=request.instructions.replace(rule, "").rstrip()
        )
        if self._refuses_tools():
            return await self._answer(without, prompt, answer, out)
        try:
            return await self._answer(request, prompt, answer, out)
        except OmniError:
            if answer.begun or not self._refuses_tools():
                raise
            return await self._answer(without, prompt, answer, out)

    def _refuses_tools(self) -> bool:
        return any(one.refuses_tools for one in self.upstreams)

    async def _answer(
        self, request: GenerationRequest, prompt: Prompt, answer: ChatAnswer, out: OutputWriter
    ) -> Finished:
        """Send the request, write the outputs that ``answer`` makes of the events, and return the Finished."""
        pool, settings = self.pool, self.settings
        model, dialect = pool.model or "", _dialect(pool.upstreams)
        body = await self._run(
            prompt.size, lambda: chat_body(request, prompt, model=model, settings=settings, dialect=dialect)
        )
        # Accepting JSON too makes servers send an error with an HTTP status, before a stream of events begins.
        headers = {"X-Request-Id": request.request_id, "Accept": "application/json, text/event-stream"}
        if dialect in CLOSE_AFTER_STREAM:
            headers["Connection"] = "close"
        async with pool.post("chat/completions", body, headers=headers) as upstream:
            self._expect(request, answer, upstream.server, names_tag=CLOSING_TAG.encode() in body)
            await self._pass_on(upstream, answer, out)
            upstream.server.note_thoughts(answer.unopened_thought, waited=answer.waited)
        words = prompt.words + count_history(request.history)
        return answer.finished(input_words=words, input_audio_ms=prompt.audio_ms)

    def _expect(self, request: GenerationRequest, answer: ChatAnswer, server: Upstream, *, names_tag: bool) -> None:
        """Tell ``answer`` the name of the upstream, and whether the prompt may end with the opening tag of a thought.

        ``names_tag``: the prompt has a closing tag, so that a closing tag in the answer may be a quotation.
        """
        thinks = all(request.options.template_arguments.get(name) is not False for name in _THINKING_ARGUMENTS)
        opens = self.settings.opens_thoughts
        opens = server.opens_thoughts if opens is None else opens
        holds = thinks and not request.begun and (opens or (request.options.read_whole and not names_tag))
        answer.expect(server.name, holds=holds, watches=not names_tag)

    async def _pass_on(self, upstream: UpstreamAnswer, answer: ChatAnswer, out: OutputWriter) -> None:
        upstream.note(begun=False)
        async with aclosing(upstream.events()) as pieces:
            async for events, grows in pieces:
                said = False
                for event in events:
                    for output in await self._run(len(event.data), partial(answer.read, event)):
                        said = True
                        out.write(output)
                        await out.drain()
                upstream.note(begun=answer.begun, shows_work=said or grows)
                if answer.done:
                    await upstream.finish(pieces)
                    return
        for output in answer.end(is_stream=upstream.content_type.startswith("text/event-stream")):
            out.write(output)
            await out.drain()

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of ``work``, which processes ``size`` bytes; run it in a thread if ``size`` is large."""
        if size <= _INLINE_BYTES:
            return work()
        return await run_in_thread(self._threads, work)


class _Begun(OutputFilter):
    """An OutputWriter for an answer whose first ``words`` words are in the prompt; the usage is that of all words."""

    def __init__(self, out: OutputWriter, words: int) -> None:
        super().__init__(out)
        self._words = words
        self.has_outputs = False

    def limited(self, request: GenerationRequest) -> GenerationRequest:
        """Return ``request`` with ``max_tokens`` reduced by the words that the answer has, each at least a token."""
        limit = request.sampling.get("max_tokens")
        if limit is None:
            return request
        return replace(request, sampling={**request.sampling, "max_tokens": max(1, limit - self._words)})

    def write(self, output: EngineOutput) -> None:
        self.has_outputs = True
        self._out.write(counted(output, self._words) if isinstance(output, Finished) else output)


def _told_if_full(finished: Finished, context: int | None, *, wanted: int | None) -> Finished:
    """Return ``finished``, with a warning if the answer ended because the context is full.

    ``context``: the model's context in tokens, if known; ``wanted``: the client's limit on the answer in tokens.
    """
    usage = finished.usage
    asked_for = wanted is not None and usage.output_tokens >= wanted
    if finished.reason is not FinishReason.LENGTH or context is None or asked_for or usage.total_tokens < context - 1:
        return finished
    return replace(finished, warnings=(*finished.warnings, context_full(context)))


def _dialect(upstreams: Sequence[Upstream]) -> Dialect:
    """Return the dialect of the upstreams if all have the same one; otherwise Dialect.OPENAI."""
    dialects = {upstream.dialect for upstream in upstreams if upstream.models}
    return dialects.pop() if len(dialects) == 1 else Dialect.OPENAI


def _droppable(
    history: Sequence[Message], results: Container[str]
) -> tuple[list[tuple[Message, ...]], tuple[Message, ...]]:
    """Split ``history`` before the first turn with a call in ``results``: turns that may be dropped, later messages."""
    turns = whole_turns(history)
    called = (
        number
        for number, turn in enumerate(turns)
        if any(call.id in results for one in turn for call in one.tool_calls)
    )
    first = next(called, len(turns))
    return turns[:first], tuple(message for turn in turns[first:] for message in turn)


def _size(messages: Sequence[Message]) -> int:
    """Return the estimated size of messages in a prompt, in bytes."""
    return sum(
        _MESSAGE_BYTES
        + len(message.text.encode())
        + sum(len(call.name) + len(call.arguments.encode()) for call in message.tool_calls)
        for message in messages
    )


def _fixed_size(request: GenerationRequest, prompt: Prompt) -> int:
    """Return the estimated size of the prompt without the history, in bytes."""
    tools = sum(len(str(tool)) for tool in request.tools)
    results = sum(map(len, prompt.tool_results.values()))
    texts = (request.instructions, prompt.text, request.begun)
    return sum(len(text.encode()) for text in texts) + tools + results + 2 * _MESSAGE_BYTES


def _capabilities(settings: RemoteLlmSettings, *, upstreams: Sequence[Upstream]) -> EngineCapabilities:
    transcribes = bool(upstreams) and all(upstream.transcribes for upstream in upstreams)
    outputs = {OutputModality.TEXT} | ({OutputModality.TRANSCRIPT} if transcribes else set())
    speaks = OutputModality.AUDIO.value in settings.modalities
    if speaks:
        outputs.add(OutputModality.AUDIO)
    sampling = settings.sampling
    if sampling is None:
        sampling = tuple(name for name in DEFAULT_SAMPLING if name not in _ignored(upstreams))
    return EngineCapabilities(
        input_modalities=frozenset(map(Modality, settings.input_modalities)),
        output_modalities=frozenset(outputs),
        tasks=frozenset({Task.CHAT}),
        extend=False,
        continues=frozenset({OutputModality.TEXT}),
        voices=settings.voices if speaks else (),
        sampling=frozenset(sampling),
        stage_params=frozenset(settings.stage_params),
        stage_sampling=frozenset(settings.stage_sampling),
        tools="tools" in settings.options,
        logprobs="logprobs" in settings.options,
        structured_output="response_format" in settings.options,
        choices="n" in settings.options,
        priority="priority" in settings.options,
        # Not every omni_ws server accepts speech in earlier messages.
        speech_in_history=Modality.AUDIO.value in settings.input_modalities
        and not any(upstream.dialect is Dialect.OMNI_WS for upstream in upstreams),
        pictures_in_history=frozenset(map(Modality, settings.input_modalities)) & {Modality.IMAGE, Modality.VIDEO},
        media_limits=frozenset(MediaLimitFields.__struct_fields__) & frozenset(settings.options),
        upstream=frozenset(UPSTREAM_FIELDS) & frozenset(settings.options),
        sums_up=True,
        shares_cores=any(upstream.dialect in _ON_ONE_MACHINE for upstream in upstreams),
    )


def _ignored(upstreams: Sequence[Upstream]) -> frozenset[str]:
    return frozenset(name for one in upstreams for name in IGNORED_SAMPLING.get(one.dialect, frozenset()))


# A model server on this machine that the operator selects by the name of its software.

#: The names of such servers, and the commands that start them and load a model.
_HOW_TO_START: Final[Mapping[str, tuple[str, str]]] = {
    "ollama": ("Ollama", "ollama serve; a model: ollama pull llama3.2"),
    "lmstudio": ("LM Studio", "lms server start; a model: lms load"),
    "llamacpp": ("llama.cpp", "llama-server -m FILE.gguf --jinja"),
}


class LocalServerLlm(RemoteLlmEngine):
    """A RemoteLlmEngine for a model server on this machine. If no server runs, the error says how to start one."""

    def __init__(self, server: str, settings: RemoteLlmSettings) -> None:
        super().__init__(settings)
        self._server = server

    async def start(self) -> None:
        """Wait until the server can be used. Raises EngineFailed if it is not running."""
        try:
            await super().start()
        except EngineFailed as error:
            name, start = _HOW_TO_START[self._server]
            raise EngineFailed(
                f"{name} on this machine: {error.message} (to start it: {start}; "
                f"another server: --llm http://HOST:{LOCAL_PORTS[self._server]}/v1)",
                fatal=True,
            ) from error


class Backend(RemoteLlmEngine):
    """A RemoteLlmEngine that connects to its upstreams at its first request, since it may never be needed."""

    def __init__(self, settings: RemoteLlmSettings) -> None:
        super().__init__(settings)
        self._starting = asyncio.Lock()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        try:
            async with self._starting:
                await self.start()
        except EngineFailed as error:  # a fatal one would end the chat
            raise EngineFailed(error.message) from error
        await super().generate(request, out)
