"""The rule by which speech begins and ends, over the probabilities of speech that ``vad`` computes.

Engines and the server's turn detection share it, so that both agree on what speech is. Rule and constants were
selected in a comparison on recorded speech and noise: white and pink noise, clicks, hum and music open no turn, and
speech 10 dB above the noise is detected.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS

#: A turn begins when this many of the last ``START_SPAN`` windows are above the threshold.
START_WINDOWS = 3
START_SPAN = 4
#: The upper limit of ``StartBar.span``.
MAX_START_SPAN = 8

#: The limit of a threshold raised by ``StartBar.margin``; the model rarely reports higher probabilities.
HIGHEST_RAISED_THRESHOLD = 0.95

#: More probably than this, a speaker has finished.
LIKELY = 0.5

#: A window counts as silence only this far below the threshold, so that a fading voice does not end the turn.
HYSTERESIS = 0.15
LOWEST_SILENCE_THRESHOLD = 0.05


@dataclass(frozen=True, slots=True)
class SpeechOnset:
    """The start of a turn.

    Speech began at ``audio_ms`` in the stream and was detected at ``detected_ms``.
    """

    audio_ms: int
    detected_ms: int


@dataclass(frozen=True, slots=True)
class SpeechOffset:
    """The end of a turn.

    Speech ended at ``audio_ms`` in the stream, which was detected at ``detected_ms``.
    """

    audio_ms: int
    detected_ms: int


@dataclass(frozen=True, slots=True)
class SpeechPause:
    """A pause within a turn, about which a judge is to be asked. It was detected at ``detected_ms``."""

    detected_ms: int


TurnEvent: TypeAlias = SpeechOnset | SpeechPause | SpeechOffset


@dataclass(frozen=True, slots=True)
class JudgedPauses:
    """Pauses of which a judge says how probable it is that the speaker has finished.

    It is asked after ``ask_ms`` of silence. The turn ends after ``finished_ms`` of it where the probability is above
    ``sure``, and after ``likely_ms`` where it is above ``LIKELY``.
    """

    ask_ms: float
    finished_ms: float
    likely_ms: float
    sure: float = 0.9

    @property
    def ask_windows(self) -> int:
        return max(1, int(self.ask_ms // WINDOW_MS))

    @property
    def finished_windows(self) -> int:
        return max(self.ask_windows + 1, int(self.finished_ms // WINDOW_MS))

    @property
    def likely_windows(self) -> int:
        return max(self.finished_windows, int(self.likely_ms // WINDOW_MS))


@dataclass(frozen=True, slots=True)
class StartBar:
    """The condition for the start of a turn.

    ``windows`` of the last ``span`` windows have to exceed the threshold by more than ``margin``.
    """

    windows: int = START_WINDOWS
    span: int = START_SPAN
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= self.span <= MAX_START_SPAN:
            raise ValueError(f"windows must be between 1 and span, and span at most {MAX_START_SPAN}")


ORDINARY_BAR = StartBar()
#: For barge-in, while the server itself speaks: 192 ms of clear voice, so that its echo, a cough or a click does not
#: interrupt it.
BARGE_IN_BAR = StartBar(windows=6, span=8, margin=0.15)


class TurnDetector:
    """Derives starts and ends of speech from probabilities. Pure; its clock is the number of windows.

    A turn begins as ``bar`` demands, which may be changed at any time. It ends after ``silence_duration_ms`` of windows
    clearly below ``threshold``. With ``judged`` it may end sooner: a SpeechPause says when to ask whether the speaker
    has finished, ``answer`` takes the probability, and a window that ``needs_answer`` must not be fed without it.
    """

    def __init__(
        self,
        threshold: float = 0.5,
        silence_duration_ms: float = 480,
        *,
        bar: StartBar = ORDINARY_BAR,
        judged: JudgedPauses | None = None,
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError("threshold must be between 0 and 1")
        self.threshold = threshold
        self.bar = bar
        self.silence_threshold = max(LOWEST_SILENCE_THRESHOLD, threshold - HYSTERESIS)
        self.silence_windows = max(1, int(silence_duration_ms // WINDOW_MS))
        self.speaking = False
        #: During a turn, the windows of silence since the last window of speech.
        self.silent_windows = 0
        #: The windows processed so far.
        self.windows = 0
        self._recent: deque[float] = deque(maxlen=MAX_START_SPAN)
        # Nobody is asked where the answer would come too late.
        in_time = judged is not None and judged.finished_windows < self.silence_windows
        self._judged = judged if in_time else None
        #: The windows of silence that end the turn, by the answer about this pause; None while there is none.
        self._answered: int | None = None

    @property
    def audio_ms(self) -> int:
        """The duration of the windows processed so far, in milliseconds."""
        return self.windows * WINDOW_MS

    def feed(self, probability: float) -> TurnEvent | None:
        """Process the next window; returns the event that it causes, if any."""
        self.windows += 1
        return self._while_speaking(probability) if self.speaking else self._while_silent(probability)

    def needs_answer(self, probability: float) -> bool:
        """Whether it depends on the answer to the last SpeechPause what the next window, of this probability, does."""
        if self._judged is None or not self.speaking or self._answered is not None:
            return False
        return self.silent_windows + 1 >= self._judged.finished_windows and not self._goes_on(probability)

    def answer(self, probability: float) -> None:
        """Take how probable it is that the speaker, who pauses, has finished."""
        judged = self._judged
        self._answered = self.silence_windows
        if judged is not None and probability > LIKELY:
            windows = judged.finished_windows if probability > judged.sure else judged.likely_windows
            self._answered = min(windows, self.silence_windows)

    def end_turn(self) -> None:
        """End the current turn for another reason, such as a length limit; the next window may start a new one."""
        self.speaking = False
        self.silent_windows = 0
        self._answered = None
        self._recent.clear()

    def _while_silent(self, probability: float) -> SpeechOnset | None:
        self._recent.append(probability)
        bar = self.bar
        level = max(self.threshold, min(HIGHEST_RAISED_THRESHOLD, self.threshold + bar.margin))
        if probability <= level:
            return None
        above = [recent > level for recent in self._recent][-bar.span :]
        if sum(above) < bar.windows:
            return None
        first = self.windows - len(above) + above.index(True)
        self.end_turn()
        self.speaking = True
        return SpeechOnset(first * WINDOW_MS, self.audio_ms)

    def _while_speaking(self, probability: float) -> SpeechPause | SpeechOffset | None:
        if self._goes_on(probability):
            self.silent_windows = 0
            self._answered = None
            return None
        self.silent_windows += 1
        if self.silent_windows >= (self.silence_windows if self._answered is None else self._answered):
            ended = (self.windows - self.silent_windows) * WINDOW_MS
            self.end_turn()
            return SpeechOffset(ended, self.audio_ms)
        is_asked = self._judged is not None and self.silent_windows == self._judged.ask_windows
        return SpeechPause(self.audio_ms) if is_asked else None

    def _goes_on(self, probability: float) -> bool:
        """Whether the next window of a turn is speech.

        Between the thresholds speech continues, but only a window above the upper one resets the count of silent
        windows: otherwise a breath would keep the turn open.
        """
        return probability > (self.silence_threshold if self.silent_windows == 0 else self.threshold)


class PrefixPadding:
    """Keeps the last ``padding_ms`` of a stream, which a turn includes because speech is detected with a delay."""

    def __init__(self, padding_ms: int, *, sample_rate: int = SAMPLE_RATE) -> None:
        self.capacity = padding_ms * sample_rate // 1000
        self._blocks: deque[Samples] = deque()
        self._held = 0

    def push(self, samples: Samples) -> None:
        """Add samples and discard those older than the padding."""
        self._blocks.append(samples)
        self._held += len(samples)
        while self._blocks and self._held - len(self._blocks[0]) >= self.capacity:
            self._held -= len(self._blocks.popleft())

    def take(self) -> Samples:
        """Remove and return the padding, oldest sample first."""
        kept: Samples = np.concatenate([*self._blocks, np.empty(0, np.float32)])
        self._blocks.clear()
        self._held = 0
        return kept[max(0, len(kept) - self.capacity) :]
