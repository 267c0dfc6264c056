from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.audio.pcm import ResampleQuality, Samples, StreamResampler, resampled

RATES = [(8000, 16000), (16000, 8000), (44100, 16000), (48000, 16000), (22050, 24000), (16000, 24000), (192000, 8000)]


def sine(rate: int, count: int, hertz: float = 440.0) -> Samples:
    return (0.8 * np.sin(2 * np.pi * hertz * np.arange(count) / rate)).astype(np.float32)


def in_pieces(samples: Samples, source: int, target: int, chunk: int) -> Samples:
    resampler = StreamResampler(source, target)
    parts = [resampler.process(samples[i : i + chunk]) for i in range(0, len(samples), chunk)]
    return np.concatenate([*parts, resampler.flush()])


@pytest.mark.parametrize(("source", "target"), RATES)
@pytest.mark.parametrize("seconds", [0.5, 1.00037])
def test_length_and_frequency_are_kept(source: int, target: int, seconds: float) -> None:
    count = int(source * seconds)
    result = in_pieces(sine(source, count), source, target, source // 50)
    assert len(result) == math.floor(count * target / source + 0.5)
    spectrum = np.abs(np.fft.rfft(result * np.hanning(len(result))))
    assert spectrum.argmax() * target / len(result) == pytest.approx(440, abs=2)
    middle = result[target // 20 : -target // 20]
    expected = sine(target, len(result))[target // 20 : -target // 20]
    assert np.abs(middle - expected).max() < 0.02


@pytest.mark.parametrize(("source", "target"), RATES)
def test_no_click_at_chunk_borders(source: int, target: int) -> None:
    """The second difference of a sine is small everywhere; a click exceeds it by orders of magnitude."""
    result = in_pieces(sine(source, source // 2), source, target, 37)
    bend = np.abs(np.diff(result[target // 20 : -target // 20], n=2)).max()
    assert bend < 1.1 * 0.8 * (2 * np.pi * 440 / target) ** 2 + 1e-3


@given(cuts=st.lists(st.integers(1, 700), max_size=30), rates=st.sampled_from(RATES))
@settings(deadline=None)
def test_any_cutting_gives_the_same_samples(cuts: list[int], rates: tuple[int, int]) -> None:
    samples = np.random.default_rng(1).uniform(-1, 1, 3000).astype(np.float32)
    resampler = StreamResampler(*rates)
    borders = np.cumsum(cuts)
    parts = [resampler.process(part) for part in np.split(samples, borders[borders < 3000])]
    result = np.concatenate([*parts, resampler.flush()])
    assert np.allclose(result, in_pieces(samples, *rates, 3000), atol=1e-6)


@pytest.mark.parametrize("rates", [(16000, 24000), (24000, 16000), (16000, 16000)])
@pytest.mark.parametrize("quality", ["LQ", "HQ"])
def test_all_at_once(rates: tuple[int, int], quality: ResampleQuality) -> None:
    samples = np.random.default_rng(1).uniform(-1, 1, 3000).astype(np.float32)
    resampler = StreamResampler(*rates, quality)
    whole = np.concatenate([resampler.process(samples), resampler.flush()])
    assert np.array_equal(resampled(samples, *rates, quality), whole)


def test_little_is_held_back() -> None:
    resampler = StreamResampler(16000, 24000)
    out = sum(len(resampler.process(sine(16000, 320))) for _ in range(50))
    assert 24000 - out < 24 * 10


@pytest.mark.parametrize(("source", "target"), [(44100, 16000), (16000, 24000), (11025, 16000)])
@pytest.mark.slow
def test_an_hour_does_not_drift(source: int, target: int) -> None:
    resampler = StreamResampler(source, target)
    minute = np.zeros(source * 60 + 7, dtype=np.float32)
    produced = sum(len(resampler.process(minute)) for _ in range(60))
    click = np.zeros(source, dtype=np.float32)
    click[source // 2] = 1.0
    tail = np.concatenate([resampler.process(click), resampler.flush()])
    count = 60 * len(minute) + len(click)
    assert produced + len(tail) == math.floor(count * target / source + 0.5)
    place = (60 * len(minute) + source // 2) * target / source
    assert abs(produced + int(np.abs(tail).argmax()) - place) <= 1


def test_equal_rates_are_the_identity() -> None:
    samples = sine(16000, 100)
    resampler = StreamResampler(16000, 16000)
    assert resampler.process(samples) is samples
    assert len(resampler.flush()) == 0


def test_equal_rates_do_not_load_soxr() -> None:
    program = (
        "import sys; from omni_ws.audio.pcm import StreamResampler; StreamResampler(8000, 8000).flush();"
        "assert 'soxr' not in sys.modules; StreamResampler(8000, 9000); assert 'soxr' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("target", [16000, 24000])
def test_after_the_flush(target: int) -> None:
    resampler = StreamResampler(16000, target)
    resampler.process(sine(16000, 100))
    resampler.flush()
    assert len(resampler.flush()) == 0
    with pytest.raises(ValueError, match="flushed"):
        resampler.process(sine(16000, 1))


def test_strided_input() -> None:
    samples = sine(16000, 2000)
    assert np.array_equal(in_pieces(samples[::2], 8000, 16000, 1000), in_pieces(samples[::2].copy(), 8000, 16000, 1000))
