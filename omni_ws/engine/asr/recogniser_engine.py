"""RecogniserEngine: an engine for ``Task.TRANSCRIBE`` over a Recogniser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from omni_ws.audio.vad import load_detector
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Usage
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_history
from omni_ws.engine.asr.listener import AudioPace, Listener
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Recogniser
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineState,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.decoding import DECODING_THREADS, AudioPart, decode_request
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import cores, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed


class RecogniserEngine:
    """Transcribes as the audio arrives: interim texts of the utterance under way, and a settled text of each.

    It cuts the audio into utterances, and ``recogniser`` writes them down: in this process, on vLLM or behind a server.
    Silence does not reach it. Equal audio gives equal settled texts.
    """

    def __init__(self, recogniser: Recogniser, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.recogniser = recogniser
        self.name = recogniser.name
        self.model = recogniser.model
        self.hosts = recogniser.hosts
        self.active_requests = 0
        #: Where speech is detected; None while the engine is stopped.
        self.threads: ThreadPoolExecutor | None = None
        self._clock = clock
        self._started = False

    @property
    def state(self) -> EngineState:
        return self.recogniser.state if self._started else EngineState.STARTING

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.recogniser.capabilities

    def describe(self) -> tuple[str, ...]:
        return self.recogniser.describe()

    async def start(self) -> None:
        """Load the recogniser. Idempotent."""
        if self._started:
            return
        self.threads = ThreadPoolExecutor(max(DECODING_THREADS, cores()), thread_name_prefix="listener")
        try:
            await run_in_thread(self.threads, load_detector)
            await self.recogniser.start()
        except BaseException:
            await self.stop()
            raise
        self.model = self.recogniser.model
        self._started = True

    async def stop(self) -> None:
        self._started = False
        threads, self.threads = self.threads, None
        if threads is not None:
            await asyncio.to_thread(threads.shutdown)
        await self.recogniser.stop()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        if not self._started or self.threads is None:
            raise EngineFailed("the engine is not running", fatal=True)
        listener = Listener(
            self.recogniser.transcriber(request),
            self.recogniser.slots,
            AudioPace(self._clock),
            self.threads,
            holder=request.conversation,
            tells_guesses=request.options.transcript_guesses,
        )
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                await _write_down(request, out, listener, share)
        except RuntimeError as error:
            if self._started:
                raise
            raise EngineFailed("the engine has stopped", fatal=True) from error
        finally:
            try:
                await listener.close()
            finally:
                self.active_requests -= 1


async def _write_down(request: GenerationRequest, out: OutputWriter, listener: Listener, share: MediaShare) -> None:
    """Write the transcripts of one request, the text that they make, and the end."""
    heard, answer = WordCounter(), AnswerText(request.sampling)
    writes = OutputModality.TEXT in request.modalities
    async with aclosing(_transcripts(request, listener, share)) as transcripts:
        async for transcript in transcripts:
            out.write(transcript)
            await out.drain()
            if isinstance(transcript, TranscriptGuess) or transcript.interim:
                continue
            heard.feed(transcript.text)
            async for text in answer.add(transcript.text):
                if writes:
                    out.write(TextOutput(text))
    if (rest := answer.finish()) and writes:
        out.write(TextOutput(rest))
    usage = Usage(
        input_tokens=heard.words + count_history(request.history),
        output_tokens=answer.words,
        input_audio_ms=round(listener.samples * 1000 / SAMPLE_RATE),
    )
    out.write(Finished(answer.reached or FinishReason.STOP, usage))


async def _transcripts(
    request: GenerationRequest, listener: Listener, share: MediaShare
) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
    number: int | None = None
    decoded = decode_request(
        request, {Modality.AUDIO}, share=share, sample_rate=SAMPLE_RATE, on_end=listener.input_over
    )
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
    listener.input_over()
    async with aclosing(listener.end_part()) as transcripts:
        async for transcript in transcripts:
            yield transcript
