"""``/v1/chat/completions`` and ``/v1/audio/speech``, with ordinary bodies and with streaming input."""

from __future__ import annotations

import asyncio
from functools import partial

from omni_ws.audio.encoder import encode_file
from omni_ws.audio.mime import media_type
from omni_ws.audio.pcm import SampleLayout, samples_from_bytes
from omni_ws.audio.wav import wav_header
from omni_ws.core.audio_format import AudioEncoding, AudioFormat
from omni_ws.core.chunks import InputChunk, Modality, OutputModality
from omni_ws.service.identifiers import new_id
from omni_ws.service.sessions.factory import SessionFactory
from omni_ws.transport.http.authentication import Authenticator
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.routes.event_output import (
    gather,
    held_answer,
    write_raw_audio,
)
from omni_ws.transport.routes.generation import GenerationRoutes, Source
from omni_ws.transport.routes.generation_options import chat_options, prepare_answer
from omni_ws.transport.routes.mode_a import brings_streaming_input
from omni_ws.transport.routes.named_media import MediaReader
from omni_ws.wire.openai_chat_response import ChatCompletion, ChatStream
from omni_ws.wire.openai_request import (
    ChatRequest,
    SpeechDialect,
    SpeechRequest,
    chat_wants_events,
    read_chat,
    read_speech,
    speech_wants_events,
)
from omni_ws.wire.openai_speech_response import SpeechChunks, SpeechEvents


class OpenAIRoutes(GenerationRoutes):
    """The handlers; one object a server."""

    def __init__(self, sessions: SessionFactory, authenticator: Authenticator) -> None:
        super().__init__(sessions, authenticator)
        self._media = MediaReader(sessions.config.http)

    async def chat_completions(self, exchange: HttpExchange) -> None:
        async with self.admitted(exchange) as owner:
            if await brings_streaming_input(exchange, self.config):
                stream = self.streaming_body(exchange)
                request = read_chat(await stream.parameters(), input_follows=True)
                await self._answer_chat(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self.ordinary(exchange, chat_wants_events) as body:
                request = await body.read(partial(read_chat, input_follows=False))
                chunks = await self._media.read(request.input, lambda size: exchange.keep(body.size + size))
                await self._answer_chat(exchange, request, self.feed(chunks), owner=owner)

    async def audio_speech(self, exchange: HttpExchange) -> None:
        async with self.admitted(exchange) as owner:
            if await brings_streaming_input(exchange, self.config):
                stream = self.streaming_body(exchange)
                request = read_speech(await stream.parameters(), input_follows=True)
                await self._answer_speech(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self.ordinary(exchange, speech_wants_events) as body:
                request = await body.read(partial(read_speech, input_follows=False))
                text = InputChunk(Modality.TEXT, (request.text or "").encode())
                await self._answer_speech(exchange, request, self.feed([text]), owner=owner)

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
        session, target = self.open_session(
            exchange,
            request.patch,
            owner=owner,
            samples=not streamed,
            streaming_input=streaming_input,
            prepare=partial(prepare_answer, request=request),
        )
        options = chat_options(request, model=self.sessions.model.names[0])
        if streamed:
            async with session.running(partial(source, session)):
                await self.events(exchange, session, ChatStream(options), head_at_start=streaming_input)
            return
        with held_answer(self.sessions.budget) as hold:
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
        pieces = request.dialect is SpeechDialect.CHUNKS and request.response_format == AudioEncoding.WAV
        session, target = self.open_session(
            exchange, request.patch, owner=owner, samples=whole or pieces, streaming_input=streaming_input
        )
        kind = media_type(target)
        if whole:
            with held_answer(self.sessions.budget) as hold:
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
                    await self.events(exchange, session, SpeechEvents(), head_at_start=streaming_input, done=False)
                case SpeechDialect.CHUNKS:
                    speech_id = "speech-" + (request.request_id or new_id(""))
                    piece = partial(_wav_file, target) if pieces else bytes
                    chunks = SpeechChunks(speech_id, request.response_format, kind, target.sample_rate, piece=piece)
                    await self.events(exchange, session, chunks, head_at_start=streaming_input)


def _wav_file(target: AudioFormat, pcm: bytes) -> bytes:
    """A piece of pcm16 that can be played by itself."""
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(pcm)) + pcm


async def _file(pcm: bytes, target: AudioFormat) -> bytes:
    """pcm16 at the target's own rate, as a whole file of the target's format."""

    def encode() -> bytes:
        return encode_file(samples_from_bytes(pcm, SampleLayout.S16), source_rate=target.sample_rate, target=target)

    return await asyncio.to_thread(encode)
