"""UtteranceSplitter: cuts a stream of audio into utterances, and has the one under way read while it is spoken.

Where an utterance begins and ends depends on the samples alone, counted in windows from the start of the stream:
equal audio gives equal utterances, whatever pieces it came in and however fast.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from omni_ws.audio.pcm import pcm16_from_samples
from omni_ws.audio.samples import Pcm16, Samples
from omni_ws.audio.turn_rule import START_SPAN, PrefixPadding, SpeechOffset, SpeechOnset, TurnDetector
from omni_ws.audio.vad import WINDOW_MS, WINDOW_SAMPLES, SpeechDetector
from omni_ws.engine.asr.recogniser import LiveText
from omni_ws.engine.asr.utterance import SAMPLE_RATE, Utterance, UtteranceLimits

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
    """Used by one thread at a time: ``feed`` samples, then ``advance`` until it returns None."""

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
        """Adds samples at 16 kHz; costs nothing."""
        self._unheard.append(samples)

    @property
    def ready(self) -> bool:
        """Whether ``advance`` has anything to work on or to tell: samples are judged in whole windows."""
        waiting = len(self._rest) + sum(map(len, self._unheard))
        return bool(self._events) or waiting >= WINDOW_SAMPLES

    def advance(self) -> UtteranceEvent | None:
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
        """Gives back what was borrowed. Idempotent."""
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
        """Tells of a pause that may be the end, early enough that the settled text is ready when it is."""
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
            self._padding.push(silence * np.float32(1 / 32768))

    def _cut_utterance(self) -> None:
        """Ends an utterance that grows too long; the speech goes on in a new one."""
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
