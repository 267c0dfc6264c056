"""What a microphone hears beside speech, and the formats in which it is sent, a tick of 20 ms at a time."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples, encode_mu_law, pcm16_from_samples
from omni_ws.caller.script import PIECE_MS, frame_levels

#: Of a microphone, in Hz, and its samples in a tick.
MIC_RATE: Final = 16_000
MIC_TICK: Final = MIC_RATE * PIECE_MS // 1000


def pink_noise(length: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Noise at 16 kHz with equal power in every octave from 50 Hz on."""
    spectrum = np.fft.rfft(random.normal(0, 1, length))
    frequencies = np.fft.rfftfreq(length, 1 / MIC_RATE)
    noise: NDArray[np.float64] = np.fft.irfft(spectrum / np.sqrt(np.maximum(frequencies, 50.0)), length)
    return noise


def room_noise(seconds: float, level_db: float, *, seed: int) -> Samples:
    """Pink noise at a level in dBFS; equal arguments give equal noise."""
    noise = pink_noise(int(seconds * MIC_RATE), np.random.default_rng(seed))
    return np.asarray(noise * 10 ** (level_db / 20) / np.sqrt(np.mean(noise**2)), np.float32)


def levelled(samples: Samples, dbfs: float) -> Samples:
    """Speech with its loud frames at this mean power."""
    levels = frame_levels(samples, MIC_TICK)
    loud = levels[levels > 0.05 * levels.max()]
    return np.asarray(samples * (10 ** (dbfs / 20) / np.sqrt(np.mean(loud**2))), np.float32)


def mixed(sound: Samples, other: Samples, begin: int = 0) -> Samples:
    """Two sounds at once, the second from sample ``begin`` of the first on."""
    end = begin + len(other)
    sound = np.pad(sound, (0, end - len(sound))) if end > len(sound) else sound.copy()
    sound[begin:end] += other
    return sound


class TickResampler:
    """From one rate to ``up / down`` of it, a tick in and a tick out, about two milliseconds late."""

    def __init__(self, up: int, down: int) -> None:
        self._up, self._down = up, down
        kept = 62 // up
        taps = up * kept + 1
        cutoff = 0.9 / max(up, down)
        places = np.arange(taps) - taps // 2
        # At ``up`` times the rate, below nine tenths of the lower of the two bands.
        self._filter = np.sinc(places * cutoff) * cutoff * np.hamming(taps) * up
        self._last = np.zeros(kept, np.float32)

    def resample(self, tick: Samples) -> Samples:
        block = np.concatenate([self._last, tick])
        self._last = block[-len(self._last) :]
        spread = np.zeros(self._up * len(block))
        spread[:: self._up] = block
        return np.convolve(spread, self._filter, "valid")[:: self._down].astype(np.float32)


class MicrophoneFormat:
    """A microphone's ticks as they are sent: pcm16 at 8, 16 or 24 kHz, or G.711 µ-law, as a telephone has it."""

    def __init__(self, rate: int, *, is_mu_law: bool = False) -> None:
        self.rate, self.is_mu_law = rate, is_mu_law
        ratio = {8000: (1, 2), 24_000: (3, 2)}.get(rate)
        self._resampler = None if ratio is None else TickResampler(*ratio)

    def encode(self, tick: Samples) -> bytes:
        if self._resampler is not None:
            tick = np.clip(self._resampler.resample(tick), -1, 1)
        pcm16 = pcm16_from_samples(tick)
        return encode_mu_law(pcm16) if self.is_mu_law else pcm16.tobytes()
