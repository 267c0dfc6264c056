"""Listener: listens for one request, samples in, transcripts out; its seat, and the utterances that it hears."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, samples_from_pcm16
from omni_ws.audio.speech_watch import START_SPAN, PrefixPadding, SpeechOffset, SpeechOnset, TurnDetector
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES, SpeechDetector
from omni_ws.core.chunks import Word
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, LiveText, Recognised, Recogniser, Utterance, UtteranceLimits
from omni_ws.engine.base import TranscriptGuess, TranscriptOutput
from omni_ws.engine.threads import release_in_thread, run_in_thread
from omni_ws.errors import EngineFailed, EngineOverloaded
from omni_ws.profiler import events


@dataclass(frozen=True, slots=True)
class Listening:
    """What all listeners of an engine share. ``executor`` has a thread for every seat."""

    seats: Seats
    recogniser: Recogniser
    executor: Executor

    async def take_seat(self, holder: str | None) -> Seat:
        """Wait for a seat. Raises EngineOverloaded when there is none; see Seats."""
        seat = await self.seats.take(holder)
        self.recogniser.expect(self.seats.taken)
        return seat


@dataclass(slots=True)
class _Guess:
    """A settled text that is being worked out in case that the pause is the end of the utterance."""

    length: int
    work: Future[Recognised]
    told: bool = False


class Listener:
    """Holds ``seat`` until its input is over, at ``close`` at the latest. ``pace`` has watched since the input began.

    Texts of an utterance after the first begin with a space: put together they are the whole transcript. With
    ``tells_guesses``, what is worked out at a pause is told while the pause lasts.
    """

    def __init__(self, listening: Listening, seat: Seat, pace: AudioPace, *, tells_guesses: bool = False) -> None:
        self._listening = listening
        self._seat = seat
        self._recogniser = listening.recogniser
        self._pace = pace
        #: Whether the audio comes as it is spoken.
        self._live = True
        self._splitter = UtteranceSplitter(self._recogniser.live_text(), self._recogniser.limits)
        self._tells_guesses = tells_guesses
        self._guess: _Guess | None = None
        self._stale: Future[Recognised] | None = None
        #: The utterance up to a pause that lasts, while there is no guess at it.
        self._unguessed: Pcm16 | None = None
        self._separator = ""
        self._showing = False
        self._closed = False

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        """Take the next samples at 16 kHz; yield what changed."""
        self._live = self._pace.is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._splitter.live = self._live and not self._listening.seats.crowded
        self._splitter.feed(samples)
        while self._splitter.ready and (event := await self._advance()) is not None:
            match event:
                case InterimText(text=text, start_ms=start_ms):
                    self._showing = True
                    yield TranscriptOutput(self._separator + text, interim=True, start_ms=start_ms)
                case UtterancePaused(pcm=pcm):
                    self._unguessed = pcm
                case UtteranceResumed():
                    if self._guess is not None and self._guess.told:
                        yield TranscriptGuess("")
                    self._drop_guess()
                case UtteranceEnded():
                    if (transcript := await self._settle(event)) is not None:
                        yield transcript
        self._guess_if_free()
        if self._tells_guesses and (text := self._new_guess()):
            yield TranscriptGuess(self._separator + text)

    def _new_guess(self) -> str:
        """Return the text of the guess, once, when it has been worked out; empty text otherwise."""
        guess = self._guess
        if guess is None or guess.told or not guess.work.done():
            return ""
        if guess.work.cancelled() or guess.work.exception() is not None:  # ``_settle`` raises its error
            return ""
        guess.told = True
        return guess.work.result().text

    def input_over(self) -> None:
        """No more audio comes: somebody else may be listened to. Text that is due is still worked out.

        The seat of a request by itself is kept up to its end: a recording is fed faster than it is written down, and
        whoever sends many would have all of them wait.
        """
        if self._seat.holder is not None:
            self._seat.leave()

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """The audio breaks off; yield the text of the utterance that was under way."""
        with _recognising():
            ended = await run_in_thread(self._listening.executor, self._splitter.end)
        if ended is not None and (transcript := await self._settle(ended)) is not None:
            yield transcript

    async def close(self) -> None:
        """Release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop_guess()
        try:
            with events.span("release"):
                await release_in_thread(self._listening.executor, self._splitter.close)
        finally:
            self._seat.leave()

    async def _advance(self) -> UtteranceEvent | None:
        with _recognising():
            return await run_in_thread(self._listening.executor, self._splitter.advance)

    def _guess_if_free(self) -> None:
        # One outdated guess may still run, for it cannot be stopped; a second one would take a core from others.
        pcm = self._unguessed
        if pcm is not None and self._live and (self._stale is None or self._stale.done()):
            self._drop_guess()
            self._guess = _Guess(len(pcm), self._transcribe(pcm))

    def _transcribe(self, pcm: Pcm16) -> Future[Recognised]:
        return self._recogniser.transcribe(pcm, waited_for=self._live)

    def _drop_guess(self) -> None:
        guess, self._guess, self._unguessed = self._guess, None, None
        if guess is not None and not guess.work.cancel():
            self._stale = guess.work

    async def _settle(self, ended: UtteranceEnded) -> TranscriptOutput | None:
        """Return the settled text; None if nothing was understood and no interim text is to be replaced."""
        guess = self._guess
        if guess is None or guess.length != len(ended.pcm):
            self._drop_guess()
            guess = self._guess = _Guess(len(ended.pcm), self._transcribe(ended.pcm))
        with _recognising():
            recognised = await _result_of(guess.work)
        self._guess = None
        showing, self._showing = self._showing, False
        if not recognised.text:
            return TranscriptOutput("", start_ms=ended.start_ms) if showing else None
        separator, self._separator = self._separator, " "
        words = tuple(
            Word(word.text, ended.start_ms + word.start_ms, ended.start_ms + word.end_ms) for word in recognised.words
        )
        hearing = None if recognised.hearing is None else recognised.hearing.shifted(ended.start_ms)
        return TranscriptOutput(separator + recognised.text, start_ms=ended.start_ms, words=words, hearing=hearing)


async def _result_of(work: Future[Recognised]) -> Recognised:
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineFailed("speech recognition has stopped") from None  # the recogniser has dropped what waited


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


# Seats: how many requests may be listened to at once.

RETRY_AFTER_MS: Final = 1000
#: How long a request waits for a seat. Longer, and it is refused: its speaker waits for an answer.
MAX_WAIT_SEC: Final = 2.0

#: How many talkers are carried just now, with interim texts or without.
Carried: TypeAlias = Callable[[bool], int]


class Seats:
    """Counts who is listened to: ``most``, and no more than ``carried`` tells just now.

    While more are listened to than are carried with interim texts, seats are *crowded*: there are no such texts then.
    Requests of one ``holder``, such as a session whose speaker goes on while the turn before is still being written
    down, share one seat. Seats are given in the order in which they were asked for.
    """

    def __init__(self, most: int, carried: Carried | None = None) -> None:
        self.taken = 0
        self._most = most
        self._carried = carried
        #: Requests on the seats that have a holder, by holder.
        self._shared: dict[str, int] = {}
        self._waiting: deque[_Waiter] = deque()

    @property
    def count(self) -> int:
        """How many there are without interim texts."""
        return self._most if self._carried is None else min(self._most, self._carried(False))

    @property
    def crowded(self) -> bool:
        """Whether interim texts would be too much."""
        return self._carried is not None and self.taken > self._carried(True)

    async def take(self, holder: str | None = None) -> Seat:
        """Wait for a seat, MAX_WAIT_SEC at most. Raises EngineOverloaded when there is none by then."""
        if not self._shares(holder) and (self._waiting or self.taken >= self.count):
            await self._wait(holder)
        else:
            self._grant(holder)
        return Seat(self, holder)

    def leave(self, holder: str | None) -> None:
        """A request needs its seat no more; see Seat."""
        if holder is not None:
            self._shared[holder] -= 1
            if self._shared[holder]:
                return
            del self._shared[holder]
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self._admit(self._waiting[0].holder)

    async def _wait(self, holder: str | None) -> None:
        waiter = _Waiter(holder)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await waiter.admitted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif waiter.admitted.done() and not waiter.admitted.cancelled():
                self.leave(holder)  # it was given in the same moment
            if isinstance(error, TimeoutError):
                refusal = f"all {self.count} recognisers are in use"
                raise EngineOverloaded(refusal, retry_after_ms=RETRY_AFTER_MS) from None
            raise

    def _admit(self, holder: str | None) -> None:
        """Give a seat to the one who has waited longest, and to all who share it."""
        first = self._waiting.popleft()
        admitted = [first, *(one for one in self._waiting if holder is not None and one.holder == holder)]
        for waiter in admitted:
            if waiter is not first:
                self._waiting.remove(waiter)
            self._grant(holder)
            if not waiter.admitted.done():
                waiter.admitted.set_result(None)
            else:
                self.leave(holder)  # cancelled, and about to say so

    def _shares(self, holder: str | None) -> bool:
        return holder is not None and holder in self._shared

    def _grant(self, holder: str | None) -> None:
        self.taken += not self._shares(holder)
        if holder is not None:
            self._shared[holder] = self._shared.get(holder, 0) + 1


class Seat:
    """The place of one request, from its first audio to the end of its input."""

    def __init__(self, seats: Seats, holder: str | None) -> None:
        self._seats: Seats | None = seats
        #: Whose place it is; None where nobody can share it.
        self.holder = holder

    def leave(self) -> None:
        """It is not needed any more. Idempotent."""
        seats, self._seats = self._seats, None
        if seats is not None:
            seats.leave(self.holder)


class _Waiter:
    def __init__(self, holder: str | None) -> None:
        self.holder = holder
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


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
    #: The length of the utterance if the current pause is its end; None while there is no such pause.
    closing_length: int | None = None
    #: The length of the newest guess that was asked for.
    guessed_length: int = 0
    paused: bool = False
    has_speech: bool = True
    #: Whether it has been read from its beginning until now.
    live: bool = True
    #: The samples that have been read.
    read: int = 0
    shown: str = ""


class UtteranceSplitter:
    """Cuts a stream of audio into utterances, and has the one under way read while it is spoken.

    Where an utterance begins and ends depends on the samples alone, counted in windows from the start of the stream:
    equal audio gives equal utterances, whatever pieces it came in and however fast.

    Used by one thread at a time: ``feed`` samples, then ``advance`` until it returns None.
    """

    def __init__(self, live_text: LiveText, limits: UtteranceLimits) -> None:
        #: Whether utterances are read while they are spoken. Switched off for audio that comes faster than it is
        #: spoken: then the settled text is there as early, and interim texts would only cost time.
        self.live = True
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

    def feed(self, samples: Samples) -> None:
        """Add samples at 16 kHz; costs nothing."""
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
        utterance = self._utterance
        utterance.append(pcm16_from_samples(window))
        if probability > self._turns.threshold:
            utterance.has_speech = True
        if isinstance(event, SpeechOffset):
            self._finish_utterance()
            return
        utterance.quiet = self._turns.silent_windows > 0
        self._watch_pause(utterance)
        if utterance.length >= self._limits.longest or (
            utterance.length >= self._limits.cut_after and probability < self._turns.threshold
        ):
            self._cut_utterance()
        elif utterance.length - utterance.read >= PIECE_SAMPLES:
            self._read_live(utterance)

    def _start_utterance(self, event: SpeechOnset) -> None:
        before = self._padding.take()
        spoken = (event.detected_ms - event.audio_ms) * SAMPLE_RATE // 1000
        self._utterance = _OpenUtterance(self._position - len(before), lead=len(before) - spoken, live=self.live)
        self._utterance.append(pcm16_from_samples(before))

    def _watch_pause(self, utterance: _OpenUtterance) -> None:
        """Tell of a pause that may be the end, early enough that the settled text is ready when it is."""
        silent = self._turns.silent_windows
        if silent == 0:
            utterance.closing_length = None
            if utterance.paused:
                utterance.paused = False
                self._events.append(UtteranceResumed())
            return
        if silent == CLOSING_SILENCE_WINDOWS:
            utterance.closing_length = utterance.length
        if utterance.closing_length is None or utterance.paused or not utterance.has_speech:
            return
        grown = utterance.length >= GUESS_AGAIN_GROWTH * utterance.guessed_length
        if grown or utterance.length <= ALWAYS_GUESSED_SAMPLES or silent >= LONG_PAUSE_WINDOWS:
            utterance.paused = True
            utterance.guessed_length = utterance.length
            self._events.append(UtterancePaused(utterance.pcm(end=utterance.closing_length)))

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
        utterance.closing_length = None
        self._finish_utterance()
        self._utterance = _OpenUtterance(self._position, has_speech=False, live=self.live)

    def _read_live(self, utterance: _OpenUtterance) -> None:
        if not (utterance.live and self.live):
            # Not taken up again within the utterance: that would show a text without its beginning.
            utterance.live = False
            self._live_text.end()
            return
        text = self._live_text.read(utterance)
        if text is None:
            return
        utterance.read = utterance.length
        if text and text != utterance.shown:
            utterance.shown = text
            self._events.append(InterimText(text, utterance.start_ms))
