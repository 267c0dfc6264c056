"""RecogniserEngine: an engine for ``Task.TRANSCRIBE`` over a Recogniser."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace

from omni_ws.audio.vad import load_detector
from omni_ws.core.chunks import FinishReason, InputChunk, Modality, OutputModality, Usage
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_words
from omni_ws.engine.asr.listener import AudioPace, Carried, Listener, Listening, Seats
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Recogniser
from omni_ws.engine.base import (
    EngineCapabilities,
    EngineOutput,
    EngineState,
    Finished,
    GenerationRequest,
    InputSource,
    TextOutput,
    TranscriptGuess,
    TranscriptOutput,
)
from omni_ws.engine.decoding import DECODING_THREADS, AudioPart, decode_request
from omni_ws.engine.first_to_start import asr_capabilities
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import cores, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed

#: Continuous talkers that one core carries.
TALKERS_PER_CORE = 4


class RecogniserEngine:
    """Transcribes as the audio arrives: interim texts of the utterance under way, and a settled text of each.

    ``load`` creates the Recogniser. ``max_talkers`` requests may be listened to at once; None: as many as the cores
    carry. ``carried`` tells of a lower limit that changes. Equal audio gives equal settled texts.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[], Recogniser],
        *,
        model: str,
        languages: frozenset[str],
        max_talkers: int | None = None,
        carried: Carried | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.model = model
        self.active_requests = 0
        #: What listens; None while the engine is stopped.
        self.listening: Listening | None = None
        self._load = load
        self._languages = languages
        self._seats = max_talkers or TALKERS_PER_CORE * cores()
        self._carried = carried
        self._clock = clock
        self._decoding: ThreadPoolExecutor | None = None
        self._started = False

    @property
    def state(self) -> EngineState:
        return EngineState.OK if self._started else EngineState.STARTING

    @property
    def capabilities(self) -> EngineCapabilities:
        return asr_capabilities(
            sampling=("max_tokens", "stop"),
            sampling_no_ops=("temperature", "top_p", "seed"),
            languages=self._languages,
            word_times=True,
        )

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None:
        """Load the recogniser. Idempotent."""
        if self._started:
            return
        self._decoding = ThreadPoolExecutor(DECODING_THREADS, thread_name_prefix="decoder")
        executor = ThreadPoolExecutor(self._seats, thread_name_prefix="listener")
        self.listening = Listening(Seats(self._seats, self._carried), self._load(), executor)
        try:
            await run_in_thread(executor, load_detector)
            await run_in_thread(executor, self.listening.recogniser.start)
        except BaseException:
            await self.stop()
            raise
        self._started = True

    async def stop(self) -> None:
        self._started = False
        listening, self.listening = self.listening, None
        decoding, self._decoding = self._decoding, None
        if listening is not None:
            await asyncio.to_thread(listening.executor.shutdown)
            await asyncio.to_thread(listening.recogniser.close)
        if decoding is not None:
            await asyncio.to_thread(decoding.shutdown)

    def listening_for(self, request: GenerationRequest, listening: Listening) -> Listening:
        """Return what listens for one request: here, what listens for all."""
        return listening

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        listening, decoding = self.listening, self._decoding
        if not self._started or listening is None or decoding is None:
            raise EngineFailed("the engine is not running", fatal=True)
        listening = self.listening_for(request, listening)
        transcription = _Transcription(request, listening, decoding=decoding, clock=self._clock)
        self.active_requests += 1
        try:
            with request.media_room.share() as share:
                async with aclosing(transcription.outputs(share)) as outputs:
                    async for output in outputs:
                        yield output
        except RuntimeError as error:
            if self._started:
                raise
            raise EngineFailed("the engine has stopped", fatal=True) from error
        finally:
            try:
                await transcription.close()
            finally:
                self.active_requests -= 1


class _Transcription:
    """One request: audio in, transcripts and their text out."""

    def __init__(
        self,
        request: GenerationRequest,
        listening: Listening,
        *,
        decoding: ThreadPoolExecutor,
        clock: Callable[[], float],
    ) -> None:
        self._request = replace(request, input=_Watched(request.input, self._input_over))
        self._listening = listening
        self._decoding = decoding
        self._pace = AudioPace(clock)
        self._listener: Listener | None = None
        self._samples = 0
        self._heard = WordCounter()
        self._text = AnswerText(request.sampling)

    async def outputs(self, share: MediaShare) -> AsyncGenerator[EngineOutput, None]:
        writes = OutputModality.TEXT in self._request.modalities
        async with aclosing(self._transcripts(share)) as transcripts:
            async for transcript in transcripts:
                yield transcript
                if isinstance(transcript, TranscriptGuess) or transcript.interim:
                    continue
                self._heard.feed(transcript.text)
                async for text in self._text.add(transcript.text):
                    if writes:
                        yield TextOutput(text)
        if (rest := self._text.finish()) and writes:
            yield TextOutput(rest)
        usage = Usage(
            input_tokens=self._heard.words + sum(count_words(message.text) for message in self._request.history),
            output_tokens=self._text.words,
            input_audio_ms=round(self._samples * 1000 / SAMPLE_RATE),
        )
        yield Finished(self._text.reached or FinishReason.STOP, usage)

    async def close(self) -> None:
        """Release what listening held. Idempotent."""
        if self._listener is not None:
            await self._listener.close()

    async def _new_listener(self) -> Listener:
        tells_guesses = self._request.options.transcript_guesses
        seat = await self._listening.take_seat(self._request.conversation)
        return Listener(self._listening, seat, self._pace, tells_guesses=tells_guesses)

    def _input_over(self) -> None:
        """The input has been read, while what it said last may still be written down."""
        if self._listener is not None:
            self._listener.input_over()

    async def _transcripts(self, share: MediaShare) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        decoded = decode_request(
            self._request, {Modality.AUDIO}, sample_rate=SAMPLE_RATE, executor=self._decoding, share=share
        )
        number: int | None = None
        async with aclosing(decoded) as parts:
            async for part in parts:
                assert isinstance(part, AudioPart)
                listener = self._listener = self._listener or await self._new_listener()
                if part.part != number and number is not None:
                    async with aclosing(listener.end_part()) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
                number = part.part
                self._samples += len(part.samples)
                async with aclosing(listener.hear(part.samples)) as heard:
                    async for output in heard:
                        yield output
        if self._listener is None:
            raise EmptyInput("the request has no input")
        self._input_over()
        async with aclosing(self._listener.end_part()) as transcripts:
            async for transcript in transcripts:
                yield transcript


class _Watched(AsyncIterator[InputChunk]):
    """The InputSource of a request, which tells when it has been read to its end."""

    def __init__(self, source: InputSource, on_end: Callable[[], None]) -> None:
        self._chunks = aiter(source)
        self._on_end = on_end

    def __aiter__(self) -> AsyncIterator[InputChunk]:
        return self

    async def __anext__(self) -> InputChunk:
        try:
            return await anext(self._chunks)
        except StopAsyncIteration:
            self._on_end()
            raise
