"""RemoteTtsEngine: a voice behind any server that has ``/v1/audio/speech``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar, Final

import orjson

from omni_ws.audio.container import parse_audio_mime
from omni_ws.core.chunks import AudioEncoding, AudioFormat, FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.answer_limit import WordCounter
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineOutput, Finished, GenerationRequest, InputSource
from omni_ws.engine.clauses import clauses_to_read, is_speakable
from omni_ws.engine.first_to_start import check_is_heard
from omni_ws.engine.remote.answer_stream import DONE, event_content
from omni_ws.engine.remote.event_stream import EventReader, ServerSentEvent, UpstreamAudio
from omni_ws.engine.remote.settings import RemoteTtsSettings
from omni_ws.engine.remote.upstream import Pool, UpstreamAnswer, UpstreamEngine
from omni_ws.errors import EmptyInput, EngineFailed, OmniError, UnsupportedModality

_EVENT_STREAM: Final = "text/event-stream"


class RemoteTtsEngine(UpstreamEngine):
    """Does the task speech, clause by clause, while the text still arrives."""

    line_prefix: ClassVar[str] = "speech "

    def __init__(self, settings: RemoteTtsSettings) -> None:
        super().__init__(settings)
        self.settings = settings

    @property
    def capabilities(self) -> EngineCapabilities:
        return EngineCapabilities(
            input_modalities=frozenset({Modality.TEXT}),
            output_modalities=frozenset({OutputModality.AUDIO}),
            tasks=frozenset({Task.SPEECH}),
            extend=True,
            voices=self.settings.voices,
            speed=True,
        )

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        pool = self._pool
        check_is_heard(request)
        self.active_requests += 1
        try:
            voice = RemoteVoice(
                pool,
                sample_rate=self.settings.audio_sample_rate,
                voice=request.voice,
                speed=request.speed,
                request_id=request.request_id,
            )
            words = WordCounter()
            async with aclosing(_speech(request.input, words, voice)) as outputs:
                async for output in outputs:
                    if not request.sink.offer(output):
                        yield output
            usage = Usage(input_tokens=words.words, output_audio_ms=round(voice.output_ms))
            yield Finished(FinishReason.STOP, usage)
        finally:
            self.active_requests -= 1


async def _speech(source: InputSource, words: WordCounter, voice: RemoteVoice) -> AsyncGenerator[EngineOutput, None]:
    async with (
        aclosing(_text(source, words)) as text,
        aclosing(clauses_to_read(text, source)) as clauses,
    ):
        async for clause in clauses:
            if is_speakable(clause.text):
                async with aclosing(voice.speak(clause.text)) as outputs:
                    async for output in outputs:
                        yield AudioOutput(output.samples, output.sample_rate, text_end=clause.end)


async def _text(source: InputSource, words: WordCounter) -> AsyncGenerator[str, None]:
    """The text as it arrives, counted. Raises UnsupportedModality for other input, EmptyInput for none."""
    anything = False
    async for chunk in source:
        if chunk.tool_call_id is None and not chunk.payload:
            continue
        if chunk.tool_call_id is not None or chunk.modality is not Modality.TEXT:
            raise UnsupportedModality("task speech takes text", param="modality")
        anything = True
        text = chunk.payload.decode()
        words.feed(text)
        yield text
    if not anything:
        raise EmptyInput("the request has no input")


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
            outputs = self._events(answer) if answer.content_type.startswith(_EVENT_STREAM) else self._samples(answer)
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
