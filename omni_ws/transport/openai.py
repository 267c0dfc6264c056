"""``/v1/chat/completions`` and ``/v1/audio/speech``, with ordinary bodies and with streaming input."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, TypeVar

from omni_ws.audio.encoder import encode_file
from omni_ws.audio.mime import media_type
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import InputChunk, Modality, OutputModality
from omni_ws.engine.base import Message as HistoryMessage
from omni_ws.errors import InvalidFrame, InvalidRequest, InvalidValue, NotFound
from omni_ws.service.identifiers import new_id
from omni_ws.service.outbox import Message
from omni_ws.service.session_factory import FILE_FORMATS, SessionFactory
from omni_ws.transport.answer_writers import (
    SSE_HEADERS,
    EventEncoder,
    error_event,
    gather,
    write_events,
    write_raw_audio,
)
from omni_ws.transport.authentication import Authenticator
from omni_ws.transport.http1 import HttpExchange
from omni_ws.transport.http_session import HttpSession, feed_all
from omni_ws.transport.mode_a import StreamingBody, is_streaming_input
from omni_ws.wire.frames import loads_object
from omni_ws.wire.openai_answer import ChatCompletion, ChatOptions, ChatStream, SpeechChunks, SpeechEvents
from omni_ws.wire.openai_request import (
    ChatRequest,
    SpeechDialect,
    SpeechRequest,
    read_chat,
    read_speech,
)

#: Larger bodies are parsed in a worker thread: parsing one holds up every other session for its time.
INLINE_BYTES: Final = 256 * 1024

Source = Callable[[HttpSession], Awaitable[None]]
Request = TypeVar("Request", ChatRequest, SpeechRequest)


class OpenAIRoutes:
    """The handlers; one object a server."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        self._sessions = sessions
        self._authenticator = authenticator
        self._config = sessions.config

    async def chat_completions(self, exchange: HttpExchange) -> None:
        async with self._admitted(exchange):
            if is_streaming_input(exchange.request):
                body = self._streaming_body(exchange)
                request = read_chat(await body.parameters(), input_follows=True)
                await self._answer_chat(exchange, request, body.feed, streaming_input=True)
                return
            async with self._ordinary(exchange) as fields:
                request = await self._read(fields, read_chat)
                await self._answer_chat(exchange, request, self._feed(request.input))

    async def audio_speech(self, exchange: HttpExchange) -> None:
        async with self._admitted(exchange):
            if is_streaming_input(exchange.request):
                body = self._streaming_body(exchange)
                request = read_speech(await body.parameters(), input_follows=True)
                if request.text:
                    raise InvalidValue("the text comes as chunks", param="input")
                await self._answer_speech(exchange, request, body.feed, streaming_input=True)
                return
            async with self._ordinary(exchange) as fields:
                request = await self._read(fields, read_speech)
                text = InputChunk(Modality.TEXT, (request.text or "").encode("utf-8", "surrogatepass"))
                await self._answer_speech(exchange, request, self._feed([text]))

    # requests

    @asynccontextmanager
    async def _admitted(self, exchange: HttpExchange) -> AsyncIterator[None]:
        """For as long as a request takes it is a session of its key and of the server."""
        key = self._authenticator.authenticate(exchange.request)
        with self._sessions.admission.session(key):
            self._sessions.check_ready()
            yield

    def _streaming_body(self, exchange: HttpExchange) -> StreamingBody:
        streaming = self._config.streaming_input
        if not streaming.enabled:
            raise NotFound("streaming input is turned off on this server")
        # A pause in the upload may last as long as a pause in a session.
        exchange.body_timeout = streaming.session_timeout_sec
        return StreamingBody(exchange, max_chunk_bytes=streaming.max_chunk_bytes)

    @asynccontextmanager
    async def _ordinary(self, exchange: HttpExchange) -> AsyncIterator[dict[str, Any]]:
        """The fields of an ordinary body, and the form in which a streaming client hears what is wrong with them.

        OpenAI's SDKs accept JSON even when they stream, and get a status; readers of events alone get the error as an
        event, without a role frame before it.
        """
        body = await exchange.read_body(self._config.http.max_body_bytes)
        try:
            fields = await asyncio.to_thread(loads_object, body) if len(body) > INLINE_BYTES else loads_object(body)
        except UnicodeDecodeError:
            raise InvalidFrame("the body is not UTF-8") from None
        try:
            yield fields
        except InvalidRequest as error:
            accept = exchange.request.headers.get("accept") or ""
            if exchange.head_sent or fields.get("stream") is not True or "application/json" in accept:
                raise
            await exchange.start(200, SSE_HEADERS)
            await exchange.write(error_event(error))
            await exchange.end()

    async def _read(self, fields: dict[str, Any], read: Callable[..., Request]) -> Request:
        """Base64 in a large body is decoded in a worker thread."""
        return await asyncio.to_thread(read, fields, input_follows=False)

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
                yield chunk._replace(payload=chunk.payload[start : start + size])

    def _session(self, patch: dict[str, Any], *, whole_audio: bool) -> tuple[HttpSession, AudioFormat]:
        """A session with this configuration, and the format that its client wants.

        For an answer that goes out whole the audio is made as samples and becomes a file at the end.
        """
        new = self._sessions.open(output_formats=FILE_FORMATS, single_request=True)
        try:
            audio = new.conversation.configure(patch).output_audio
        except InvalidRequest as error:
            # The body has at its top level what a session's configuration keeps in a group.
            error.param = error.param and error.param.removeprefix("sampling.")
            raise
        if whole_audio:
            new.conversation.configure({"output_audio": {"format": AudioEncoding.PCM16.value}})
        return HttpSession(new.conversation, new.outbox), AudioFormat(audio.format, audio.sample_rate)

    # answers

    async def _answer_chat(
        self, exchange: HttpExchange, request: ChatRequest, source: Source, *, streaming_input: bool = False
    ) -> None:
        streamed = streaming_input if request.stream is None else request.stream
        session, target = self._session(request.patch, whole_audio=not streamed)
        session.conversation.history.add(HistoryMessage(one.role, one.text) for one in request.history)
        options = ChatOptions(
            completion_id="chatcmpl-" + (request.request_id or new_id("")),
            created=int(time.time()),
            model=self._sessions.model.names[0],
            wants_text=request.wants_text,
            wants_audio=request.wants_audio,
            include_usage=request.include_usage,
            usage_on_final_chunk=request.usage_on_final_chunk,
            input_transcript=request.input_transcript,
        )
        async with session.outputs(partial(source, session)) as messages:
            if streamed:
                await self._events(exchange, messages, ChatStream(options), head_at_start=streaming_input)
                return
            outputs, final = await gather(messages)
        completion = ChatCompletion(options)
        for output in outputs:
            completion.output(output)
        audio = await asyncio.to_thread(_file, completion.audio, target) if request.wants_audio else b""
        await exchange.respond_json(200, completion.final(final, audio=audio))

    async def _answer_speech(
        self, exchange: HttpExchange, request: SpeechRequest, source: Source, *, streaming_input: bool = False
    ) -> None:
        whole = request.dialect is SpeechDialect.WHOLE
        session, target = self._session(request.patch, whole_audio=whole)
        async with session.outputs(partial(source, session)) as messages:
            match request.dialect:
                case SpeechDialect.RAW:
                    await write_raw_audio(exchange, messages, media_type(target))
                    return
                case SpeechDialect.EVENTS:
                    await self._events(exchange, messages, SpeechEvents(), head_at_start=streaming_input, done=False)
                    return
                case SpeechDialect.CHUNKS:
                    chunks = SpeechChunks(
                        new_id("speech-"), request.response_format, media_type(target), target.sample_rate
                    )
                    await self._events(exchange, messages, chunks, head_at_start=streaming_input)
                    return
            outputs, _ = await gather(messages)
        pcm = b"".join(output.payload for output in outputs if output.modality is OutputModality.AUDIO)
        file = await asyncio.to_thread(_file, pcm, target)
        await exchange.respond(200, [("Content-Type", media_type(target))], file)

    async def _events(
        self,
        exchange: HttpExchange,
        messages: AsyncIterator[Message],
        encoder: EventEncoder,
        *,
        head_at_start: bool,
        done: bool = True,
    ) -> None:
        await write_events(
            exchange,
            messages,
            encoder,
            head_at_start=head_at_start,
            done=done,
            heartbeat_sec=self._config.sse_heartbeat_sec,
        )


def _file(pcm: bytes, target: AudioFormat) -> bytes:
    """pcm16 at the target's own rate, as a whole file of the target's format."""
    samples = samples_from_bytes(pcm, SampleLayout.S16)
    return encode_file(samples, source_rate=target.sample_rate, target=target)
