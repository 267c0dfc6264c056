"""Recorded speech with the words that are spoken in it (tests/data/README.md), noises without any, and odd texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import PCM16, Samples, pcm16_from_samples, resampled, samples_from_pcm16
from omni_ws.client.audio import read_wav

SAMPLE_RATE = 16_000
_DATA = Path(__file__).parent.parent / "data"

WORDS = {
    "goforward": "go forward ten meters",
    "cards_001": "ten of clubs",
    "cards_005": "eight of spades four of clubs seven of hearts",
    "librivox_ss_0870": (
        "and mister john dashwood had then leisure to consider how much there might be prudently in his power to do "
        "for them"
    ),
}


def clip_bytes(name: str) -> bytes:
    """pcm16, 16 kHz, mono."""
    clip = read_wav(_DATA / f"{name}.wav")
    assert (clip.sample_rate, clip.channels) == (SAMPLE_RATE, 1)
    return clip.samples


def clip_pcm(name: str) -> NDArray[np.int16]:
    return np.frombuffer(clip_bytes(name), "<i2")


def clip_samples(name: str) -> Samples:
    return samples_from_pcm16(clip_pcm(name))


def silence(seconds: float) -> bytes:
    return bytes(2 * int(seconds * SAMPLE_RATE))


def at_24k(audio: bytes) -> bytes:
    """Audio of 16 kHz at the rate of the Realtime API."""
    return as_pcm16(resampled(samples_from_pcm16(np.frombuffer(audio, PCM16)), SAMPLE_RATE, 24_000))


def noises(seconds: float = 4.0) -> dict[str, Samples]:
    """What is no speech: nothing, white noise at -30 dBFS, a tone, hum with its harmonics, chords with a drum."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    generator = np.random.default_rng(7)
    sounds = {
        "silence": np.zeros_like(time),
        "white noise": generator.normal(0, 10 ** (-30 / 20), len(time)),
        "tone": 0.3 * np.sin(2 * np.pi * 433 * time),
        "hum": sum(0.1 / k * np.sin(2 * np.pi * 50 * k * time) for k in range(1, 6)),
        "music": _music(len(time), generator),
    }
    return {name: np.asarray(sound, np.float32) for name, sound in sounds.items()}


def _music(length: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """A chord that dies away and a beat of a drum, twice a second."""
    time = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    vibrato = 1 + 0.002 * np.sin(2 * np.pi * 5 * time)
    bars = []
    for _ in range(0, length, len(time)):
        root = 220 * 2 ** (generator.integers(-12, 12) / 12)
        partials = [
            (root * interval * harmonic, harmonic) for interval in (1, 5 / 4, 3 / 2) for harmonic in range(1, 6)
        ]
        chord = sum(np.sin(2 * np.pi * pitch * time * vibrato) / harmonic for pitch, harmonic in partials)
        drum = generator.normal(0, 1, len(time)) * np.exp(-50 * time)
        bars.append(0.1 * chord * np.exp(-3 * time) + 0.3 * drum)
    return np.concatenate(bars)[:length]


@dataclass(frozen=True, slots=True)
class Room:
    """The echo comes ``delay_ms`` after the sound was received, ``gain_db`` louder than it is."""

    delay_ms: int
    gain_db: float

    @property
    def response(self) -> Samples:
        """The direct sound and reflections that die away over 80 ms, together of the gain's energy."""
        generator = np.random.default_rng(5)
        time = np.arange(80 * SAMPLE_RATE // 1000) / SAMPLE_RATE
        taps = generator.normal(0, 1, len(time)) * 10 ** (-3 * time / 0.12)
        taps[: 2 * SAMPLE_RATE // 1000] = 0
        taps *= np.sqrt(0.4 / np.sum(taps**2))
        taps[0] = 1
        return np.asarray(taps * (10 ** (self.gain_db / 20) / np.sqrt(np.sum(taps**2))), np.float32)


def as_pcm16(samples: Samples) -> bytes:
    return pcm16_from_samples(samples).tobytes()


ODD_TEXTS: Final = (
    "a" * 2000,
    "1" * 300,
    "1,000," * 50,
    "x1y2" * 75,
    "aB" * 150,
    "a-b'c/d." * 40,
    "(" * 1000 + ")" * 1000,
    "." * 1999 + "x",
    "[a](/b/)" * 40,
    "https://example.com/" + "q=1&" * 75,
    "The quick brown fox jumps over the lazy dog " * 45,
    "\x07\x1b[0m'\"`${}%s%n\\",
    "🎉 Congratulations 🎉 on 100 % 你好 Привет ελληνικά שלום",
    "Zyxgrth Llanfairpwllgwyngyllgogerychwyrndrobwll naïve Łódź İstanbul ﬁne ½ ² ٣",
    "$1,234,567,890,123,456,789.99 −5 ±3 №7 1/0 0/0 99:99 31/31/3131 IIII MMMM",
    "S.O.S. U.S.A. e.g. a.b.c.d.e.f 1.2.3.4 v2.0-rc1+x 10^100 #1 @me &c. =",
)
