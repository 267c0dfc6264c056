"""WebRTC's echo canceller (AEC3) and noise suppressor, by the library pywebrtc-audio, imported on first use."""

from __future__ import annotations

import importlib.util
import math
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from omni_ws.audio.pcm import Pcm16, Samples, pcm16_from_samples, samples_from_pcm16

PACKAGE: Final = "pywebrtc_audio"
#: While the loudspeaker sounds, and so long after it, sound of which the canceller leaves less than this is silenced:
#: it is echo that is yet to be learnt, as in the first words of a conversation. A person may be as loud as the echo.
TAIL_MS: Final = 500
LEFT_OVER: Final = 10 ** (-18 / 10)
#: The weight of the energy of 20 ms when the next 20 ms are judged: together they are some 100 ms.
MEMORY: Final = 0.8
#: Quieter samples are no sound.
QUIET: Final = 300

#: The library works in frames of 10 ms, and the server at 16 kHz.
RATE: Final = 16_000
FRAME: Final = RATE // 100
#: By how many samples the suppressor's output is late.
_SUPPRESSOR_DELAY: Final = 96

NoiseReduction: TypeAlias = Literal["near_field", "far_field"]
#: The library's levels: 12 dB for a microphone at the mouth, 18 dB for one in the room.
_LEVELS: Final[dict[NoiseReduction, int]] = {"near_field": 1, "far_field": 2}


@cache
def has_library() -> bool:
    """Whether the library is installed. It is looked for once, as each session asks."""
    return importlib.util.find_spec(PACKAGE) is not None


class EchoRemover:
    """Takes what a loudspeaker plays out of what a microphone hears; both are 16-bit mono at ``sample_rate``.

    How late the echo is, up to half a second, is found out. Sound of which less than ``left_over`` is left is silenced.
    For use by one thread at a time. Raises ImportError without the library.
    """

    def __init__(self, sample_rate: int, *, left_over: float = LEFT_OVER) -> None:
        import pywebrtc_audio as library

        self._processor: Any = library.AudioProcessor(sample_rate=sample_rate, echo_cancellation=True)
        #: Hum and a constant, which the canceller takes out as well, are no echo.
        self._without_hum: Any = library.AudioProcessor(sample_rate=sample_rate, high_pass_filter=True)
        self._left_over = left_over
        self._samples_per_ms = sample_rate / 1000
        self._tail_ms = 0.0
        #: The energy of what was heard and of what was passed on, of late.
        self._heard = self._kept = 0.0

    def process(self, near: Pcm16, far: Pcm16) -> Pcm16:
        """Return what is heard (``near``) without the echo; ``far`` is played. Both are 10 or 20 ms."""
        cleaned: Pcm16 = self._processor.process(near, far)
        lasts_ms = len(near) / self._samples_per_ms
        memory = math.pow(MEMORY, lasts_ms / 20)
        self._heard = memory * self._heard + _energy(self._without_hum.process(near))
        self._kept = memory * self._kept + _energy(cleaned)
        self._tail_ms = TAIL_MS if far.max() > QUIET else self._tail_ms - lasts_ms
        if self._tail_ms > 0 and self._kept < self._left_over * self._heard:
            return np.zeros_like(near)
        return cleaned


def _energy(samples: Pcm16) -> float:
    values = samples.astype(np.float32)
    return float(np.dot(values, values))


class NoiseSuppressor:
    """Takes steady noise out of audio at 16 kHz. It gives as many samples as it takes, save the last 16 ms.

    For use by one thread at a time. Raises ImportError without the library.
    """

    def __init__(self, kind: NoiseReduction) -> None:
        import pywebrtc_audio as library

        self._processor: Any = library.NoiseSuppressor(sample_rate=RATE, level=_LEVELS[kind])
        self._rest = np.empty(0, np.int16)
        self._skip = _SUPPRESSOR_DELAY

    def process(self, samples: Samples) -> Samples:
        """Return the next samples without noise."""
        waiting = np.concatenate((self._rest, pcm16_from_samples(samples)))
        whole = len(waiting) // FRAME * FRAME
        self._rest = waiting[whole:]
        if not whole:
            return np.empty(0, np.float32)
        quieter: Pcm16 = self._processor.process(waiting[:whole])
        skipped, self._skip = self._skip, max(0, self._skip - whole)
        return samples_from_pcm16(quieter[skipped:])
