"""RemoteAsrEngine: speech recognition behind any server that has ``/v1/audio/transcriptions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import ClassVar

from omni_ws.audio.vad import load_detector
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Usage
from omni_ws.engine.answer_limit import AnswerText, WordCounter
from omni_ws.engine.asr.recogniser import SAMPLE_RATE
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    Finished,
    GenerationRequest,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.decoding import AudioPart, decode_request
from omni_ws.engine.first_to_start import asr_capabilities
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.remote.settings import RemoteAsrSettings
from omni_ws.engine.remote.transcription import RemoteTranscriber
from omni_ws.engine.remote.upstream_engine import UpstreamEngine
from omni_ws.engine.remote.utterance_listener import UtteranceListener
from omni_ws.engine.threads import run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed


class RemoteAsrEngine(UpstreamEngine):
    """Does the task transcribe: cuts the audio into utterances as it arrives, and has each written down.

    Silence is not sent. Each utterance has a settled transcript; interim ones are what the upstream streams of it.
    """

    line_prefix: ClassVar[str] = "transcription "

    def __init__(self, settings: RemoteAsrSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(settings)
        self.settings = settings
        self._clock = clock
        self._transcriber: RemoteTranscriber | None = None

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("temperature", "max_tokens", "stop"),
            languages=self.settings.languages,
            word_times=self.settings.word_times,
        )

    async def start(self) -> None:
        """Returns when at least one upstream can be used. Idempotent."""
        await super().start()
        if self._transcriber is None:
            try:
                await run_in_thread(self._threads, load_detector)
            except BaseException:
                await self.stop()
                raise
            self._transcriber = RemoteTranscriber(self._pool, word_times=self.settings.word_times)

    async def stop(self) -> None:
        self._transcriber = None
        await super().stop()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        listener = self._listener(request)
        answer, heard = AnswerText(request.sampling), WordCounter()
        writes = OutputModality.TEXT in request.modalities
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                async with aclosing(self._transcripts(request, share, listener)) as transcripts:
                    async for transcript in transcripts:
                        yield transcript
                        if isinstance(transcript, TranscriptGuess) or transcript.interim:
                            continue
                        heard.feed(transcript.text)
                        async for text in answer.add(transcript.text):
                            if writes:
                                yield TextOutput(text)
            if (rest := answer.finish()) and writes:
                yield TextOutput(rest)
            usage = Usage(
                input_tokens=heard.words,
                output_tokens=answer.words,
                input_audio_ms=round(listener.samples * 1000 / SAMPLE_RATE),
            )
            yield Finished(answer.reached or FinishReason.STOP, usage)
        finally:
            try:
                await listener.close()
            finally:
                self.active_requests -= 1

    def _listener(self, request: GenerationRequest) -> UtteranceListener:
        transcriber = self._transcriber
        if transcriber is None:
            raise EngineFailed("the engine is not running", fatal=True)
        temperature = request.sampling.get("temperature")
        fields = {"language": request.language or "", "temperature": "" if temperature is None else f"{temperature:g}"}
        speculates = self.settings.speculate
        if speculates is None:
            speculates = all(upstream.is_local for upstream in self.upstreams)
        return UtteranceListener(
            partial(transcriber.transcribe, fields=fields, request_id=request.request_id),
            executor=self._threads,
            clock=self._clock,
            speculates=speculates,
            tells_guesses=request.options.transcript_guesses,
        )

    async def _transcripts(
        self, request: GenerationRequest, share: MediaShare, listener: UtteranceListener
    ) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        decoded = decode_request(
            request, {Modality.AUDIO}, sample_rate=SAMPLE_RATE, executor=self._threads, share=share
        )
        number: int | None = None
        async with aclosing(decoded) as parts:
            async for part in parts:
                assert isinstance(part, AudioPart)
                if number is not None and part.part != number:
                    async with aclosing(listener.end_part()) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
                number = part.part
                async with aclosing(listener.hear(part.samples)) as outputs:
                    async for output in outputs:
                        yield output
        if number is None:
            raise EmptyInput("the request has no input")
        async with aclosing(listener.end_part()) as transcripts:
            async for transcript in transcripts:
                yield transcript
