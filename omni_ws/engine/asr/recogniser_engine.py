"""RecogniserEngine: an engine for ``Task.TRANSCRIBE`` over a Recogniser."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, aclosing
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
from omni_ws.engine.media_room import MediaShare
from omni_ws.engine.threads import cores, release_in_thread, run_in_thread
from omni_ws.errors import EmptyInput, EngineFailed
from omni_ws.profiler import events

T = TypeVar("T")


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


# One request: samples in, transcripts out; and the utterances that are heard in it.


class Listener:
    """Listens for one request: samples in, transcripts out.

    It has one of ``slots`` from the first audio to the end of the input, or to ``close``; the requests of one
    ``holder`` share a slot. ``pace`` has watched since the input began; speech is detected in ``executor``. Texts of
    utterances after the first begin with a space: put together, all texts are the whole transcript. With
    ``tells_guesses``, the text up to a pause is told while the pause lasts.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        slots: ListenerSlots,
        pace: AudioPace,
        executor: Executor,
        *,
        holder: str | None = None,
        tells_guesses: bool = False,
    ) -> None:
        #: The length of the audio so far, in samples.
        self.samples = 0
        self._transcriber = transcriber
        self._slots = slots
        #: Whether it has been given a slot, and whether it has that still.
        self._had_slot = self._has_slot = False
        self._pace = pace
        self._executor = executor
        self._holder = holder
        self._tells_guesses = tells_guesses
        #: Whether the audio comes as it is spoken.
        self._live = True
        self._splitter = UtteranceSplitter(transcriber.live_text(), transcriber.limits)
        #: The text of the newest utterance, or of what may be one.
        self._transcript: Transcript | None = None
        #: One that was given up, and still takes a thread.
        self._stale: Future[Recognised] | None = None
        #: The utterance up to a pause that lasts, while nothing is made of it.
        self._unguessed: Pcm16 | None = None
        self._separator = ""
        self._showing = False
        self._closed = False

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        """Take the next samples at 16 kHz; yield what changed. Raises EngineOverloaded where there is no slot."""
        if not self._had_slot:
            await self._slots.take(self._holder)
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
                    if self._transcript is not None and self._transcript.told:
                        yield TranscriptGuess("")
                    await self._withdraw()
                case UtteranceEnded():
                    async with aclosing(self._settle(event)) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
        await self._guess_if_free()
        if self._tells_guesses and (guess := self._transcript) is not None and (text := guess.guessed()):
            yield TranscriptGuess(self._separator + text)

    def input_over(self) -> None:
        """Give the slot back: no more audio comes. Text that is due is still worked out.

        A request without a ``holder`` keeps its slot to its end: a recording is fed faster than it is written down, and
        without a limit many recordings would all wait for one another.
        """
        if self._holder is not None:
            self._leave_slot()

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """End the utterance under way where the audio breaks off, and yield its text."""
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
        # One outdated text may still be worked out, for a thread cannot be stopped; a second one would take a core from
        # others.
        pcm = self._unguessed
        if pcm is not None and self._live and (self._stale is None or self._stale.done()):
            await self._begin(pcm)

    async def _begin(self, pcm: Pcm16) -> Transcript:
        await self._withdraw()
        self._transcript = Transcript(self._transcriber, pcm, waited_for=self._live)
        return self._transcript

    async def _withdraw(self) -> None:
        transcript, self._transcript, self._unguessed = self._transcript, None, None
        if transcript is not None:
            self._stale = await transcript.withdraw() or self._stale

    async def _settle(self, ended: UtteranceEnded) -> AsyncGenerator[TranscriptOutput, None]:
        """Yield the texts of a whole utterance: none where nothing was understood, and nothing is to be replaced."""
        transcript = self._transcript
        if transcript is None or transcript.length != len(ended.pcm):
            transcript = await self._begin(ended.pcm)
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
        self._showing = True
        return TranscriptOutput(self._separator + text, interim=True, start_ms=start_ms)


class Transcript:
    """The text of an utterance of ``length`` samples, which is worked out whether or not anybody reads it yet."""

    def __init__(self, transcriber: Transcriber, pcm: Pcm16, *, waited_for: bool) -> None:
        self.length = len(pcm)
        #: Whether it was told as a guess.
        self.told = False
        self._newest = ""
        self._changed = asyncio.Event()
        self._work = transcriber.transcribe(pcm, waited_for=waited_for, tell=self._tell)

    @property
    def done(self) -> bool:
        return self._work.done()

    def guessed(self) -> str:
        """Return the text the first time that it is there; else, or if there was an error, an empty one."""
        work = self._work
        if self.told or not work.done() or work.cancelled() or work.exception() is not None:
            return ""
        self.told = bool(work.result().text)
        return work.result().text

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield what the text is so far, until it is worked out: of the texts that nobody has read, the newest."""
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
        """Return what was understood. Raises what went wrong, EngineFailed where the recogniser has stopped."""
        if self._work.cancelled():
            raise EngineFailed("speech recognition has stopped")  # it has dropped what waited
        return self._work.result()

    async def withdraw(self) -> Future[Recognised] | None:
        """Give the work up. Return it if a thread is still busy with it: a thread cannot be stopped."""
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

#: Audio that is so many milliseconds ahead of the clock comes from a file. More than the jitter of a network, less than
#: it takes to have a first interim text.
AHEAD_MS: Final = 700

#: So much audio at once, in milliseconds, has waited somewhere, if only for an overloaded machine: no time for interim
#: texts.
BACKLOG_MS: Final = 1500


class AudioPace:
    """Whether the audio of a request comes as it is spoken, or faster: compares its length with the clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lead_ms = 0.0
        self._fed_at = clock()

    def is_live(self, audio_ms: float) -> bool:
        """Whether the audio, ``audio_ms`` more of it included, comes as it is spoken and is dealt with in time."""
        now = self._clock()
        self._lead_ms = max(0.0, self._lead_ms - (now - self._fed_at) * 1000 + audio_ms)
        self._fed_at = now
        return self._lead_ms < AHEAD_MS and audio_ms < BACKLOG_MS


# Utterances, cut out of a stream of audio.

#: Audio kept from before the windows that showed the speech.
PADDING_WINDOWS = 13 + START_SPAN

#: So much silence belongs to an utterance; from here on its settled text can be worked out, ahead of being asked for.
CLOSING_SILENCE_WINDOWS = 2

#: A speaker who pauses often would have the same words recognised again and again: then a pause must be this long.
LONG_PAUSE_WINDOWS = 8
ALWAYS_GUESSED_SAMPLES = 2 * SAMPLE_RATE
GUESS_AGAIN_GROWTH = 1.4

#: The utterance under way is read in pieces of about 100 ms: cheaper than single windows, short enough to stop between
#: two.
PIECE_SAMPLES = 3 * WINDOW_SAMPLES


@dataclass(frozen=True, slots=True)
class InterimText:
    """What the utterance seems to say so far."""

    text: str
    start_ms: int


@dataclass(frozen=True, slots=True)
class UtterancePaused:
    """The speaker pauses; if this was the end, ``pcm`` is the whole utterance."""

    pcm: Pcm16


@dataclass(frozen=True, slots=True)
class UtteranceResumed:
    """The pause was not the end."""


@dataclass(frozen=True, slots=True)
class UtteranceEnded:
    """The whole utterance."""

    pcm: Pcm16
    start_ms: int


UtteranceEvent: TypeAlias = InterimText | UtterancePaused | UtteranceResumed | UtteranceEnded


@dataclass(slots=True)
class _OpenUtterance(Utterance):
    """The utterance under way, with what was told of it."""

    #: Whether anybody has spoken in it: the rest of one that was cut may be silence.
    has_speech: bool = True
    #: Whether it has been read from its beginning until now.
    live: bool = True
    #: The length of the utterance if the current pause is its end; None while there is no such pause.
    closing_length: int | None = None
    #: Whether the current pause was told, and the length at the newest one that was.
    _paused: bool = False
    _guessed_length: int = 0
    #: The samples that have been read, and the text that was told of them.
    _read_length: int = 0
    _shown: str = ""

    def hear(self, window: Pcm16, *, is_speech: bool, quiet: bool) -> None:
        """Add a window, in which there ``is_speech`` or not; ``quiet``: whether the speaker pauses."""
        self.append(window)
        self.has_speech = self.has_speech or is_speech
        self.quiet = quiet

    def watch_pause(self, silent_windows: int) -> UtterancePaused | UtteranceResumed | None:
        """Tell of a pause that may be the end, early enough to have the settled text ready at the end."""
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
        """Note that the current pause is not the end."""
        self.closing_length = None

    def read_live(self, live_text: LiveText, *, live: bool) -> InterimText | None:
        """Have the utterance read if enough was added; tell a new text. With ``live`` False it is read no more."""
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
        if not text or text == self._shown:
            return None
        self._shown = text
        return InterimText(text, self.start_ms)


class UtteranceSplitter:
    """Cuts a stream of audio into utterances, and has the one under way read while it is spoken.

    Where an utterance begins and ends depends on the samples alone, counted in windows from the start of the stream:
    equal audio gives equal utterances, whatever pieces it came in and however fast.

    Used by one thread at a time: ``feed`` samples, then ``advance`` until it returns None.
    """

    def __init__(self, live_text: LiveText, limits: UtteranceLimits) -> None:
        self._live = True
        self._live_text = live_text
        self._limits = limits
        self._detector = SpeechDetector()
        self._turns = TurnDetector()
        self._padding = PrefixPadding(PADDING_WINDOWS * WINDOW_MS)
        #: Samples of the stream that went through ``_take_window``, or were dropped at a break.
        self._position = 0
        self._unheard: deque[Samples] = deque()
        self._rest: Samples = np.empty(0, np.float32)
        self._events: deque[UtteranceEvent] = deque()
        self._utterance: _OpenUtterance | None = None

    def feed(self, samples: Samples, *, live: bool = True) -> None:
        """Add samples at 16 kHz; costs nothing.

        ``live``: utterances are read while they are spoken. In audio that comes faster than it is spoken, the settled
        text is there as early, and interim texts would only cost time.
        """
        self._live = live
        self._unheard.append(samples)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` has anything to work on or to tell: samples are judged in whole windows."""
        waiting = len(self._rest) + sum(map(len, self._unheard))
        return bool(self._events) or waiting >= WINDOW_SAMPLES

    def advance(self) -> UtteranceEvent | None:
        """Work until something is worth telling, or until all samples are used up. Blocks."""
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
        """The audio breaks off here: the utterance under way ends. To be called once ``advance`` has returned None."""
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
        """Give back what was borrowed. Idempotent."""
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
        self._utterance = _OpenUtterance(self._position - len(before), lead=len(before) - spoken, live=self._live)
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
        """End an utterance that grows too long; the speech goes on in a new one."""
        utterance = self._utterance
        assert utterance is not None
        utterance.go_on()
        self._finish_utterance()
        self._utterance = _OpenUtterance(self._position, has_speech=False, live=self._live)
