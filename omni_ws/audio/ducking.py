"""Ducking: an answer is lowered and plays on while it is not known whether what is heard interrupts it."""

from __future__ import annotations

from typing import Final

import numpy as np

from omni_ws.audio.pcm import SampleLayout, encode_mu_law, pcm16_from_samples, samples_from_bytes
from omni_ws.core.chunks import AudioEncoding, AudioFormat

#: The factor of lowered audio: 15 dB.
DUCKED: Final = 10 ** (-15 / 20)
#: How long it takes to lower or to raise the audio: a step would click.
RAMP_SEC: Final = 0.01


class Ducker:
    """Lowers a stream of mono pcm16 or mu-law by 15 dB, and raises it again.

    Audio that is not lowered passes unchanged. ``duck`` may be called while another thread calls ``apply``.
    """

    __slots__ = ("_gain", "_layout", "_slope", "_wanted")

    def __init__(self, audio: AudioFormat) -> None:
        self._layout = SampleLayout.MU_LAW if audio.encoding is AudioEncoding.PCMU else SampleLayout.S16
        self._slope = (1 - DUCKED) / (RAMP_SEC * audio.sample_rate)
        self._gain = self._wanted = 1.0

    def duck(self, lowered: bool) -> None:
        """Lower the audio from here on, or raise it to its full level."""
        self._wanted = DUCKED if lowered else 1.0

    def settle(self) -> None:
        """End a ramp at once: nothing is playing."""
        self._gain = self._wanted

    def apply(self, audio: bytes) -> bytes:
        """Return the next audio of the stream, whole samples, at its present level."""
        gain, wanted = self._gain, self._wanted
        if gain == wanted == 1.0 or not audio:
            return audio
        samples = samples_from_bytes(audio, self._layout)
        if gain == wanted:
            samples *= np.float32(gain)
        else:
            steps = np.arange(1, len(samples) + 1) * self._slope
            gains = np.minimum(gain + steps, wanted) if gain < wanted else np.maximum(gain - steps, wanted)
            self._gain = float(gains[-1])
            samples *= gains.astype(np.float32)
        pcm16 = pcm16_from_samples(samples)
        return encode_mu_law(pcm16) if self._layout is SampleLayout.MU_LAW else pcm16.tobytes()
