"""Recordings made worse: as from across a room, with noise, and by telephone. Equal input gives equal output."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples, decode_mu_law, encode_mu_law, pcm16_from_samples, resampled
from omni_ws.caller.live_caller import pink_noise

_RATE: Final = 16_000
#: Seconds until the echo of the room is 60 dB weaker.
ROOM_SEC: Final = 0.6
#: How much stronger the echo is than the direct sound, in dB: as three metres from a microphone in a living room.
ECHO_DB: Final = 3.0
#: The level of speech across the room, and how far below it the noise of the room is.
FAR_DBFS: Final = -38.0
FAR_SNR_DB: Final = 20.0
NOISY_SNR_DB: Final = 10.0


def far(speech: Samples, *, seed: int = 1) -> Samples:
    """The speech as a microphone hears it across a room: with its echo, weak, and with the hiss of the room."""
    random = np.random.default_rng(seed)
    time = np.arange(int(ROOM_SEC * _RATE)) / _RATE
    echo = random.normal(0, 1, len(time)) * 10 ** (-3 * time / ROOM_SEC)
    echo[: _RATE // 200] = 0  # the first wall is further away than the speaker
    echo *= 10 ** (ECHO_DB / 20) / np.sqrt(np.sum(echo**2))
    echo[0] = 1.0
    heard = _convolved(speech.astype(np.float64), echo)
    heard *= 10 ** (FAR_DBFS / 20) / _speech_level(heard)
    return _with_noise(heard, pink_noise(len(heard), random), FAR_SNR_DB)


def noisy(speech: Samples, *, seed: int = 1) -> Samples:
    """The speech in noise that is strongest in the bass, as that of a car or a fan."""
    noise = pink_noise(len(speech), np.random.default_rng(seed))
    return _with_noise(speech.astype(np.float64), noise, NOISY_SNR_DB)


def _convolved(signal: NDArray[np.float64], response: NDArray[np.float64]) -> NDArray[np.float64]:
    length = len(signal) + len(response) - 1
    product = np.fft.rfft(signal, length) * np.fft.rfft(response, length)
    result: NDArray[np.float64] = np.fft.irfft(product, length)
    return result


def _with_noise(speech: NDArray[np.float64], noise: NDArray[np.float64], snr_db: float) -> Samples:
    noise = noise * (_speech_level(speech) / 10 ** (snr_db / 20) / np.sqrt(np.mean(noise**2)))
    mixed = speech + noise
    # Full scale stays full scale.
    return np.asarray(mixed / max(1.0, float(np.max(np.abs(mixed)))), np.float32)


def _speech_level(signal: NDArray[np.float64]) -> float:
    """RMS of the 20 ms pieces that are within 30 dB of the loudest: pauses do not count."""
    pieces = signal[: len(signal) // 320 * 320].reshape(-1, 320)
    power = np.mean(pieces**2, axis=1)
    return float(np.sqrt(np.mean(power[power > power.max() / 1000])))


def telephone(speech: Samples) -> Samples:
    """The speech as the telephone network carries it: 8 kHz, µ-law."""
    narrow = pcm16_from_samples(resampled(speech, _RATE, _RATE // 2))
    return resampled(decode_mu_law(encode_mu_law(narrow)), _RATE // 2, _RATE)
