"""``/v1/chat/completions`` and ``/v1/audio/speech``, with ordinary bodies and with streaming input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from omni_ws.audio.encoder import encode_file
from omni_ws.audio.mime import media_type
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import InputChunk, InputMode, Modality, OutputModality
from omni_ws.errors import NotFound, OmniError
from omni_ws.service.identifiers import new_id
from omni_ws.service.session_factory import FILE_FORMATS, SessionFactory
from omni_ws.transport.answer_writers import (
    EventEncoder,
    gather,
    held_answer,
    write_error_event,
    write_events,
    write_raw_audio,
)
from omni_ws.transport.authentication import Authenticator
from omni_ws.transport.chat_session import chat_options, configure, prepare_answer
from omni_ws.transport.http1 import HttpExchange
from omni_ws.transport.http_session import HttpSession, feed_all
from omni_ws.transport.json_body import beside, read_json_object
from omni_ws.transport.media_files import read_files
from omni_ws.transport.mode_a import StreamingBody, is_streaming_input
from omni_ws.wire.openai_answer import ChatCompletion, ChatStream
from omni_ws.wire.openai_fields import ConfigurationPatch
from omni_ws.wire.openai_request import (
    ChatRequest,
    SpeechDialect,
    SpeechRequest,
    chat_wants_events,
    read_chat,
    read_speech,
    speech_wants_events,
)
from omni_ws.wire.openai_speech_answer import SpeechChunks, SpeechEvents

Source = Callable[[HttpSession], Awaitable[None]]
Request = TypeVar("Request", ChatRequest, SpeechRequest)


@dataclass(frozen=True, slots=True)
class _OrdinaryBody:
    fields: dict[str, Any]
    size: int

    async def read(self, read: Callable[..., Request]) -> Request:
        return await beside(self.size, partial(read, self.fields, input_follows=False))


class OpenAIRoutes:
    """The handlers; one object a server."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._config = sessions.config

    async def chat_completions(self, exchange: HttpExchange) -> None:
        async with self._admitted(exchange) as owner:
            if is_streaming_input(exchange.request):
                stream = self._streaming_body(exchange)
                request = read_chat(await stream.parameters(), input_follows=True)
                await self._answer_chat(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self._ordinary(exchange, chat_wants_events) as body:
                request = await body.read(read_chat)
                chunks = await read_files(self._config.http, request.input)
                await self._answer_chat(exchange, request, self._feed(chunks), owner=owner)

    async def audio_speech(self, exchange: HttpExchange) -> None:
        async with self._admitted(exchange) as owner:
            if is_streaming_input(exchange.request):
                stream = self._streaming_body(exchange)
                request = read_speech(await stream.parameters(), input_follows=True)
                await self._answer_speech(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self._ordinary(exchange, speech_wants_events) as body:
                request = await body.read(read_speech)
                text = InputChunk(Modality.TEXT, (request.text or "").encode())
                await self._answer_speech(exchange, request, self._feed([text]), owner=owner)

    # requests

    @asynccontextmanager
    async def _admitted(self, exchange: HttpExchange) -> AsyncIterator[str | None]:
        """For as long as a request takes it is a session of its key, whose name is yielded, and of the server."""
        key = self._authenticator.authenticate(exchange.request)
        admission = self._sessions.admission
        with admission.session(key):
            self._sessions.check_ready()
            exchange.input_pace = admission.input_pace(key)
            yield None if key is None else key.name

    def _streaming_body(self, exchange: HttpExchange) -> StreamingBody:
        streaming = self._config.streaming_input
        if not streaming.enabled:
            raise NotFound("streaming input is turned off on this server")
        return StreamingBody(
            exchange, max_chunk_bytes=streaming.max_chunk_bytes, session_timeout_sec=streaming.session_timeout_sec
        )

    @asynccontextmanager
    async def _ordinary(
        self, exchange: HttpExchange, wants_events: Callable[[Mapping[str, Any]], bool]
    ) -> AsyncIterator[_OrdinaryBody]:
        """An ordinary body, and the form in which its client hears what goes wrong before the answer began.

        OpenAI's SDKs accept JSON even when they stream, and get a status; readers of events alone get the error as an
        event, without a role frame before it.
        """
        fields, size = await read_json_object(
            exchange, self._config.http.max_body_bytes, otherwise="; a stream of input needs X-Streaming-Input: true"
        )
        try:
            yield _OrdinaryBody(fields, size)
        except OmniError as error:
            accepted = ",".join(exchange.request.headers.get_all("accept")).lower()
            if exchange.head_sent or not wants_events(fields) or "application/json" in accepted:
                raise
            await write_error_event(exchange, error)

    def _feed(self, chunks: Iterable[InputChunk]) -> Source:
        return lambda session: feed_all(session, self._pieces(chunks))

    def _pieces(self, chunks: Iterable[InputChunk]) -> Iterator[InputChunk]:
        """Chunks of a size that sessions take; an image stays whole."""
        size = self._config.streaming_input.max_chunk_bytes
        for chunk in chunks:
            if chunk.modality is Modality.IMAGE:
                yield chunk
                continue
            for start in range(0, len(chunk.payload), size):
                yield replace(chunk, payload=chunk.payload[start : start + size])

    def _session(
        self, patch: ConfigurationPatch, *, owner: str | None, whole_audio: bool, streaming_input: bool
    ) -> tuple[HttpSession, AudioFormat]:
        """A session with this configuration, and the format that its client wants.

        For an answer that goes out whole the audio is made as samples and becomes a file at the end.
        """
        new = self._sessions.open(output_formats=FILE_FORMATS, single_request=True, owner=owner)
        target = configure(new.conversation, patch)
        if whole_audio:
            new.conversation.configure({"output_audio": {"format": AudioEncoding.PCM16.value}})
        if new.conversation.configuration.effective.after_start is InputMode.SNAPSHOT and not streaming_input:
            # A start halfway through what is all at hand would lose the other half.
            new.conversation.configure({"start_policy": "on_end_only"})
        return HttpSession(new.conversation, new.outbox), target

    # answers

    async def _answer_chat(
        self,
        exchange: HttpExchange,
        request: ChatRequest,
        source: Source,
        *,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        streamed = streaming_input if request.stream is None else request.stream
        session, target = self._session(
            request.patch, owner=owner, whole_audio=not streamed, streaming_input=streaming_input
        )
        prepare_answer(session.conversation, request)
        options = chat_options(request, model=self._sessions.model.names[0])
        if streamed:
            async with session.running(partial(source, session)):
                await self._events(exchange, session, ChatStream(options), head_at_start=streaming_input)
            return
        with held_answer(self._sessions.budget) as hold:
            async with session.running(partial(source, session)):
                outputs, final = await gather(session, hold)
            completion = ChatCompletion(options)
            for output in outputs:
                completion.output(output)
            audio = await _file(completion.audio, target) if request.wants_audio else b""
            await exchange.respond_json(200, completion.final(final, audio=audio))

    async def _answer_speech(
        self,
        exchange: HttpExchange,
        request: SpeechRequest,
        source: Source,
        *,
        owner: str | None,
        streaming_input: bool = False,
    ) -> None:
        whole = request.dialect is SpeechDialect.WHOLE
        session, target = self._session(request.patch, owner=owner, whole_audio=whole, streaming_input=streaming_input)
        kind = media_type(target)
        if whole:
            with held_answer(self._sessions.budget) as hold:
                async with session.running(partial(source, session)):
                    outputs, _ = await gather(session, hold)
                pcm = b"".join(output.payload for output in outputs if output.modality is OutputModality.AUDIO)
                await exchange.respond(200, [("Content-Type", kind)], await _file(pcm, target))
            return
        async with session.running(partial(source, session)):
            match request.dialect:
                case SpeechDialect.RAW:
                    await write_raw_audio(exchange, session, kind, head_at_start=streaming_input)
                case SpeechDialect.EVENTS:
                    await self._events(exchange, session, SpeechEvents(), head_at_start=streaming_input, done=False)
                case SpeechDialect.CHUNKS:
                    chunks = SpeechChunks(new_id("speech-"), request.response_format, kind, target.sample_rate)
                    await self._events(exchange, session, chunks, head_at_start=streaming_input)

    async def _events(
        self,
        exchange: HttpExchange,
        session: HttpSession,
        encoder: EventEncoder,
        *,
        head_at_start: bool,
        done: bool = True,
    ) -> None:
        await write_events(
            exchange,
            session,
            encoder,
            head_at_start=head_at_start,
            done=done,
            heartbeat_sec=self._config.sse_heartbeat_sec,
        )


async def _file(pcm: bytes, target: AudioFormat) -> bytes:
    """pcm16 at the target's own rate, as a whole file of the target's format."""

    def encode() -> bytes:
        return encode_file(samples_from_bytes(pcm, SampleLayout.S16), source_rate=target.sample_rate, target=target)

    return await asyncio.to_thread(encode)
