"""Text read aloud by an upstream's ``/v1/audio/speech``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Final

import orjson

from omni_ws.audio.container import parse_audio_mime
from omni_ws.core.chunks import AudioEncoding, AudioFormat
from omni_ws.engine.base import AudioOutput
from omni_ws.engine.remote.answer_stream import DONE, event_content
from omni_ws.engine.remote.pool import Pool
from omni_ws.engine.remote.server_sent_events import EventReader, ServerSentEvent
from omni_ws.engine.remote.upstream import UpstreamAnswer
from omni_ws.engine.remote.upstream_audio import UpstreamAudio
from omni_ws.errors import EngineFailed, OmniError

_EVENTS: Final = "text/event-stream"


class RemoteVoice:
    """One request's voice: its pieces of text become one stream of audio at one rate."""

    def __init__(self, pool: Pool, *, sample_rate: int, voice: str | None, speed: float, request_id: str) -> None:
        self.output_ms = 0.0
        self._pool = pool
        self._sample_rate = sample_rate
        self._voice = voice
        self._speed = speed
        self._headers = {"X-Request-Id": request_id, "Accept": "audio/*, application/json, text/event-stream"}
        self._audio = UpstreamAudio(sample_rate=sample_rate)

    async def speak(self, text: str) -> AsyncGenerator[AudioOutput, None]:
        """The audio as it is made. Raises what the upstream's refusal means, and EngineFailed."""
        async with self._pool.post("audio/speech", self._body(text), headers=self._headers) as answer:
            outputs = self._events(answer) if answer.content_type.startswith(_EVENTS) else self._samples(answer)
            async with aclosing(outputs):
                async for output in outputs:
                    yield self._counted(output)
        for output in self._audio.flush():
            yield self._counted(output)

    def _counted(self, output: AudioOutput) -> AudioOutput:
        self.output_ms += len(output.samples) * 1000 / output.sample_rate
        return output

    def _body(self, text: str) -> bytes:
        body: dict[str, Any] = {
            "model": self._pool.model,
            "input": text,
            "response_format": "pcm",
            # Whoever knows only one of the two streams all the same.
            "stream": True,
            "stream_format": "audio",
        }
        if self._voice is not None:
            body["voice"] = self._voice
        if self._speed != 1:
            body["speed"] = self._speed
        return orjson.dumps(body)

    async def _samples(self, answer: UpstreamAnswer) -> AsyncGenerator[AudioOutput, None]:
        rate = self._rate_of(answer.content_type)
        async with aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                for output in self._audio.feed(chunk, sample_rate=rate):
                    yield output

    def _rate_of(self, content_type: str) -> int:
        if content_type.partition(";")[0].strip().lower() in ("", "application/octet-stream"):
            return self._sample_rate
        try:
            format = parse_audio_mime(content_type, default=AudioFormat(sample_rate=self._sample_rate))
        except OmniError:
            raise EngineFailed("the upstream's speech is no audio that can be read") from None
        if format.encoding not in (AudioEncoding.PCM16, AudioEncoding.WAV) or format.channels != 1:
            raise EngineFailed("the upstream's speech is neither pcm nor wav")
        return format.sample_rate

    async def _events(self, answer: UpstreamAnswer) -> AsyncGenerator[AudioOutput, None]:
        reader = EventReader()
        done = False
        async with aclosing(answer.chunks()) as chunks:
            async for chunk in chunks:
                said = False
                for event in reader.feed(chunk):
                    outputs, done = self._read_event(event, answer.upstream)
                    for output in outputs:
                        said = True
                        yield output
                    if done:
                        await answer.finish(chunks)
                        return
                answer.shows_work = said or reader.grows
            for event in reader.finish():
                outputs, done = self._read_event(event, answer.upstream)
                for output in outputs:
                    yield output
        if not done:
            raise EngineFailed("the upstream's speech ended before its end")

    def _read_event(self, event: ServerSentEvent, upstream: str) -> tuple[list[AudioOutput], bool]:
        """The audio of an event, and whether it is the last: of either of the two dialects."""
        if event.data.strip() == DONE:
            return [], True
        content = event_content(event, upstream=upstream)
        audio = content.get("audio")
        if isinstance(audio, str):
            return self._audio.feed_base64(audio), False
        done = content.get("type") == "speech.audio.done" or content.get("finish_reason") is not None
        if isinstance(audio, Mapping) and isinstance(data := audio.get("data"), str):
            rate = audio.get("sample_rate")
            return self._audio.feed_base64(data, sample_rate=rate if type(rate) is int else None), done
        return [], done
