"""Where speech in progress is cut into segments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.audio.pcm import Samples
from omni_ws.engine.vllm.early_input import AudioSegmenter

RATE = 1000  # 20 samples per frame


def speech(ms: int, seed: int = 0) -> Samples:
    return np.random.default_rng(seed).uniform(-0.5, 0.5, ms).astype(np.float32)


def silence(ms: int) -> Samples:
    return np.zeros(ms, np.float32)


def segments(samples: Samples, pieces: list[int] | None = None, **limits: int) -> list[Samples]:
    segmenter = AudioSegmenter(RATE, **{"shortest_ms": 1000, "longest_ms": 5000, **limits})
    found = []
    start = 0
    for size in pieces or []:
        found += segmenter.feed(samples[start : start + size])
        start += size
    found += segmenter.feed(samples[start:])
    last = segmenter.finish()
    return found if last is None else [*found, last]


def test_a_pause_is_cut_in_its_middle() -> None:
    whole = np.concatenate([speech(1200), silence(600), speech(500)])
    first, second = segments(whole)
    # The cut is in the middle of the 300 ms that make a pause.
    assert len(first) == 1200 + 160
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


def test_a_short_segment_goes_on_through_its_pauses() -> None:
    whole = np.concatenate([speech(400), silence(400), speech(500), silence(400), speech(500)])
    first, second = segments(whole)
    assert len(first) == 400 + 400 + 500 + 160
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)


def test_speech_without_a_pause_is_cut_at_the_longest_segment() -> None:
    assert [len(segment) for segment in segments(speech(12_345))] == [5000, 5000, 2345]


def test_a_word_break_is_no_pause() -> None:
    whole = np.concatenate([speech(1200), silence(280), speech(1200)])
    assert [len(segment) for segment in segments(whole)] == [len(whole)]


def test_nothing_at_all_is_no_segment() -> None:
    assert segments(silence(0)) == []


def test_silence_alone_is_not_cut_before_the_longest() -> None:
    assert [len(segment) for segment in segments(silence(6000))] == [5000, 1000]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 2500)), min_size=1, max_size=12),
    st.lists(st.integers(1, 900), max_size=60),
)
def test_cuts_do_not_depend_on_how_the_samples_arrive(runs: list[tuple[bool, int]], pieces: list[int]) -> None:
    whole = np.concatenate([speech(ms, seed) if loud else silence(ms) for seed, (loud, ms) in enumerate(runs)])
    at_once, piecewise = segments(whole), segments(whole, pieces)
    assert [len(segment) for segment in piecewise] == [len(segment) for segment in at_once]
    np.testing.assert_array_equal(np.concatenate(piecewise), whole)
    assert max(len(segment) for segment in at_once) <= 5000


@pytest.mark.parametrize("longest_ms", [100, 1000])
def test_a_longest_that_is_too_short_is_raised(longest_ms: int) -> None:
    assert all(len(segment) <= 1020 for segment in segments(speech(5000), longest_ms=longest_ms))
