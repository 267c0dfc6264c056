"""Measures a sound over an answer as it begins: how long it is voiced, whether it is clear, and when it is quiet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from omni_ws.audio.pcm import RecentSamples, Samples
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, WINDOW_SAMPLES

#: After this much quiet a sound is judged, if it was voiced for no longer than JUDGED_MS. In whole windows, without the
#: detector's lag: 5 of 32 ms.
QUIET_WINDOWS: Final = 5
JUDGED_MS: Final = 700
#: A sound that is voiced for longer, and clear, is speech.
LONG_MS: Final = 800
#: A sound is clear once this many of so many windows exceed the threshold by the margin: as it takes to interrupt an
#: answer at once (``speech_watch.BARGE_IN_BAR``).
CLEAR_WINDOWS: Final = 6
CLEAR_SPAN: Final = 8
CLEAR_MARGIN: Final = 0.15
#: How long the bar stays raised behind a sound that lasts and is not clear, such as the echo of an answer.
WARY_WINDOWS: Final = 2000 // WINDOW_MS
#: What a judge hears before an onset: speech is detected with a delay.
HEARD_BEFORE: Final = 300 * SAMPLE_RATE // 1000
#: The sound that is kept for the judge, in samples: a sound of LONG_MS, what is before it, and the quiet behind it.
KEPT_SOUND: Final = HEARD_BEFORE + (LONG_MS + 2000) * SAMPLE_RATE // 1000


@dataclass(frozen=True, slots=True)
class SpeechLull:
    """A sound is quiet, for now. Detected at ``detected_ms``; it was voiced for ``voiced_ms``, and ``clear`` or not.

    ``began_ms`` is where it began in the stream. ``probability`` is that of ``backchannel_probability``; None for a
    sound of more than JUDGED_MS.
    """

    voiced_ms: int
    clear: bool
    detected_ms: int
    began_ms: int = 0
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class SpeechLasts:
    """A sound is voiced for more than LONG_MS. If it is not ``clear``, detection has begun anew behind it."""

    clear: bool
    detected_ms: int


class OnsetMeter:
    """The measures of one sound, window by window from its onset on. ``level`` is that of a clear voice.

    ``recent`` are the probabilities of the windows up to the onset, the last ``voiced`` of which are part of the sound.
    It begins behind ``began`` windows of the stream, and is quiet after ``quiet_windows``.
    """

    def __init__(self, recent: Iterable[float], *, voiced: int, began: int, level: float, quiet_windows: int) -> None:
        self.voiced = voiced
        self.clear = False
        self._began = began
        self._level = level
        self._quiet_windows = quiet_windows
        self._quiet = False
        self._lasts = False
        self._recent: deque[bool] = deque(maxlen=CLEAR_SPAN)
        for probability in recent:
            self._note(probability)

    @property
    def voiced_ms(self) -> int:
        return self.voiced * WINDOW_MS

    def feed(self, probability: float, *, silent: int, windows: int) -> SpeechLull | SpeechLasts | None:
        """Measure the next window, the last of ``silent`` silent ones; return what is known with it, or None.

        ``windows`` is the number of windows of the stream with this one.
        """
        self._note(probability)
        if not silent:
            self.voiced += 1
            self._quiet = False
            if self.voiced_ms > LONG_MS and not self._lasts:
                self._lasts = True
                return SpeechLasts(self.clear, windows * WINDOW_MS)
        elif silent >= self._quiet_windows and not self._quiet:
            self._quiet = True
            return SpeechLull(self.voiced_ms, self.clear, windows * WINDOW_MS, self._began * WINDOW_MS)
        return None

    def _note(self, probability: float) -> None:
        self._recent.append(probability > self._level)
        self.clear = self.clear or sum(self._recent) >= CLEAR_WINDOWS


def sound_of(lull: SpeechLull, recent: RecentSamples[np.float32]) -> Samples:
    """Return the voiced stretch of a sound, and what is before it, out of the latest KEPT_SOUND of its stream."""
    start = lull.began_ms // WINDOW_MS * WINDOW_SAMPLES - HEARD_BEFORE
    end = lull.detected_ms // WINDOW_MS * WINDOW_SAMPLES - QUIET_WINDOWS * WINDOW_SAMPLES
    return recent.between(start, end)
