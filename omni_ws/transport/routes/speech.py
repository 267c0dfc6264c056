"""``/v1/audio/speech``: text read aloud, from a JSON body or from text that is still arriving."""

from __future__ import annotations

from functools import partial

from omni_ws.audio.container import media_type, wav_header
from omni_ws.core.chunks import AudioEncoding, AudioFormat, InputChunk, Modality, OutputModality
from omni_ws.service.failure import new_id
from omni_ws.transport.http.application import Router
from omni_ws.transport.http.exchange import HttpExchange
from omni_ws.transport.routes.generation import GenerationRoutes, InputSource, encode_audio_file
from omni_ws.transport.routes.mode_a import has_streaming_input
from omni_ws.transport.routes.response_stream import charging, collect_answer, write_raw_audio
from omni_ws.wire.openai_requests import SpeechDialect, SpeechRequest, read_speech, speech_wants_events
from omni_ws.wire.openai_responses import SpeechChunks, SpeechEvents


class SpeechRoutes(GenerationRoutes):
    """The handler of ``/v1/audio/speech``."""

    def register(self, router: Router) -> None:
        router.add("POST", "/v1/audio/speech", self.audio_speech)

    async def audio_speech(self, exchange: HttpExchange) -> None:
        """Respond with audio, whole or streamed, in the dialect that the request asks for."""
        async with self.admitted(exchange) as owner:
            if await has_streaming_input(exchange, self.config):
                stream = self.streaming_body(exchange)
                request = read_speech(await stream.parameters(), input_follows=True)
                await self._respond(exchange, request, stream.feed, owner=owner, streaming_input=True)
                return
            async with self.json_body(exchange, speech_wants_events) as body:
                request = await body.read(partial(read_speech, input_follows=False))
                text = InputChunk(Modality.TEXT, (request.text or "").encode())
                await self._respond(exchange, request, self.source_of([text]), owner=owner)

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
            with charging(self.sessions.budget) as charge:
                async with session.running(partial(source, session)):
                    outputs, _ = await collect_answer(session, charge)
                pcm = b"".join(output.payload for output in outputs if output.modality is OutputModality.AUDIO)
                await exchange.respond(200, [("Content-Type", kind)], await encode_audio_file(pcm, target))
            return
        async with session.running(partial(source, session)):
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
    """One piece of pcm16 as a WAV file of its own, which clients can play without the other pieces."""
    return wav_header(sample_rate=target.sample_rate, channels=target.channels, data_bytes=len(pcm)) + pcm
