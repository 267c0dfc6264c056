"""RemoteVoice: a voice on any server that has ``/v1/audio/speech``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import orjson

from omni_ws.audio.container import parse_audio_mime
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.engine.base import AudioOutput, EngineCapabilities, GenerationRequest, OutputWriter
from omni_ws.engine.clauses import is_speakable
from omni_ws.engine.remote.event_stream import DONE, ServerSentEvent, UpstreamAudio, event_content
from omni_ws.engine.remote.settings import RemoteTtsSettings
from omni_ws.engine.remote.upstream import OnUpstreams, UpstreamAnswer
from omni_ws.engine.tts.speech_engine import clause_by_clause, speech_capabilities
from omni_ws.errors import EngineFailed, OmniError

_EVENT_STREAM: Final = "text/event-stream"


class RemoteVoice(OnUpstreams):
    """A Voice that sends clauses to an upstream. Its audio has the ends of clauses in the text, but no word times."""

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
        """Yield the audio of a clause as it arrives. Raises the error of the upstream's refusal, or EngineFailed."""
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
