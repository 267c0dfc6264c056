from __future__ import annotations

import numpy as np
import pytest

from omni_ws.audio.pcm import (
    PCM16,
    SampleLayout,
    as_pcm16,
    as_samples,
    bounded,
    mixed_down,
    pcm16_from_samples,
    samples_from_bytes,
    samples_from_pcm16,
)


def test_pcm16_to_float_and_back_is_the_identity() -> None:
    every = np.arange(65536, dtype=np.uint16).astype("<u2").tobytes()
    assert pcm16_from_samples(samples_from_bytes(every, SampleLayout.S16)).tobytes() == every


def test_pcm16_is_the_same_whatever_reads_and_writes_it() -> None:
    """Of all 65,536 values: what voices, recognisers and the listener convert by."""
    every = np.arange(65536, dtype=np.uint16).view(np.int16)
    samples = samples_from_pcm16(every)
    assert as_samples(every).tolist() == samples.tolist()
    for back in (pcm16_from_samples(samples), as_pcm16(samples), as_pcm16(every)):
        assert back.dtype == PCM16
        assert np.array_equal(back, every)
    # In steps of one part in 32,768: silence is 0.0, the least value is -1.0.
    assert (samples.min(), samples.max(), samples[0]) == (-1.0, 1.0 - 1 / 32768, 0.0)


def test_pcm16_rounds_and_clips() -> None:
    step = 1 / 32768
    samples = np.array([1.0, 1.5, -1.0, -2.0, 0.4 * step, 0.5 * step, 0.6 * step, 1.5 * step], dtype=np.float32)
    assert pcm16_from_samples(samples).tolist() == [32767, 32767, -32768, -32768, 0, 0, 1, 2]


def test_pcm16_of_what_is_no_number_is_silence() -> None:
    samples = np.array([np.nan, np.inf, -np.inf, 0.5, 3e38], dtype=np.float32)
    assert pcm16_from_samples(samples).tolist() == [0, 0, 0, 16384, 32767]


def test_pcm16_does_not_write_into_its_input() -> None:
    samples = np.array([0.25, np.nan], dtype=np.float32)
    pcm16_from_samples(samples)
    assert samples[0] == 0.25
    assert np.isnan(samples[1])


@pytest.mark.parametrize(
    ("layout", "data", "expected"),
    [
        (SampleLayout.U8, b"\x00\x80\xff", [-1.0, 0.0, 127 / 128]),
        (SampleLayout.S16, b"\x00\x80\x00\x00\xff\x7f", [-1.0, 0.0, 32767 / 32768]),
        (SampleLayout.S24, b"\x00\x00\x80\x00\x00\x00\x00\x00\x40\xff\xff\xff", [-1.0, 0.0, 0.5, -1 / 2**23]),
        (SampleLayout.S32, b"\x00\x00\x00\x80\x00\x00\x00\x40", [-1.0, 0.5]),
        (SampleLayout.F32, np.array([0.5, 7.0, np.nan, -np.inf], dtype="<f4").tobytes(), [0.5, 1.0, 0.0, 0.0]),
        (SampleLayout.F64, np.array([0.5, -1e300, np.nan, np.inf], dtype="<f8").tobytes(), [0.5, -1.0, 0.0, 0.0]),
        (SampleLayout.MU_LAW, b"\xff", [0.0]),
        (SampleLayout.A_LAW, b"\xd5", [8 / 32768]),
    ],
)
def test_every_layout(layout: SampleLayout, data: bytes, expected: list[float]) -> None:
    samples = samples_from_bytes(data, layout)
    assert samples.dtype == np.float32
    assert samples.tolist() == expected


def test_mixing_is_the_mean() -> None:
    interleaved = np.array([1.0, -1.0, 0.5, 0.25], dtype=np.float32)
    assert mixed_down(interleaved, 2).tolist() == [0.0, 0.375]
    assert mixed_down(interleaved, 1) is interleaved
    assert mixed_down(interleaved, 2).dtype == np.float32


def test_bounded_copies() -> None:
    values = np.array([0.5], dtype=np.float32)
    assert bounded(values) is not values
