"""Measures of a sound that turn detection uses besides voice activity detection: its level, and how it begins.

NearVoice distinguishes the speaker's voice from much softer sounds, such as a television, by the level alone.
FallingVoice finds by the level where the voice may pause. OnsetMeter measures the beginning of a sound that the user
makes while the server's answer plays (a sound *over an answer*).

Voice activity detection ignores the level: a television across the room is speech, like the speaker's own. Levels are
in decibels relative to full scale. Within speech, levels differ by more than FAR_DB, so NearVoice compares the mean
power of a quarter of a second with a level that rises quickly and falls slowly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import log10
from typing import Final

import numpy as np

from omni_ws.audio.pcm import PCM16, RecentSamples, Samples
from omni_ws.audio.vad import SAMPLE_RATE, WINDOW_MS, WINDOW_SAMPLES
from omni_ws.core.chunks import AudioEncoding, AudioFormat

#: A sound is far if it is more than this many decibels below the voice. A turn is soft if its mean power is.
FAR_DB: Final = 12.0
#: Within a turn, a sound is far only after this many windows that are so soft: a voice may be as soft at the end of a
#: sentence, and while the gain of a client settles. Not in a turn over an answer, where so much more of a television
#: would count as a long interruption.
FADING_WINDOWS: Final = 448 // WINDOW_MS
#: Sound behind a far one counts as near if it is this much louder than what would count as far.
_NEARER_DB: Final = 3.0
#: The level of digital silence, and its power.
SILENT_DB: Final = -120.0
SILENT_POWER: Final = 10 ** (SILENT_DB / 10)
#: The loudness of a window is the mean power of this many windows up to it: words fade, and a voice has gaps.
_SPAN: Final = 8
#: So many windows open a turn (``speech_watch.START_SPAN``), before the first that is judged within it.
_OPENING: Final = 4
#: The share of the way that the level moves to a louder window, and to a softer one: half of it in 10 s of speech.
_RISE: Final = 1 / 8
_FALL: Final = 1 - 0.5 ** (WINDOW_MS / 10_000)
#: A sound that was given up (``NearVoice.give_up``) counts as far until it is this much louder, or silent for
#: _SILENT_WINDOWS. Its level is the loudest of its last _LATELY_WINDOWS.
_LOUDER_DB: Final = 3.0
_SILENT_WINDOWS: Final = 480 // WINDOW_MS
_LATELY_WINDOWS: Final = 3000 // WINDOW_MS


def window_powers(samples: Samples) -> list[float]:
    """Return the mean power of each whole window of samples; the power of full scale is 1."""
    count = len(samples) // WINDOW_SAMPLES
    windows = samples[: count * WINDOW_SAMPLES].reshape(count, WINDOW_SAMPLES)
    power = np.einsum("ij,ij->i", windows, windows).astype(np.float64) / WINDOW_SAMPLES
    powers: list[float] = np.maximum(np.nan_to_num(power), SILENT_POWER).tolist()
    return powers


class NearVoice:
    """Tracks the level of the speaker's voice in one stream, and finds *far* sounds, which are much softer.

    Call ``judge`` once for each window. Within a turn, sounds are compared with the level of this turn: the speaker may
    have moved away from the microphone. While an answer plays, they are compared with all turns so far, so that a
    television does not interrupt the answer. A turn over an answer does not lower the level of the voice: after some
    such turns, a television would pass for the speaker.
    """

    def __init__(self) -> None:
        #: The level of the voice in all turns, and in the current one; None before any speech.
        self.level: float | None = None
        self._turn: float | None = None
        #: The least value of the level in the current turn.
        self._least = SILENT_DB
        #: Whether the last window was speech from afar while a turn was open.
        self.far = False
        #: The number of soft windows of speech in a row, in the current turn.
        self._soft = 0
        #: The loudest far sound since the turn's last near sound.
        self._beside = SILENT_DB
        #: The mean power below which the turn is soft, 0 if the voice was not known as it began; the power of
        #: the windows that opened the turn and of its windows of speech, and their number.
        self._soft_power = 0.0
        self._power, self._count = 0.0, 0
        self._span: deque[float] = deque(maxlen=_SPAN)
        self._lately: deque[float] = deque(maxlen=_LATELY_WINDOWS)
        #: The level up to which a sound that was given up is background; None without one.
        self._background: float | None = None
        #: The number of windows without speech since then, the latest in a row.
        self._quiet = 0

    def judge(self, probability: float, power: float, *, speaking: bool, only_near: bool) -> float:
        """Return the probability that a window is speech of the speaker: 0 for a far sound.

        ``probability``: that the window is speech at all; ``power``: its mean power, see ``window_powers``;
        ``speaking``: a turn is open; ``only_near``: a far sound must not open a turn.
        """
        self._span.append(power)
        was_far, self.far = self.far, False
        if not speaking and self._background is None and not only_near:  # most windows of a session
            self._turn = None
            return probability
        loudness = 10 * log10(sum(self._span) / len(self._span))
        if not speaking:
            self._turn = None
            far = self._is_background(probability, loudness)
            return 0.0 if far or (only_near and self._far(loudness)) else probability
        self._lately.append(loudness)
        if self._turn is None:
            self._turn, self._background, self._soft = loudness, None, 0
            self._least = SILENT_DB if self.level is None or not only_near else self.level
            self._soft_power = 0.0 if self.level is None else 10 ** ((self.level - FAR_DB) / 10)
            # The windows that opened the turn are its loudest. Without them, a voice over an answer would be judged by
            # what an echo canceller leaves of the rest.
            opening = list(self._span)[-1 - _OPENING : -1]
            self._power, self._count = sum(opening), len(opening)
        if probability < 0.5:
            return probability
        if loudness < self._turn - FAR_DB + (_NEARER_DB if was_far else 0.0):
            self._soft += 1
            if self._soft <= (0 if only_near else FADING_WINDOWS):
                return probability
            self.far = True
            self._beside = max(self._beside, loudness)
            return 0.0
        self._beside, self._soft = SILENT_DB, 0
        self._power, self._count = self._power + power, self._count + 1
        self._turn = _moved(self._turn, loudness)
        self.level = max(self._least, _moved(loudness if self.level is None else self.level, loudness))
        return probability

    @property
    def soft(self) -> bool:
        """Whether the current turn, as a whole, is much softer than the voice was before the turn."""
        return self._turn is not None and self._power < self._count * self._soft_power

    def end_beside(self) -> None:
        """Count the far sound that continued at the end of the current turn as background from now on."""
        self._background, self._quiet = self._beside + _LOUDER_DB, 0

    def give_up(self) -> None:
        """Count the sound that keeps the current turn open as background from now on."""
        self._background = max(self._lately, default=SILENT_DB) + _LOUDER_DB
        self._lately.clear()
        self._quiet = 0

    def _far(self, loudness: float) -> bool:
        return self.level is not None and loudness < self.level - FAR_DB

    def _is_background(self, probability: float, loudness: float) -> bool:
        if self._background is None:
            return False
        self._quiet = self._quiet + 1 if probability < 0.5 else 0
        if loudness > self._background or self._quiet >= _SILENT_WINDOWS:
            self._background = None
            return False
        return True


def _moved(level: float, to: float) -> float:
    return level + (to - level) * (_RISE if to > level else _FALL)


# Where the voice may pause.

#: The sound has fallen if it is so many decibels below the voice, whose level loses half of its power in so many
#: milliseconds.
FALL_DB: Final = 14.0
_FALL_POWER: Final = 10 ** (-FALL_DB / 10)
_HALF_AFTER_MS: Final = 1400.0
#: The voice may pause once the sound has fallen for so long. Most gaps within words are shorter, and pauses are noticed
#: no sooner with less, since the detector of speech lags (``python -m benchmarks words_known``).
FALLEN_MS: Final = 120.0
#: How much of the end of a chunk is measured.
_MEASURED_MS: Final = 20


class FallingVoice:
    """Tells, for each chunk of a turn, whether the voice may be pausing: it has been much softer for FALLEN_MS.

    ``falls`` takes a few microseconds a chunk, and is sometimes true within words, too.
    """

    def __init__(self) -> None:
        self._power = 0.0
        self._fallen_ms = 0.0

    def falls(self, payload: bytes, audio: AudioFormat) -> bool:
        """Return whether all chunks of the last FALLEN_MS, ``payload`` included, end softly. False if not pcm16."""
        if audio.encoding is not AudioEncoding.PCM16:
            return False
        measured = payload[len(payload) & 1 :][-2 * (audio.bytes_per_second * _MEASURED_MS // 2000) :]
        sound = np.frombuffer(measured, PCM16).astype(np.float32)
        power, length_ms = float(sound.dot(sound)) / max(1, len(sound)), audio.duration_ms(len(payload))
        self._power = max(power, self._power * 0.5 ** (length_ms / _HALF_AFTER_MS))
        self._fallen_ms = self._fallen_ms + length_ms if power < self._power * _FALL_POWER else 0.0
        return self._fallen_ms >= FALLEN_MS


# Measures a sound over an answer as it begins: how long it is voiced, whether it is clear, and when it is quiet.


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
    """The event that a sound over an answer has become quiet; it may continue. Positions are in ms of the stream.

    The sound began at ``began_ms``, and was voiced for ``voiced_ms``; its quiet was detected at ``detected_ms``.
    ``clear``: see CLEAR_WINDOWS. ``probability`` is its ``backchannel_probability``; None if it was voiced for more
    than JUDGED_MS.
    """

    voiced_ms: int
    clear: bool
    detected_ms: int
    began_ms: int = 0
    probability: float | None = None


@dataclass(frozen=True, slots=True)
class SpeechLasts:
    """The event that a sound over an answer is voiced for more than LONG_MS. If not ``clear``, its turn has ended."""

    clear: bool
    detected_ms: int


class OnsetMeter:
    """Measures one sound over an answer, window by window from its onset on.

    ``recent`` are the probabilities of speech of the windows up to the onset; the last ``voiced`` of them are part of
    the sound, which begins after ``began`` windows of the stream. The sound is quiet after ``quiet_windows`` silent
    windows. A window counts as clear voice if its probability exceeds ``level``.
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
        """Measure the next window; return the event that it causes, or None.

        ``silent`` is the number of silent windows in a row up to this one, 0 if it is voiced; ``windows`` the number of
        windows of the stream, this one included.
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
    """Return the voiced stretch of a sound and HEARD_BEFORE samples before it, out of the stream's latest samples."""
    start = lull.began_ms // WINDOW_MS * WINDOW_SAMPLES - HEARD_BEFORE
    end = lull.detected_ms // WINDOW_MS * WINDOW_SAMPLES - QUIET_WINDOWS * WINDOW_SAMPLES
    return recent.between(start, end)
