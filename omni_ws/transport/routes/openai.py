"""OpenAI-compatible routes: chat, completions, speech, transcriptions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

import orjson

from omni_ws.audio.container import media_type, wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality, OutputModality, Task
from omni_ws.core.history import WORDS_UNKNOWN, Message
from omni_ws.core.json_values import language_name
from omni_ws.engine.base import AnswerOptions
from omni_ws.errors import InvalidValue, UnsupportedModality, UnsupportedParameter
from omni_ws.service import new_id
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.conversation.openai_requests import (
    chat_options,
    checked_options,
    earlier_message,
    ended_on_error,
    prepare_answer,
)
from omni_ws.service.sessions.shared_counts import SPOKEN_ANSWERS, WorkerGroup
from omni_ws.transport.http.application import Application, Router
from omni_ws.transport.http.exchange import FormPart, HttpExchange, read_form
from omni_ws.transport.http.media_fetch import MediaReader
from omni_ws.transport.recording import is_whole_json
from omni_ws.transport.routes.generation import (
    GenerationRoutes,
    encode_audio_file,
    has_streaming_input,
    is_file,
    is_streaming_input,
)
from omni_ws.transport.routes.sole_request import (
    AnswerSource,
    InputSource,
    MergedAnswers,
    SoleRequest,
    charging,
    collect_answer,
    write_raw_audio,
)
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_requests import (
    TIMED_FORMATS,
    ChatRequest,
    CompletionRequest,
    SpeechDialect,
    SpeechRequest,
    TranscriptionRequest,
    audio_file,
    chat_wants_events,
    form_fields,
    read_chat,
    read_completion,
    read_speech,
    read_transcription,
    speech_wants_events,
)
from omni_ws.wire.openai_responses import (
    ChatCompletion,
    ChatStream,
    Completion,
    ResponseOptions,
    SpeechChunks,
    SpeechEvents,
    Transcription,
    TranscriptionEvents,
    audio_id,
)
from omni_ws.wire.session_config import is_mcp
from omni_ws.wire.streaming_body import FORM_TYPE


class ChatRoutes(GenerationRoutes):
    """The handler of ``/v1/chat/completions``: a chat in a JSON body, or with input that is still arriving (Mode A)."""

    def __init__(self, app: Application, spoken: SpokenAnswers) -> None:
        super().__init__(app)
        self._media = MediaReader(self._config.http)
        self._spoken = spoken

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/chat/completions", self.chat_completions)

    async def chat_completions(self, exchange: HttpExchange) -> None:
        """Respond with a chat completion, or with its chunks as events.

        Streaming input is answered with events unless its parameters say ``"stream": false``.
        """
        async with self.admitted(exchange) as owner:
            if await has_streaming_input(exchange, self._config):
                stream = self.streaming_body(exchange)
                request = read_chat(await stream.parameters(), input_follows=True)
                history, _ = await self._content(exchange, request, 0, owner)
                await self._respond(exchange, request, stream.feed, history, owner=owner, streaming_input=True)
                return
            async with self.json_body(exchange, chat_wants_events) as body:
                request = await body.read(partial(read_chat, input_follows=False))
                history, chunks = await self._content(exchange, request, body.size, owner)
                await self._respond(exchange, request, self.split(chunks), history, owner=owner)

    async def _content(
        self, exchange: HttpExchange, request: ChatRequest, size: int, owner: str | None
    ) -> tuple[list[Message], list[InputChunk]]:
        """Return the earlier messages and the input, with references to media replaced by the media.

        ``size`` is the size of the body in bytes.
        """
        named = [part for message in request.history for part in message.parts]
        read = await self._media.read([*named, *request.input], lambda more: exchange.charge(size + more))
        earlier = iter(read[: len(named)])
        spoken = await self._spoken.find((one.audio_id for one in request.history if one.audio_id), key=owner)
        history: list[Message] = []
        for message in request.history:
            if message.audio_id is not None:
                if message.audio_id not in spoken:
                    raise InvalidValue("there is no audio of this id", param=f"{message.place}.audio.id")
                message = replace(message, text=spoken[message.audio_id])
            parts = islice(earlier, len(message.parts))
            chunks = [await self._usable(exchange, chunk, message.place, owner) for chunk in parts]
            history.append(earlier_message(message, chunks))
        return history, read[len(named) :]

    async def _usable(self, exchange: HttpExchange, chunk: InputChunk, place: str, owner: str | None) -> InputChunk:
        """Convert a part of an earlier message for the engine: speech becomes text if the engine requires that.

        Raises UnsupportedParameter or UnsupportedModality, naming the message.
        """
        able = self._sessions.engine.capabilities
        if chunk.modality is Modality.TEXT:
            return chunk
        if chunk.modality not in able.input_modalities:
            raise UnsupportedModality(f"{chunk.modality} input is not supported by this engine", param=place)
        if chunk.modality is Modality.AUDIO:
            if able.speech_in_history:
                return chunk
            if Task.TRANSCRIBE in able.tasks:
                return InputChunk(Modality.TEXT, (await self._words(exchange, chunk, owner)).encode())
        elif chunk.modality in able.pictures_in_history:
            return chunk
        raise UnsupportedParameter(f"{chunk.modality} in earlier messages is not supported by this engine", param=place)

    async def _words(self, exchange: HttpExchange, chunk: InputChunk, owner: str | None) -> str:
        """Return a transcript of the speech in an earlier message."""
        patch = ConfigurationPatch({"task": "transcribe", "modalities": ["text"]})
        session, _ = self.open_session(exchange, patch, owner=owner, samples=False, streaming_input=False)
        with charging(self._sessions.budget) as charge:
            async with session.running(self.split([chunk])):
                outputs, _ = await collect_answer(session, charge)
        text = "".join(output.text for output in outputs if output.modality is OutputModality.TEXT)
        return text.strip() or WORDS_UNKNOWN

    async def _respond(
        self,
        exchange: HttpExchange,
        request: ChatRequest,
        source: InputSource,
        history: list[Message],
        *,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        streamed = streaming_input if request.stream is None else request.stream
        tools = request.patch.fields.get("tools")
        if isinstance(tools, list) and any(map(is_mcp, tools)) and not is_whole_json(exchange.request):
            raise UnsupportedParameter("MCP servers are for bodies of JSON that come whole", param="tools")
        session, target = self.open_session(
            exchange,
            request.patch,
            owner=owner,
            samples=not streamed,
            streaming_input=streaming_input,
            prepare=partial(prepare_answer, request=request, history=history, read_whole=not streamed),
        )
        options = chat_options(request, model=self._sessions.model.names[0])
        if streamed:
            keep = partial(self._spoken.keep, audio_id(options), key=owner) if request.wants_audio else None
            async with session.running(source):
                stream = ChatStream(options, keep_spoken=keep)
                await self.stream_events(exchange, session, stream, head_at_start=streaming_input)
            return
        with charging(self._sessions.budget) as charge:
            async with session.running(source):
                outputs, final = await collect_answer(session, charge)
            completion = ChatCompletion(options)
            for output in outputs:
                completion.output(output)
            audio = await encode_audio_file(completion.audio, target) if request.wants_audio else b""
            if request.wants_audio:
                self._spoken.keep(audio_id(options), completion.spoken, key=owner)
            await exchange.respond_json(200, completion.final(final, audio=audio))


class CompletionRoutes(GenerationRoutes):
    """The handler of ``/v1/completions``: raw prompts, as texts or token ids, without a chat template."""

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/completions", self.completions)

    async def completions(self, exchange: HttpExchange) -> None:
        """Respond with the completions of all prompts of one request. Each prompt has a session of its own."""
        async with (
            self.admitted(exchange) as owner,
            self.json_body(exchange, chat_wants_events) as body,
        ):
            request = await body.read(read_completion)
            sessions: list[SoleRequest] = []
            with ExitStack() as opening:  # if one session cannot be opened, none of them ever runs
                for one in range(len(request.prompts)):
                    sessions.append(self._prompt_session(exchange, request, one, owner=owner))
                    opening.enter_context(ended_on_error(sessions[-1].conversation))
            async with self._running(request, sessions) as source:
                await self._respond(exchange, request, source)

    def _prompt_session(
        self, exchange: HttpExchange, request: CompletionRequest, index: int, *, owner: str | None
    ) -> SoleRequest:
        """Open the session of one prompt; its errors name the prompt's place in the body."""
        place = request.places[index]
        patch = replace(request.patch, names={**request.patch.names, "prompt": place}, input=place)
        asked = AnswerOptions(
            raw_prompt=True,
            token_prompt=not isinstance(request.prompts[index], str),
            echo=request.echo,
            only_echo=request.only_echo,
        )

        def prepare(conversation: Conversation) -> None:
            conversation.answer_with(checked_options(conversation, request.answer, asked))

        session, _ = self.open_session(
            exchange, patch, owner=owner, samples=False, streaming_input=False, prepare=prepare
        )
        return session

    @asynccontextmanager
    async def _running(self, request: CompletionRequest, sessions: list[SoleRequest]) -> AsyncIterator[AnswerSource]:
        """Run all sessions concurrently, until the block ends. Yields the AnswerSource of the merged answer."""
        async with AsyncExitStack() as running:
            for prompt, session in zip(request.prompts, sessions, strict=True):
                text = prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)
                source = self.split([InputChunk(Modality.TEXT, text)])
                await running.enter_async_context(session.running(source))
            if len(sessions) == 1:
                yield sessions[0]
                return
            merged = MergedAnswers(sessions, choices=request.answer.choices)
            await running.enter_async_context(merged.receiving())
            yield merged

    async def _respond(self, exchange: HttpExchange, request: CompletionRequest, source: AnswerSource) -> None:
        options = ResponseOptions(
            completion_id="cmpl-" + (request.request_id or new_id("")),
            created=int(time.time()),
            model=self._sessions.model.names[0],
            choices=len(request.prompts) * request.answer.choices,
            logprobs=request.answer.logprobs is not None,
            include_usage=request.include_usage,
            usage_on_final_chunk=request.usage_on_final_chunk,
            include_times=request.include_times,
        )
        if request.stream:
            await self.stream_events(exchange, source, Completion(options), head_at_start=False)
            return
        with charging(self._sessions.budget) as charge:
            outputs, final = await collect_answer(source, charge)
            completion = Completion(options)
            for output in outputs:
                completion.add(output)
            await exchange.respond_json(200, completion.whole(final))


class SpeechRoutes(GenerationRoutes):
    """The handler of ``/v1/audio/speech``: text read aloud, from a JSON body or while it is still arriving."""

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/audio/speech", self.audio_speech)

    async def audio_speech(self, exchange: HttpExchange) -> None:
        """Respond with audio: as one file, as raw bytes while they are produced, or in events."""
        async with self.admitted(exchange) as owner:
            if await has_streaming_input(exchange, self._config):
                stream = self.streaming_body(exchange)
                request = read_speech(await stream.parameters(), input_follows=True)
                await self._respond(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self.json_body(exchange, speech_wants_events) as body:
                request = await body.read(partial(read_speech, input_follows=False))
                text = InputChunk(Modality.TEXT, (request.text or "").encode())
                await self._respond(exchange, request, self.split([text]), owner=owner)

    async def _respond(
        self,
        exchange: HttpExchange,
        request: SpeechRequest,
        source: InputSource,
        *,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        whole = request.dialect is SpeechDialect.WHOLE
        wav_pieces = request.dialect is SpeechDialect.CHUNKS and request.response_format == AudioEncoding.WAV
        session, target = self.open_session(
            exchange, request.patch, owner=owner, samples=whole or wav_pieces, streaming_input=streaming_input
        )
        kind = media_type(target)
        if whole:
            with charging(self._sessions.budget) as charge:
                async with session.running(source):
                    outputs, _ = await collect_answer(session, charge)
                pcm = b"".join(output.payload for output in outputs if output.modality is OutputModality.AUDIO)
                await exchange.respond(200, [("Content-Type", kind)], await encode_audio_file(pcm, target))
            return
        async with session.running(source):
            match request.dialect:
                case SpeechDialect.RAW:
                    await write_raw_audio(exchange, session, kind, head_at_start=streaming_input)
                case SpeechDialect.EVENTS:
                    await self.stream_events(
                        exchange, session, SpeechEvents(), head_at_start=streaming_input, done=False
                    )
                case SpeechDialect.CHUNKS:
                    speech_id = "speech-" + (request.request_id or new_id(""))
                    piece = partial(_wav_file, target) if wav_pieces else bytes
                    chunks = SpeechChunks(speech_id, request.response_format, kind, target.sample_rate, piece=piece)
                    await self.stream_events(exchange, session, chunks, head_at_start=streaming_input)


def _wav_file(target: AudioFormat, pcm: bytes) -> bytes:
    """Return a piece of pcm16 as a whole WAV file, which clients can play without the other pieces."""
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(pcm)) + pcm


_SUBTITLE_TYPES: Final = {"srt": "application/x-subrip; charset=utf-8", "vtt": "text/vtt; charset=utf-8"}


class TranscriptionRoutes(GenerationRoutes):
    """The handlers of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``.

    The body is a form with a file, or audio that is still arriving.
    """

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/audio/transcriptions", self.transcriptions)
        router.add("POST", "/v1/audio/translations", self.translations)

    async def transcriptions(self, exchange: HttpExchange) -> None:
        """Respond with a transcript in the requested format, or with events while the audio is recognised."""
        await self._transcribe(exchange, AnswerOptions())

    async def translations(self, exchange: HttpExchange) -> None:
        """Respond with a transcript in English. Raises UnsupportedParameter if the engine cannot translate."""
        self._authenticator.authenticate(exchange.request)  # before the engine is told of
        if not self._sessions.engine.capabilities.translates:
            raise UnsupportedParameter("translation is not supported by this engine", param="model")
        await self._transcribe(exchange, AnswerOptions(translate=True))

    async def _transcribe(self, exchange: HttpExchange, options: AnswerOptions) -> None:
        async with self.admitted(exchange) as owner:
            request_type = exchange.request.content_type
            if is_streaming_input(exchange.request) or (request_type == FORM_TYPE and await is_file(exchange)):
                stream = self.streaming_body(exchange)
                request = read_transcription(await stream.parameters())
                await self._respond(exchange, request, stream.feed, options=options, owner=owner, streaming_input=True)
                return
            parts = await read_form(exchange, self._config.http.max_body_bytes)
            fields = form_fields(_texts(parts))
            streams = str(fields.get("stream")).lower() in ("true", "1")
            async with self.errors_as_events(exchange, wanted=streams):
                request = read_transcription(fields, input_field="file")
                file = _file(parts)
                chunk = audio_file(bytes(file.data), filename=file.filename or "", content_type=file.content_type)
                await self._respond(exchange, request, self.split([chunk]), options=options, owner=owner)

    async def _respond(
        self,
        exchange: HttpExchange,
        request: TranscriptionRequest,
        source: InputSource,
        *,
        options: AnswerOptions,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        language = self._language(request)
        session, _ = self.open_session(
            exchange, request.patch, owner=owner, samples=False, streaming_input=streaming_input
        )
        session.conversation.answer_with(options)
        streamed = streaming_input if request.stream is None else request.stream
        if streamed and request.response_format not in TIMED_FORMATS:
            async with session.running(source):
                await self.stream_events(
                    exchange, session, TranscriptionEvents(), head_at_start=streaming_input, done=False
                )
            return
        with charging(self._sessions.budget) as charge:
            async with session.running(source):
                outputs, final = await collect_answer(session, charge)
            transcription = Transcription(request, language=language, translates=options.translate)
            for output in outputs:
                transcription.output(output)
            match request.response_format:
                case "text":
                    kind, text = "text/plain; charset=utf-8", transcription.text() + "\n"
                case "srt" | "vtt" as subtitles:
                    kind, text = _SUBTITLE_TYPES[subtitles], transcription.subtitles()
                case _:
                    await exchange.respond_json(200, transcription.json(final))
                    return
            await exchange.respond(200, [("Content-Type", kind)], text.encode())

    def _language(self, request: TranscriptionRequest) -> str | None:
        """Return the name of the recognised language; None if neither the request nor the engine determines it.

        Raises UnsupportedParameter if the request wants timestamps and the engine has none.
        """
        capabilities = self._sessions.engine.capabilities
        if request.response_format in TIMED_FORMATS and not capabilities.word_times:
            raise UnsupportedParameter("timestamps are not supported by this engine", param="response_format")
        languages = capabilities.languages
        code = next(iter(languages)) if request.language is None and len(languages) == 1 else request.language
        return None if code is None else language_name(code)


def _texts(parts: list[FormPart]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the parts that are not files. Raises InvalidValue for a value that is not UTF-8."""
    for part in parts:
        if part.filename is None:
            try:
                yield part.name, part.data.decode()
            except UnicodeDecodeError:
                raise InvalidValue(
                    "a form field must be valid UTF-8; a file must have a filename", param=part.name[:64]
                ) from None


def _file(parts: list[FormPart]) -> FormPart:
    """Return the part with the audio file. Raises InvalidValue unless it is the only file."""
    files = [part for part in parts if part.filename is not None]
    if len(files) != 1 or files[0].name != "file":
        raise InvalidValue("exactly one file is required, in the field file", param="file")
    return files[0]


# Transcripts of answers with audio

#: Seconds for which the transcript of an answer is kept.
KNOWN_SEC: Final = 3600
#: Limits on the transcripts of each key, in answers and in characters; beyond them the oldest are dropped.
MAX_ANSWERS: Final = 1024
MAX_CHARACTERS: Final = 1 << 20


class SpokenAnswers:
    """The transcripts of spoken answers by key and id, so that clients can refer to them by ``audio.id``.

    Each worker of a server keeps the transcripts of its own answers, and asks the other workers for an id that it does
    not know. ``now`` returns a monotonic time in seconds.
    """

    def __init__(self, group: WorkerGroup | None, now: Callable[[], float]) -> None:
        self._group = group
        self._now = now
        #: The transcripts of each key by id, each with the time at which it is forgotten, oldest first.
        self._by_key: dict[str | None, OrderedDict[str, tuple[float, str]]] = {}
        if group is not None:
            group.on(SPOKEN_ANSWERS, self._tell)

    def keep(self, audio_id: str, text: str, *, key: str | None) -> None:
        """Keep the transcript of a spoken answer that was given to a client with this key."""
        own = self._by_key.setdefault(key, OrderedDict())
        own.pop(audio_id, None)
        own[audio_id] = (self._now() + KNOWN_SEC, text)
        self._drop_old(own)

    async def find(self, audio_ids: Iterable[str], *, key: str | None) -> dict[str, str]:
        """Return the transcripts by id, of those answers that this server gave to ``key`` within KNOWN_SEC."""
        if not (wanted := set(audio_ids)):
            return {}
        found = self._own(wanted, key)
        if (missing := wanted - found.keys()) and self._group is not None:
            for told in await self._group.ask_others(SPOKEN_ANSWERS, (key, tuple(missing))):
                found |= told
        return found

    async def _tell(self, asked: tuple[str | None, tuple[str, ...]]) -> dict[str, str]:
        key, audio_ids = asked
        return self._own(audio_ids, key)

    def _own(self, audio_ids: Iterable[str], key: str | None) -> dict[str, str]:
        own = self._by_key.get(key)
        if own is None:
            return {}
        self._drop_old(own)
        return {one: own[one][1] for one in audio_ids if one in own}

    def _drop_old(self, own: OrderedDict[str, tuple[float, str]]) -> None:
        characters = sum(len(text) for _, text in own.values())
        while own:
            oldest, (until, text) = next(iter(own.items()))
            if until > self._now() and len(own) <= MAX_ANSWERS and characters <= MAX_CHARACTERS:
                return
            characters -= len(text)
            del own[oldest]
