"""RecogniserEngine: an engine for ``Task.TRANSCRIBE`` over a Recogniser."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import numpy as np

from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, samples_from_pcm16
from omni_ws.audio.speech_watch import START_SPAN, PrefixPadding, SpeechOffset, SpeechOnset, TurnDetector
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES, SpeechDetector, load_detector
from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Usage, Word
from omni_ws.engine.answer_limit import AnswerText, WordCounter, count_history
from omni_ws.engine.asr.recogniser import (
    SAMPLE_RATE,
    ListenerSlots,
    LiveText,
    Recognised,
    Recogniser,
    Transcriber,
    Utterance,
    UtteranceLimits,
)
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
from omni_ws.engine.threads import MediaShare, cores, release_in_thread, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed
from omni_ws.profiler import events

T = TypeVar("T")


class RecogniserEngine:
    """An engine that transcribes audio as it arrives: interim texts of the current utterance, then its final text.

    The audio is cut into utterances, which ``recogniser`` transcribes: in this process, on vLLM or on a remote server.
    Silence is not passed to the recogniser. Equal audio gives equal final texts.
    """

    def __init__(self, recogniser: Recogniser, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.recogniser = recogniser
        self.name = recogniser.name
        self.model = recogniser.model
        self.hosts = recogniser.hosts
        self.active_requests = 0
        #: The threads that detect speech; None while the engine is stopped.
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
            tell_guess=out.write if request.options.transcript_guesses else None,
            may_wait=lambda: request.cut.made,
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
    """Write the transcripts of one request, their text as the answer, and a Finished."""
    heard, answer = WordCounter(), AnswerText(request.sampling)
    writes = OutputModality.TEXT in request.modalities
    async with aclosing(_transcripts(request, listener, share)) as transcripts:
        async for transcript in transcripts:
            if not transcript.interim and transcript.text:
                # For the next utterance.
                request.heard_language.note(transcript.hearing, named=request.language)
            out.write(transcript)
            await out.drain()
            if transcript.interim:
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
) -> AsyncGenerator[TranscriptOutput, None]:
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


# One request: samples in, transcripts out; and the utterances in its audio.


class Listener:
    """The transcription of one request's audio: samples in, transcripts out.

    A listener holds one of ``slots`` from the first audio to the end of the input, or to ``close``; ``holder`` and
    ``may_wait`` are passed to ``ListenerSlots.take``. ``pace`` was created when the input began. Speech detection runs
    in ``executor``. The text of each utterance after the first begins with a space, so that the joined texts are the
    whole transcript. With ``tell_guess``, the listener calls it with a TranscriptGuess while the speaker pauses, as
    soon as the text is known, and yields the interim text after each reading, even if it has not changed.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        slots: ListenerSlots,
        pace: AudioPace,
        executor: Executor,
        *,
        holder: str | None = None,
        tell_guess: Callable[[TranscriptGuess], None] | None = None,
        may_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        #: The length of the audio so far, in samples.
        self.samples = 0
        self._transcriber = transcriber
        self._slots = slots
        #: Whether it was ever given a slot, and whether it still holds that slot.
        self._had_slot = self._has_slot = False
        self._pace = pace
        self._executor = executor
        self._holder = holder
        self._may_wait = may_wait
        self._tell_guess = tell_guess
        #: Whether the audio arrives at the speed of speech, and whether no more comes.
        self._live, self._over = True, False
        tells_all = tell_guess is not None
        self._splitter = UtteranceSplitter(transcriber.live_text(), transcriber.limits, tells_all=tells_all)
        #: The transcript of the newest utterance, or of an utterance that may end at the current pause.
        self._transcript: Transcript | None = None
        #: The work on a transcript that was withdrawn, which still occupies a thread.
        self._stale: Future[Recognised] | None = None
        #: The utterance up to the current pause, until its transcription is started.
        self._unguessed: Pcm16 | None = None
        self._separator = ""
        self._showing = False
        self._closed = False

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput, None]:
        """Process samples, at 16 kHz, and yield new transcripts.

        Raises EngineOverloaded if there is no slot, and the errors of the recogniser.
        """
        if not self._had_slot:
            await self._slots.take(self._holder, may_wait=self._may_wait)
            self._had_slot = self._has_slot = True
        self.samples += len(samples)
        self._live = self._pace.is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._splitter.feed(samples, live=self._live and not self._slots.crowded)
        while self._splitter.ready and (event := await self._in_thread(self._splitter.advance)) is not None:
            match event:
                case InterimText(text=text, start_ms=start_ms):
                    yield self._interim(text, start_ms)
                case UtterancePaused(pcm=pcm) if self._transcriber.speculates:
                    self._unguessed = pcm
                case UtteranceResumed():
                    if self._transcript is not None and self._transcript.told and self._tell_guess is not None:
                        self._tell_guess(TranscriptGuess(""))
                    await self._withdraw()
                case UtteranceEnded():
                    async with aclosing(self._settle(event)) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
        await self._guess_if_free()

    def input_over(self) -> None:
        """Return the slot, because no more audio comes. The last transcripts can still be made.

        A request without a ``holder`` keeps its slot until ``close``: a recording arrives faster than it is
        transcribed, and without a limit many recordings would slow one another down.
        """
        self._over = True
        if self._holder is not None:
            self._leave_slot()

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """End the current utterance, because the audio ends or is interrupted, and yield its texts."""
        if (ended := await self._in_thread(self._splitter.end)) is not None:
            async with aclosing(self._settle(ended)) as transcripts:
                async for transcript in transcripts:
                    yield transcript

    async def close(self) -> None:
        """Release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._withdraw()
            with events.span("release"):
                await release_in_thread(self._executor, self._splitter.close)
        finally:
            self._leave_slot()

    def _leave_slot(self) -> None:
        if self._has_slot:
            self._has_slot = False
            self._slots.leave(self._holder)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        with _recognising():
            return await run_in_thread(self._executor, work)

    async def _guess_if_free(self) -> None:
        # One withdrawn transcription may still run, since a thread cannot be stopped; a second one would take a core
        # from others.
        pcm = self._unguessed
        if pcm is not None and self._live and (self._stale is None or self._stale.done()):
            await self._begin(pcm, self._guessed)

    async def _begin(self, pcm: Pcm16, guessed: Callable[[Recognised], None] | None) -> Transcript:
        await self._withdraw()
        self._transcript = Transcript(self._transcriber, pcm, waited_for=self._live, guessed=guessed)
        return self._transcript

    def _guessed(self, recognised: Recognised) -> None:
        if self._tell_guess is not None:
            self._tell_guess(TranscriptGuess(self._separator + recognised.text, recognised.hearing))

    async def _withdraw(self) -> None:
        transcript, self._transcript, self._unguessed = self._transcript, None, None
        if transcript is not None:
            self._stale = await transcript.withdraw() or self._stale

    async def _settle(self, ended: UtteranceEnded) -> AsyncGenerator[TranscriptOutput, None]:
        """Yield the transcripts of a complete utterance, the last one final.

        If no words were recognised, the final transcript is empty, and is yielded only to replace an interim one.
        """
        transcript = self._transcript
        if transcript is None or transcript.length != len(ended.pcm):
            # An utterance that was cut, of which the speaker says more, is no guess.
            transcript = await self._begin(ended.pcm, self._guessed if self._over else None)
        with _recognising():
            async with aclosing(transcript.texts()) as texts:
                async for text in texts:
                    yield self._interim(text, ended.start_ms)
        self._transcript = None
        recognised = transcript.result()
        showing, self._showing = self._showing, False
        if recognised.text:
            yield _placed(recognised, ended.start_ms, separator=self._separator)
            self._separator = " "
        elif showing:
            yield TranscriptOutput("", start_ms=ended.start_ms)

    def _interim(self, text: str, start_ms: int) -> TranscriptOutput:
        self._showing = self._showing or bool(text)
        return TranscriptOutput(self._separator + text, interim=True, start_ms=start_ms)


class Transcript:
    """A transcription of an utterance of ``length`` samples; the constructor starts it.

    ``waited_for`` is as for ``Transcriber.transcribe``. ``guessed`` is called once, on the event loop, as soon as the
    text of the result is known; the times of the words may still be missing. It is not called if the text is empty or
    the transcription was withdrawn.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        pcm: Pcm16,
        *,
        waited_for: bool,
        guessed: Callable[[Recognised], None] | None = None,
    ) -> None:
        self.length = len(pcm)
        #: Whether the text was told as a guess.
        self.told = False
        self._guessed = guessed
        self._newest = ""
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._work = transcriber.transcribe(
            pcm, waited_for=waited_for, tell=self._tell, tell_untimed=self._tell_untimed
        )
        if guessed is not None:
            asyncio.wrap_future(self._work).add_done_callback(self._on_done)

    @property
    def done(self) -> bool:
        return self._work.done()

    def _tell_untimed(self, recognised: Recognised) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._guess, recognised)

    def _on_done(self, work: asyncio.Future[Recognised]) -> None:
        if not work.cancelled() and work.exception() is None:  # an error is raised by ``result``
            self._guess(work.result())

    def _guess(self, recognised: Recognised) -> None:
        guessed, self._guessed = self._guessed, None
        if guessed is not None and recognised.text:
            self.told = True
            guessed(recognised)

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the newest preliminary text whenever there is one, until the transcription is done."""
        work = asyncio.wrap_future(self._work)
        work.add_done_callback(lambda _: self._changed.set())
        try:
            while not work.done():
                await self._changed.wait()
                self._changed.clear()
                if self._newest and not work.done():
                    newest, self._newest = self._newest, ""
                    yield newest
        finally:
            if not work.cancel() and not work.cancelled():
                work.exception()  # which ``result`` raises

    def result(self) -> Recognised:
        """Return the result. Raises the error of the transcription, or EngineFailed if the recogniser has stopped."""
        if self._work.cancelled():
            raise EngineFailed("speech recognition has stopped")  # it has dropped what waited
        return self._work.result()

    async def withdraw(self) -> Future[Recognised] | None:
        """Cancel the transcription. If a thread is already busy with it and cannot be stopped, return its Future."""
        self._guessed = None
        work, cancelled = self._work, self._work.cancel()
        if not isinstance(work, Future):
            await asyncio.gather(work, return_exceptions=True)
            return None
        return None if cancelled else work

    def _tell(self, text: str) -> None:
        self._newest = text
        self._changed.set()


def _placed(recognised: Recognised, start_ms: int, *, separator: str) -> TranscriptOutput:
    words = tuple(Word(word.text, start_ms + word.start_ms, start_ms + word.end_ms) for word in recognised.words)
    hearing = None if recognised.hearing is None else recognised.hearing.shifted(start_ms)
    return TranscriptOutput(separator + recognised.text, start_ms=start_ms, words=words, hearing=hearing)


def _recognising() -> AbstractContextManager[None]:
    return events.span("recogniser", "encoder_start", "encoder_end", modality="audio")


# The pace of the audio.

#: Audio that is ahead of the clock by so many milliseconds comes from a file. More than the jitter of a network, less
#: than it takes to make a first interim text.
AHEAD_MS: Final = 700

#: Audio that arrives in a piece of at least so many milliseconds has waited somewhere, perhaps on an overloaded
#: machine: then there is no time for interim texts.
BACKLOG_MS: Final = 1500


class AudioPace:
    """A comparison of audio's duration with the clock, to distinguish live speech from audio that arrives faster."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lead_ms = 0.0
        self._fed_at = clock()

    def is_live(self, audio_ms: float) -> bool:
        """Note that ``audio_ms`` of audio have arrived; return whether audio arrives at the speed of speech.

        Returns False also if this piece alone lasts BACKLOG_MS or more.
        """
        now = self._clock()
        self._lead_ms = max(0.0, self._lead_ms - (now - self._fed_at) * 1000 + audio_ms)
        self._fed_at = now
        return self._lead_ms < AHEAD_MS and audio_ms < BACKLOG_MS


# Utterances, cut out of a stream of audio.

#: How much audio an utterance includes from before the detection of its speech.
PADDING_WINDOWS = 13 + START_SPAN

#: How much silence at its end belongs to an utterance. After it, the final text can be computed in advance. With one
#: window the recogniser would be asked 32 ms sooner, and lose the ends of words that are spoken from afar.
CLOSING_SILENCE_WINDOWS = 2

#: If a speaker pauses often, only pauses of at least this length start a transcription, lest the same words be
#: transcribed again and again.
LONG_PAUSE_WINDOWS = 8
ALWAYS_GUESSED_SAMPLES = 2 * SAMPLE_RATE
GUESS_AGAIN_GROWTH = 1.4

#: The current utterance is offered to the LiveText about every 100 ms: cheaper than for each window, and often enough
#: to stop in time.
PIECE_SAMPLES = 3 * WINDOW_SAMPLES


@dataclass(frozen=True, slots=True)
class InterimText:
    """An event: a preliminary text of the current utterance."""

    text: str
    start_ms: int


@dataclass(frozen=True, slots=True)
class UtterancePaused:
    """An event: the speaker has paused. If the utterance ends with this pause, ``pcm`` is the whole utterance."""

    pcm: Pcm16


@dataclass(frozen=True, slots=True)
class UtteranceResumed:
    """An event: the speaker has gone on after a pause."""


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """An event: an utterance has ended; ``pcm`` is all of it."""

    pcm: Pcm16
    start_ms: int


UtteranceEvent: TypeAlias = InterimText | UtterancePaused | UtteranceResumed | UtteranceEnded


@dataclass(slots=True)
class _OpenUtterance(Utterance):
    """The current utterance, with the pause and the interim text that were last reported of it."""

    #: Whether it contains speech: the rest of an utterance that was cut may be silence.
    has_speech: bool = True
    #: Whether interim texts were made from its beginning until now.
    live: bool = True
    #: The length of the utterance if the current pause is its end; None while there is no such pause.
    closing_length: int | None = None
    #: Whether the current pause was reported, and the length at the pause that was reported last.
    _paused: bool = False
    _guessed_length: int = 0
    #: The number of samples at the last interim text, and that text.
    _read_length: int = 0
    _shown: str = ""
    #: Whether equal texts are returned again, and the number of readings at the last text.
    tells_all: bool = False
    _readings: int = 0

    def hear(self, window: Pcm16, *, is_speech: bool, quiet: bool) -> None:
        """Add a window of samples; ``is_speech``: whether it contains speech; ``quiet``: whether the speaker pauses."""
        self.append(window)
        self.has_speech = self.has_speech or is_speech
        self.quiet = quiet

    def watch_pause(self, silent_windows: int) -> UtterancePaused | UtteranceResumed | None:
        """Return an event if a pause has begun that may end the utterance, or if such a pause is over.

        ``silent_windows`` is the length of the current silence. UtterancePaused comes so early that the final text can
        be ready when the end of the utterance is certain.
        """
        if silent_windows == 0:
            self.closing_length = None
            if self._paused:
                self._paused = False
                return UtteranceResumed()
            return None
        if silent_windows == CLOSING_SILENCE_WINDOWS:
            self.closing_length = self.length
        if self.closing_length is None or self._paused or not self.has_speech:
            return None
        grown = self.length >= GUESS_AGAIN_GROWTH * self._guessed_length
        if grown or self.length <= ALWAYS_GUESSED_SAMPLES or silent_windows >= LONG_PAUSE_WINDOWS:
            self._paused, self._guessed_length = True, self.length
            return UtterancePaused(self.pcm(end=self.closing_length))
        return None

    def go_on(self) -> None:
        """Note that the utterance does not end with the current pause."""
        self.closing_length = None

    def read_live(self, live_text: LiveText, *, live: bool) -> InterimText | None:
        """Ask ``live_text`` for the interim text if enough audio was added; return it if it has changed.

        With ``tells_all``, an unchanged text of a new reading is returned, too. Once ``live`` was False, this utterance
        gets no more interim texts.
        """
        if self.length - self._read_length < PIECE_SAMPLES:
            return None
        if not (self.live and live):
            # Not taken up again within the utterance: that would show a text without its beginning.
            self.live = False
            live_text.end()
            return None
        text = live_text.read(self)
        if text is None:
            return None
        self._read_length = self.length
        is_news = bool(text) and text != self._shown
        if not is_news and (not self.tells_all or live_text.readings == self._readings):
            return None
        self._shown, self._readings = text, live_text.readings
        return InterimText(text, self.start_ms)


class UtteranceSplitter:
    """A splitter of a stream of audio into utterances. ``live_text`` makes interim texts of the current utterance.

    Where an utterance begins and ends depends only on the samples, counted in windows from the start of the stream, and
    not on the pieces in which they arrive, or on their speed: equal audio gives equal utterances.

    Used by one thread at a time: ``feed`` samples, then call ``advance`` until it returns None. With ``tells_all``, an
    interim text is reported after each reading, even if it has not changed.
    """

    def __init__(self, live_text: LiveText, limits: UtteranceLimits, *, tells_all: bool = False) -> None:
        self._live = True
        self._tells_all = tells_all
        self._live_text = live_text
        self._limits = limits
        self._detector = SpeechDetector()
        self._turns = TurnDetector()
        self._padding = PrefixPadding(PADDING_WINDOWS * WINDOW_MS)
        #: The number of samples that were processed by ``_take_window``, or dropped at an interruption.
        self._position = 0
        self._unheard: deque[Samples] = deque()
        self._rest: Samples = np.empty(0, np.float32)
        self._events: deque[UtteranceEvent] = deque()
        self._utterance: _OpenUtterance | None = None

    def feed(self, samples: Samples, *, live: bool = True) -> None:
        """Queue samples, at 16 kHz, for ``advance``.

        Interim texts are made only with ``live``. For audio that arrives faster than speech they would only cost time:
        its final texts are ready as early as interim ones would be.
        """
        self._live = live
        self._unheard.append(samples)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` has an event or a whole window of samples to process."""
        waiting = len(self._rest) + sum(map(len, self._unheard))
        return bool(self._events) or waiting >= WINDOW_SAMPLES

    def advance(self) -> UtteranceEvent | None:
        """Process samples up to the next event, and return it; None when all whole windows are processed. Blocks."""
        while not self._events:
            if len(self._rest) < WINDOW_SAMPLES:
                if not self._unheard:
                    break
                self._rest = np.concatenate((self._rest, *self._unheard))
                self._unheard.clear()
                continue
            window, self._rest = self._rest[:WINDOW_SAMPLES], self._rest[WINDOW_SAMPLES:]
            self._take_window(window)
        return self._events.popleft() if self._events else None

    def end(self) -> UtteranceEnded | None:
        """End the current utterance because the audio ends or is interrupted; return it, or None if there is none.

        To be called after ``advance`` has returned None.
        """
        utterance = self._utterance
        if utterance is not None:
            utterance.append(pcm16_from_samples(self._rest))
            self._finish_utterance()
        self._position += len(self._rest)
        self._rest = np.empty(0, np.float32)
        self._detector.reset()
        self._turns.end_turn()
        self._padding.take()
        ended = self._events.popleft() if self._events else None
        assert ended is None or isinstance(ended, UtteranceEnded)
        return ended

    def close(self) -> None:
        """Release the LiveText and drop the queued samples. Idempotent."""
        self._unheard.clear()
        self._utterance = None
        self._live_text.end()

    def _take_window(self, window: Samples) -> None:
        (probability,) = self._detector.process(window)
        event = self._turns.feed(probability)
        self._position += WINDOW_SAMPLES
        if self._utterance is None:
            self._padding.push(window)
            if isinstance(event, SpeechOnset):
                self._start_utterance(event)
            return
        utterance, silent = self._utterance, self._turns.silent_windows
        is_speech = probability > self._turns.threshold
        utterance.hear(pcm16_from_samples(window), is_speech=is_speech, quiet=silent > 0)
        if isinstance(event, SpeechOffset):
            self._finish_utterance()
            return
        self._note(utterance.watch_pause(silent))
        if utterance.length >= self._limits.longest or (
            utterance.length >= self._limits.cut_after and probability < self._turns.threshold
        ):
            self._cut_utterance()
        else:
            self._note(utterance.read_live(self._live_text, live=self._live))

    def _note(self, event: UtteranceEvent | None) -> None:
        if event is not None:
            self._events.append(event)

    def _start_utterance(self, event: SpeechOnset) -> None:
        before = self._padding.take()
        spoken = (event.detected_ms - event.audio_ms) * SAMPLE_RATE // 1000
        self._utterance = _OpenUtterance(
            self._position - len(before), lead=len(before) - spoken, live=self._live, tells_all=self._tells_all
        )
        self._utterance.append(pcm16_from_samples(before))

    def _finish_utterance(self) -> None:
        utterance, self._utterance = self._utterance, None
        assert utterance is not None
        self._live_text.end()
        if utterance.has_speech:
            self._events.append(UtteranceEnded(utterance.pcm(end=utterance.closing_length), utterance.start_ms))
        if utterance.closing_length is not None:
            silence = utterance.pcm(start=utterance.closing_length)
            self._padding.push(samples_from_pcm16(silence))

    def _cut_utterance(self) -> None:
        """End an utterance that has become too long, and begin a new one with the speech that follows."""
        utterance = self._utterance
        assert utterance is not None
        utterance.go_on()
        self._finish_utterance()
        self._utterance = _OpenUtterance(self._position, has_speech=False, live=self._live, tells_all=self._tells_all)
