"""Log-mel spectrograms as Whisper was trained on."""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples

SAMPLE_RATE: Final = 16_000
FRAMES_PER_SEC: Final = 100
_WINDOW: Final = 400
_HOP: Final = SAMPLE_RATE // FRAMES_PER_SEC
#: Quieter than the loudest point by so many powers of ten is as good as silent.
_RANGE: Final = 8.0
#: Frames that are multiplied at once: so few that OpenBLAS does it in this thread. Its other threads would wait busily
#: for more, for about 100 ms, and cost as much as reading the speech.
_BLOCK: Final = 10


def log_mel(samples: Samples, frames: int, *, bands: int = 80) -> NDArray[np.float32]:
    """Return a spectrogram of shape (bands, frames). What is missing in the samples, at 16 kHz, is silence.

    ``frames`` is a multiple of 10.
    """
    needed = frames * _HOP
    padded = np.zeros(needed, np.float32)
    padded[: len(samples)] = samples[:needed]
    padded = np.pad(padded, _WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][:frames]
    spectrum = np.fft.rfft(windows * _hann(), axis=1)
    power = np.square(np.abs(spectrum)).astype(np.float32)
    energies = (power.reshape(-1, _BLOCK, power.shape[1]) @ _filters(bands).T).reshape(frames, bands)
    logarithm = np.log10(np.maximum(energies.T, 1e-10))
    bounded = np.maximum(logarithm, logarithm.max() - _RANGE)
    return np.ascontiguousarray((bounded + 4) / 4, np.float32)


@cache
def _hann() -> NDArray[np.float32]:
    return np.hanning(_WINDOW + 1)[:-1].astype(np.float32)


@cache
def _filters(bands: int) -> NDArray[np.float32]:
    """Triangles on Slaney's mel scale, each of the same area: shape (bands, frequencies)."""
    frequencies = np.fft.rfftfreq(_WINDOW, 1 / SAMPLE_RATE)
    corners = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), bands + 2))
    widths = np.diff(corners)
    distances = corners[:, None] - frequencies[None]
    rising, falling = -distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    areas = 2 / (corners[2:] - corners[:-2])
    return np.asarray(triangles * areas[:, None], np.float32)


#: The scale is linear up to 1 kHz, and logarithmic from there.
_LINEAR_HZ: Final = 1000.0
_HZ_PER_MEL: Final = 200 / 3
_LINEAR_MELS: Final = _LINEAR_HZ / _HZ_PER_MEL
_LOG_STEP: Final = float(np.log(6.4)) / 27


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz / _HZ_PER_MEL
    return _LINEAR_MELS + float(np.log(hertz / _LINEAR_HZ)) / _LOG_STEP


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _HZ_PER_MEL, above)
