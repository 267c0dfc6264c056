"""RemoteTtsEngine: a voice behind any server that has ``/v1/audio/speech``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import ClassVar

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.answer_limit import WordCounter
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineOutput, Finished, GenerationRequest, InputSource
from omni_ws.engine.clauses import clauses_to_read, is_speakable
from omni_ws.engine.first_to_start import check_is_heard
from omni_ws.engine.remote.settings import RemoteTtsSettings
from omni_ws.engine.remote.speech import RemoteVoice
from omni_ws.engine.remote.upstream_engine import UpstreamEngine
from omni_ws.errors import EmptyInput, UnsupportedModality


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
