"""Sounds as a server hears them: in a room, with noise, over a telephone, cut where a detector cuts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from omni_ws.audio.pcm import Samples, resampled
from omni_ws.audio.vad import SAMPLE_RATE

_TELEPHONE_RATE: Final = 8000
#: Sounds are made so many samples long, or a multiple: transforms of such sizes are fast.
_EVEN: Final = 800


def as_heard(sound: Samples, others: Sequence[Samples], random: np.random.Generator) -> Samples:
    """Return a sound in a room, with up to 300 ms before it and 250 ms behind it; ``others`` babble."""
    if random.random() < 0.5:
        sound = resampled(sound, SAMPLE_RATE, int(SAMPLE_RATE * random.uniform(0.88, 1.14)), "QQ")
    before, behind = (int(SAMPLE_RATE * random.uniform(0, most)) for most in (0.3, 0.25))
    if random.random() < 0.5:  # the detector is late, or early
        sound = sound[int(SAMPLE_RATE * random.uniform(0, 0.05)) :]
    size = -(-(len(sound) + before + behind) // _EVEN) * _EVEN
    sound = np.pad(sound, (before, size - len(sound) - before))
    if random.random() < 0.35:
        sound = _in_room(sound, random)
    sound = _tilted(sound, random)
    sound = sound / (np.abs(sound).max() + 1e-6)
    sound = sound + _background(len(sound), others, random) * 10 ** (random.uniform(-45, -12) / 20)
    if random.random() < 0.35:
        sound = _by_telephone(sound)
    return np.asarray(sound * 10 ** (random.uniform(-35, -2) / 20), np.float32)


def _in_room(sound: Samples, random: np.random.Generator) -> Samples:
    count = int(SAMPLE_RATE * random.uniform(0.05, 0.3))
    echo = random.normal(size=count) * np.exp(-np.linspace(0, 7, count)) * random.uniform(0.02, 0.12)
    echo[0] = 1
    size = 1 << (len(sound) + count).bit_length()
    mixed = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(echo, size), size)
    return np.asarray(mixed[: len(sound)], np.float32)


def _tilted(sound: Samples, random: np.random.Generator) -> Samples:
    """Return a sound as a microphone changes it: up to 6 dB between low and high, low ones below 120 Hz weaker."""
    spectrum = np.fft.rfft(sound)
    hertz = np.fft.rfftfreq(len(sound), 1 / SAMPLE_RATE)
    tilt = 10 ** (random.uniform(-6, 6) / 20 * (np.log2(np.maximum(hertz, 100) / 1000) / 3))
    low = 1 / (1 + (random.uniform(0, 150) / np.maximum(hertz, 1)) ** 2)
    return np.asarray(np.fft.irfft(spectrum * tilt * low, len(sound)), np.float32)


def _background(count: int, others: Sequence[Samples], random: np.random.Generator) -> Samples:
    """Return noise or babble, at a level of 1."""
    if random.random() < 0.3:
        noise = np.zeros(count)
        for _ in range(4):
            other = others[int(random.integers(len(others)))]
            noise += np.resize(np.roll(other, int(random.integers(len(other)))), count) / (other.std() + 1e-6)
    else:
        colour = random.uniform(0, 1)
        spectrum = np.fft.rfft(random.normal(size=count))
        noise = np.fft.irfft(spectrum / np.maximum(np.arange(len(spectrum)), 8) ** colour, count)
    return np.asarray(noise / (noise.std() + 1e-6) * 0.3, np.float32)


def _by_telephone(sound: Samples) -> Samples:
    narrow = resampled(np.asarray(sound, np.float32), SAMPLE_RATE, _TELEPHONE_RATE, "MQ")
    companded = np.round(np.sign(narrow) * np.log1p(255 * np.abs(np.clip(narrow, -1, 1))) / np.log(256) * 127) / 127
    narrow = np.asarray(np.sign(companded) * (256 ** np.abs(companded) - 1) / 255, np.float32)
    return resampled(narrow, _TELEPHONE_RATE, SAMPLE_RATE, "MQ")
