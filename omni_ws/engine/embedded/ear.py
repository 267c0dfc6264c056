"""One stream of audio cut into utterances, with live recognition of the one under way. Synchronous.

Where an utterance begins and ends depends on the samples alone, counted in windows from the start of the stream:
equal audio gives equal utterances, however it was cut on its way here and however fast it came.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples
from omni_ws.audio.turn_rule import START_SPAN, PrefixPadding, SpeechOffset, SpeechOnset, TurnDetector
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES, SpeechDetector
from omni_ws.engine.embedded.recogniser import PRIMING_SAMPLES, SAMPLE_RATE, Recogniser, to_pcm16
from omni_ws.engine.loan_pool import LoanPool

#: Audio kept from before the windows that showed the speech.
PADDING_WINDOWS = 13 + START_SPAN

#: So much silence belongs to an utterance; from here on its final text can be worked out, ahead of being asked for.
CLOSING_SILENCE_WINDOWS = 4

#: A speaker who pauses often would have the same words decoded again and again: then a pause must be this long first.
LONG_PAUSE_WINDOWS = 8
ALWAYS_GUESSED_SAMPLES = 2 * SAMPLE_RATE
GUESS_AGAIN_GROWTH = 1.4

#: Live recognition takes pieces of about 100 ms: cheaper than single windows, short enough to stop between two.
PIECE_SAMPLES = 3 * WINDOW_SAMPLES

#: Utterances are cut at the first weak window after the one length, and in any case at the other: whole utterances are
#: held in memory and decoded in one go.
CUT_AFTER_SAMPLES = 12 * SAMPLE_RATE
MAX_UTTERANCE_SAMPLES = 15 * SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class Partial:
    """What the utterance seems to say so far."""

    text: str
    start_ms: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The speaker pauses; if this was the end, ``pcm`` is the whole utterance."""

    pcm: NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class HearingResumed:
    """The pause was not the end."""


@dataclass(frozen=True, slots=True)
class HearingEnded:
    """The whole utterance."""

    pcm: NDArray[np.int16]
    start_ms: int


EarEvent: TypeAlias = Partial | Paused | HearingResumed | HearingEnded


@dataclass(slots=True)
class _Utterance:
    start_sample: int
    blocks: list[NDArray[np.int16]] = field(default_factory=list)
    length: int = 0
    #: Samples before the speech itself.
    lead: int = 0
    #: Where the utterance ends if the current pause is its end; None while there is no such pause.
    closing_length: int | None = None
    #: Length of the newest guess that was asked for.
    guessed_length: int = 0
    paused: bool = False
    has_speech: bool = True
    #: Whether it is decoded while it is spoken, from its beginning until now.
    live: bool = True
    #: Samples that the live recogniser has had.
    decoded: int = 0
    shown: str = ""

    def append(self, block: NDArray[np.int16]) -> None:
        self.blocks.append(block)
        self.length += len(block)

    def pcm(self, start: int = 0, end: int | None = None) -> NDArray[np.int16]:
        whole = np.concatenate(self.blocks)
        self.blocks = [whole]
        return whole[start:end]


class Ear:
    """Used by one thread at a time. ``feed`` samples, then ``advance`` until it returns None."""

    def __init__(self, recognisers: LoanPool[Recogniser]) -> None:
        #: Whether utterances are decoded while they are spoken. Switched off for audio that comes faster than it is
        #: spoken: then the final text is there as early, and partial texts would only cost time.
        self.live = True
        self._recognisers = recognisers
        self._detector = SpeechDetector()
        self._recogniser: Recogniser | None = None
        self._turns = TurnDetector()
        self._padding = PrefixPadding(PADDING_WINDOWS * WINDOW_MS)
        #: Samples of the stream that went through ``_take_window``, or were dropped at a break.
        self._position = 0
        self._unheard: deque[Samples] = deque()
        self._rest: Samples = np.empty(0, np.float32)
        self._events: deque[EarEvent] = deque()
        self._utterance: _Utterance | None = None

    def feed(self, samples: Samples) -> None:
        """Adds samples at 16 kHz; costs nothing."""
        self._unheard.append(samples)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` has anything to work on or to tell: samples are judged in whole windows."""
        waiting = len(self._rest) + sum(map(len, self._unheard))
        return bool(self._events) or waiting >= WINDOW_SAMPLES

    def advance(self) -> EarEvent | None:
        """Works until something is worth telling, or until all samples are used up. Blocks."""
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

    def end(self) -> HearingEnded | None:
        """The audio breaks off here: the utterance under way ends. To be called once ``advance`` has returned None."""
        utterance = self._utterance
        if utterance is not None:
            utterance.append(to_pcm16(self._rest))
            self._finish_utterance()
        self._position += len(self._rest)
        self._rest = np.empty(0, np.float32)
        self._detector.reset()
        self._turns.end_turn()
        self._padding.take()
        ended = self._events.popleft() if self._events else None
        assert ended is None or isinstance(ended, HearingEnded)
        return ended

    def close(self) -> None:
        """Gives back what was borrowed. Idempotent."""
        self._unheard.clear()
        self._utterance = None
        self._stop_live()

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
        utterance.append(to_pcm16(window))
        if probability > self._turns.threshold:
            utterance.has_speech = True
        if isinstance(event, SpeechOffset):
            self._finish_utterance()
            return
        self._watch_pause(utterance)
        if utterance.length >= MAX_UTTERANCE_SAMPLES or (
            utterance.length >= CUT_AFTER_SAMPLES and probability < self._turns.threshold
        ):
            self._cut_utterance()
        elif utterance.length - utterance.decoded >= PIECE_SAMPLES:
            self._decode_live(utterance)

    def _start_utterance(self, event: SpeechOnset) -> None:
        before = self._padding.take()
        spoken = (event.detected_ms - event.audio_ms) * SAMPLE_RATE // 1000
        self._utterance = _Utterance(self._position - len(before), lead=len(before) - spoken, live=self.live)
        self._utterance.append(to_pcm16(before))

    def _watch_pause(self, utterance: _Utterance) -> None:
        """Tells of a pause that may be the end, early enough that the final text is ready when it is."""
        silent = self._turns.silent_windows
        if silent == 0:
            utterance.closing_length = None
            if utterance.paused:
                utterance.paused = False
                self._events.append(HearingResumed())
            return
        if silent == CLOSING_SILENCE_WINDOWS:
            utterance.closing_length = utterance.length
        if utterance.closing_length is None or utterance.paused or not utterance.has_speech:
            return
        grown = utterance.length >= GUESS_AGAIN_GROWTH * utterance.guessed_length
        if grown or utterance.length <= ALWAYS_GUESSED_SAMPLES or silent >= LONG_PAUSE_WINDOWS:
            utterance.paused = True
            utterance.guessed_length = utterance.length
            self._events.append(Paused(utterance.pcm(end=utterance.closing_length)))

    def _finish_utterance(self) -> None:
        utterance, self._utterance = self._utterance, None
        assert utterance is not None
        self._stop_live()
        if utterance.has_speech:
            start_ms = utterance.start_sample * 1000 // SAMPLE_RATE
            self._events.append(HearingEnded(utterance.pcm(end=utterance.closing_length), start_ms))
        if utterance.closing_length is not None:
            silence = utterance.pcm(start=utterance.closing_length)
            self._padding.push(silence * np.float32(1 / 32768))

    def _cut_utterance(self) -> None:
        """Ends an utterance that grows too long; the speech goes on in a new one."""
        utterance = self._utterance
        assert utterance is not None
        utterance.closing_length = None
        self._finish_utterance()
        self._utterance = _Utterance(self._position, has_speech=False, live=self.live)

    def _decode_live(self, utterance: _Utterance) -> None:
        if not (utterance.live and self.live):
            # Not taken up again within the utterance: that would show a text without its beginning.
            utterance.live = False
            self._stop_live()
            return
        if self._recogniser is None:
            if utterance.length - utterance.lead < PRIMING_SAMPLES:
                return
            # The stream goes on while a recogniser is being loaded; what was said meanwhile is made up for.
            self._recogniser = self._recognisers.borrow_ready()
            if self._recogniser is None:
                return
            self._recogniser.begin(utterance.pcm(utterance.lead, utterance.lead + PRIMING_SAMPLES))
        self._recogniser.hear(utterance.pcm(start=utterance.decoded))
        utterance.decoded = utterance.length
        text = self._recogniser.partial()
        if text and text != utterance.shown:
            utterance.shown = text
            self._events.append(Partial(text, utterance.start_sample * 1000 // SAMPLE_RATE))

    def _stop_live(self) -> None:
        recogniser, self._recogniser = self._recogniser, None
        if recogniser is not None:
            recogniser.end()
            self._recognisers.give_back(recogniser)
