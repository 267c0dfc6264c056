"""Raw samples: conversion between bytes and float32, mixing, clipping."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio import g711
from omni_ws.audio.samples import Pcm16, Samples

#: The 16-bit value that corresponds to 1.0.
PCM16_SCALE = 32768.0
# Made once: for a piece of 20 ms, conversions of numbers and names to numpy's types take as long as the arithmetic.
PCM16: Final = np.dtype("<i2")
_TO_PCM16: Final = np.float32(PCM16_SCALE)
_FROM_PCM16: Final = np.float32(1 / PCM16_SCALE)
_LEAST_PCM16: Final = np.float32(-PCM16_SCALE)
_MOST_PCM16: Final = np.float32(PCM16_SCALE - 1)


class SampleLayout(Enum):
    """The binary layouts of a sample; all are little-endian."""

    U8 = "unsigned 8-bit, 128 is silence"
    S16 = "signed 16-bit"
    S24 = "signed 24-bit, packed"
    S32 = "signed 32-bit"
    F32 = "32-bit float"
    F64 = "64-bit float"
    MU_LAW = "G.711 mu-law"
    A_LAW = "G.711 A-law"

    @property
    def sample_bytes(self) -> int:
        """The size of one sample of one channel, in bytes."""
        return _SAMPLE_BYTES[self]


_SAMPLE_BYTES: Final = {
    SampleLayout.U8: 1,
    SampleLayout.S16: 2,
    SampleLayout.S24: 3,
    SampleLayout.S32: 4,
    SampleLayout.F32: 4,
    SampleLayout.F64: 8,
    SampleLayout.MU_LAW: 1,
    SampleLayout.A_LAW: 1,
}


def samples_from_bytes(data: bytes, layout: SampleLayout) -> Samples:
    """Return the samples in ``data``, channels interleaved, within ±1.0. ``data`` must hold whole samples."""
    match layout:
        case SampleLayout.S16:
            return samples_from_pcm16(np.frombuffer(data, PCM16))
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
            # Widen to 32 bits, with the three bytes as the upper ones.
            wide = np.zeros((len(data) // 3, 4), dtype=np.uint8)
            wide[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
            return _from_int32(wide.reshape(-1).view("<i4"))
        case SampleLayout.S32:
            return _from_int32(np.frombuffer(data, dtype="<i4"))


def samples_from_pcm16(values: Pcm16) -> Samples:
    """Return 16-bit values as samples."""
    samples: Samples = values * _FROM_PCM16
    return samples


def _from_int32(values: NDArray[Any]) -> Samples:
    return values.astype(np.float32) * np.float32(1 / 2**31)


def bounded(values: NDArray[Any]) -> Samples:
    """Return a float32 copy clipped to ±1.0, with NaN and infinities replaced by silence."""
    if not np.isfinite(values).all():
        values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    within: Samples = np.clip(values, -1.0, 1.0).astype(np.float32)
    return within


def mixed_down(interleaved: Samples, channels: int) -> Samples:
    """Return the mean of the channels; for mono, ``interleaved`` itself."""
    if channels == 1:
        return interleaved
    # Adding up the channels takes a third of the time of numpy's mean over a short axis of two to six channels.
    mono: Samples = interleaved[::channels].copy()
    for channel in range(1, channels):
        mono += interleaved[channel::channels]
    mono *= np.float32(1 / channels)
    return mono


def pcm16_from_samples(samples: Samples) -> Pcm16:
    """Return the nearest 16-bit values (ties to even), clipped. Decoded pcm16 is restored exactly."""
    # A sum is quicker than a look at each, and not finite if any of them is not; where it overflows, nothing is lost.
    if not math.isfinite(np.add.reduce(samples)):
        samples = bounded(samples)
    scaled = samples * _TO_PCM16
    np.rint(scaled, out=scaled)
    scaled.clip(_LEAST_PCM16, _MOST_PCM16, out=scaled)
    return scaled.astype(PCM16)


def as_pcm16(audio: Samples | Pcm16) -> Pcm16:
    """Return audio as 16-bit values: as they are, or by ``pcm16_from_samples``."""
    return cast("Pcm16", audio) if audio.dtype == PCM16 else pcm16_from_samples(cast("Samples", audio))


def as_samples(audio: Samples | Pcm16) -> Samples:
    """Return audio as samples: as they are, or by ``samples_from_pcm16``."""
    return samples_from_pcm16(cast("Pcm16", audio)) if audio.dtype == PCM16 else cast("Samples", audio)
