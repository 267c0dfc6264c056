"""Bare samples: bytes to float and back."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio import g711
from omni_ws.audio.samples import Samples

PCM16_SCALE = 32768.0


class SampleLayout(Enum):
    """How one sample lies in memory; little-endian. The first part of the value is its number of bytes."""

    U8 = (1, "unsigned, 128 is silence")
    S16 = (2, "signed")
    S24 = (3, "signed, packed")
    S32 = (4, "signed")
    F32 = (4, "float")
    F64 = (8, "float")
    MU_LAW = (1, "G.711 mu-law")
    A_LAW = (1, "G.711 A-law")

    @property
    def sample_bytes(self) -> int:
        return self.value[0]


def samples_from_bytes(data: bytes, layout: SampleLayout) -> Samples:
    """All samples of all channels, interleaved as they come. ``data`` holds whole samples."""
    match layout:
        case SampleLayout.S16:
            return np.frombuffer(data, dtype="<i2").astype(np.float32) * np.float32(1 / PCM16_SCALE)
        case SampleLayout.F32:
            return bounded(np.frombuffer(data, dtype="<f4"))
        case SampleLayout.F64:
            return bounded(np.frombuffer(data, dtype="<f8"))
        case SampleLayout.MU_LAW:
            return g711.decode_mu_law(data)
        case SampleLayout.A_LAW:
            return g711.decode_a_law(data)
        case SampleLayout.U8:
            return (np.frombuffer(data, dtype=np.uint8).astype(np.float32) - 128.0) * np.float32(1 / 128)
        case SampleLayout.S24:
            # Three bytes become the upper three of a 32-bit integer.
            wide = np.zeros((len(data) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
            return _from_int32(wide.reshape(-1).view("<i4"))
        case SampleLayout.S32:
            return _from_int32(np.frombuffer(data, dtype="<i4"))


def _from_int32(values: NDArray[Any]) -> Samples:
    return values.astype(np.float32) * np.float32(1 / 2**31)


def bounded(values: NDArray[Any]) -> Samples:
    """A float32 copy inside ±1.0. What is no number or infinite carries no sound: it becomes 0."""
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    within: Samples = np.clip(values, -1.0, 1.0).astype(np.float32)
    return within


def mixed_down(interleaved: Samples, channels: int) -> Samples:
    """The mean of the channels."""
    if channels == 1:
        return interleaved
    # Channel by channel: for two to six channels numpy's mean over the short axis takes three times as long.
    mono: Samples = interleaved[::channels].copy()
    for channel in range(1, channels):
        mono += interleaved[channel::channels]
    mono *= np.float32(1 / channels)
    return mono


def pcm16_from_samples(samples: Samples) -> NDArray[np.int16]:
    """The nearest 16-bit values (ties to even), clipped. Undoes the reading of pcm16 exactly."""
    if not np.isfinite(samples).all():
        samples = bounded(samples)
    scaled = np.multiply(samples, np.float32(PCM16_SCALE), dtype=np.float32)
    np.rint(scaled, out=scaled)
    np.clip(scaled, -PCM16_SCALE, PCM16_SCALE - 1, out=scaled)
    return scaled.astype("<i2")
