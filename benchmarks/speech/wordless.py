"""Sound without a word in it, of any length. Equal arguments give equal sound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.caller.live_caller import room_noise

_RATE: Final = 16_000
#: Full scale is 1.
_WHITE: Final = 10 ** (-30 / 20)
#: The loudest of a keyboard and of music.
_PEAK: Final = 0.3
_BEAT_SEC: Final = 0.5
#: Semitones above the root.
_CHORDS: Final = ((0, 4, 7), (9, 12, 16), (5, 9, 12), (7, 11, 14))
_SCALE: Final = (0, 2, 4, 7, 9, 12, 14, 16)


def silence(seconds: float) -> Samples:
    """Nothing, as a muted microphone sends it."""
    return np.zeros(int(seconds * _RATE), np.float32)


def quiet_room(seconds: float) -> Samples:
    """The hiss of a microphone in a quiet room, at -70 dBFS."""
    return room_noise(seconds, -70.0, seed=3)


def white_noise(seconds: float) -> Samples:
    """Hiss at -30 dBFS."""
    return np.random.default_rng(4).normal(0, _WHITE, int(seconds * _RATE)).astype(np.float32)


def hum(seconds: float) -> Samples:
    """Mains at 50 Hz with its harmonics, at -18 dBFS."""
    time = np.arange(int(seconds * _RATE)) / _RATE
    waves = sum(np.sin(2 * np.pi * 50 * k * time + k) / k for k in range(1, 9))
    return np.asarray(0.15 * waves, np.float32)


def keyboard(seconds: float) -> Samples:
    """Typing: words of a few keys, each a click as it goes down and a weaker one as it comes up."""
    random = np.random.default_rng(5)
    sound = np.zeros(int(seconds * _RATE))
    at = 0.3
    while at < seconds - 1:
        for _ in range(random.integers(1, 9)):
            strength = random.uniform(0.4, 1.0) * _PEAK
            _add(sound, at, strength * _click(random))
            _add(sound, at + random.uniform(0.06, 0.12), 0.5 * strength * _click(random))
            at += random.uniform(0.09, 0.22)
        at += random.exponential(0.3) if random.random() < 0.85 else random.uniform(1, 3)
    return sound.astype(np.float32)


def music(seconds: float) -> Samples:
    """A melody of plucked strings over chords, a bass and a drum, at 120 beats a minute."""
    random = np.random.default_rng(6)
    sound = np.zeros(int(seconds * _RATE))
    for beat in range(int(seconds / _BEAT_SEC) - 4):
        at = beat * _BEAT_SEC
        chord = _CHORDS[beat // 4 % len(_CHORDS)]
        if beat % 4 == 0:
            for note in chord:
                _add(sound, at, 0.25 * _tone(130.8 * 2 ** (note / 12), 2.0))
        _add(sound, at, 0.5 * _tone(65.4 * 2 ** (chord[0] / 12), 0.5))
        if random.random() < 0.8:
            note = random.choice(_SCALE)
            _add(sound, at + random.choice((0, 0.25)), 0.4 * _tone(523.3 * 2 ** (note / 12), 0.8))
        drum = random.normal(0, 1, _RATE // 8) * np.exp(-np.arange(_RATE // 8) / (_RATE / 60))
        _add(sound, at + (0.25 if beat % 2 else 0), 0.15 * drum)
    return np.asarray(sound * _PEAK / max(_PEAK, float(np.max(np.abs(sound)))), np.float32)


#: By what a table calls them.
SOUNDS: Final[Mapping[str, Callable[[float], Samples]]] = {
    "silence": silence,
    "a quiet room": quiet_room,
    "white noise": white_noise,
    "hum": hum,
    "a keyboard, made": keyboard,
    "music, made": music,
}


def _add(sound: NDArray[np.float64], at_sec: float, piece: NDArray[np.float64]) -> None:
    start = int(at_sec * _RATE)
    end = min(len(sound), start + len(piece))
    sound[start:end] += piece[: end - start]


def _click(random: np.random.Generator) -> NDArray[np.float64]:
    """A burst of noise of some milliseconds and the ringing of the case."""
    time = np.arange(_RATE // 25) / _RATE
    burst = random.normal(0, 0.4, len(time)) * np.exp(-time / random.uniform(0.001, 0.004))
    ringing = np.sin(2 * np.pi * random.uniform(900, 3500) * time) * np.exp(-time / 0.006)
    click: NDArray[np.float64] = np.clip(burst + 0.5 * ringing, -1, 1)
    return click


def _tone(pitch: float, seconds: float) -> NDArray[np.float64]:
    time = np.arange(int(seconds * _RATE)) / _RATE
    partials = sum(np.sin(2 * np.pi * pitch * k * time) / k * np.exp(-k * time) for k in range(1, 7))
    fading = np.minimum(1, time / 0.005) * np.exp(-2.5 * time / seconds)
    tone: NDArray[np.float64] = np.asarray(partials * fading)
    return tone
