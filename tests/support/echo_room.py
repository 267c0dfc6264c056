"""A simulated room in which a microphone hears a loudspeaker: late, coloured and reverberant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omni_ws.audio.pcm import Samples

SAMPLE_RATE = 16_000


@dataclass(frozen=True, slots=True)
class Room:
    """``delay_ms`` lie between the buffers of the devices; the echo is louder than what is played by ``gain_db``.

    The sound is 60 dB weaker after ``reverberation_sec``. ``distortion`` is how hard a small loudspeaker is driven; one
    at 0 is perfect.
    """

    delay_ms: int
    gain_db: float
    reverberation_sec: float
    distortion: float = 0.0

    def echo(self, played: Samples) -> Samples:
        """What the microphone hears of ``played``, both at 16 kHz, as long as that."""
        driven = np.tanh(self.distortion * played) / self.distortion if self.distortion else played
        response = self._response()
        length = len(played) + len(response)
        spectrum = np.fft.rfft(driven, length) * np.fft.rfft(response, length)
        echo = np.fft.irfft(spectrum * _loudspeaker(length), length)[: len(played)]
        delay = self.delay_ms * SAMPLE_RATE // 1000
        late = np.concatenate((np.zeros(delay), echo))[: len(played)]
        return np.asarray(late * 10 ** (self.gain_db / 20), np.float32)

    def _response(self) -> Samples:
        """The direct sound, and reflections that carry half as much of the energy."""
        generator = np.random.default_rng(11)
        time = np.arange(int(self.reverberation_sec * SAMPLE_RATE)) / SAMPLE_RATE
        reflections = generator.normal(0, 1, len(time)) * 10 ** (-3 * time / self.reverberation_sec)
        reflections[: SAMPLE_RATE // 500] = 0
        reflections *= np.sqrt(0.5 / np.sum(reflections**2))
        reflections[0] = 1
        return np.asarray(reflections, np.float32)


def _loudspeaker(length: int) -> Samples:
    """The response of a small one: weak below 200 Hz and above 6 kHz."""
    frequency = np.fft.rfftfreq(length, 1 / SAMPLE_RATE)
    low = (frequency / 200) ** 2
    return np.asarray(low / (1 + low) / (1 + (frequency / 6000) ** 4), np.float32)
