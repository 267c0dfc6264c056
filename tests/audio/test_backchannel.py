"""The network that tells acknowledgements and sounds without words from words, on sounds that it was not trained on."""

from __future__ import annotations

import numpy as np
import pytest
from support.speech_clips import SAMPLE_RATE, clip_samples

from omni_ws.audio.pcm import Samples, resampled
from omni_ws.audio.smart_turn import FRAMES, backchannel_probability, spectrogram
from omni_ws.service.conversation.onsets import SURE_BACKCHANNEL

#: tests/data/README.md
HUMS = ("mm", "um_hum", "cough", "laugh")
WORDS = ("hang_on", "how", "set_a_timer", "who")


def short(name: str) -> Samples:
    """A short sound with 200 ms of faint noise before it, as a detector hands it on."""
    samples = clip_samples(f"short_sounds/{name}")
    noise = np.random.default_rng(0).normal(0, 1e-3, SAMPLE_RATE // 5 + len(samples)).astype(np.float32)
    noise[SAMPLE_RATE // 5 :] += samples
    return noise


@pytest.mark.parametrize("name", HUMS)
def test_hums_laughs_and_coughs_are_no_words(name: str) -> None:
    assert backchannel_probability(short(name)) >= SURE_BACKCHANNEL


@pytest.mark.parametrize("name", WORDS)
def test_words_are_no_hums_or_left_to_the_recogniser(name: str) -> None:
    assert backchannel_probability(short(name)) < SURE_BACKCHANNEL


@pytest.mark.parametrize("name", ["goforward", "cards_001", "cards_005", "librivox_ss_0870"])
def test_nor_is_the_beginning_of_what_a_person_says(name: str) -> None:
    samples = clip_samples(name)
    onset = int(np.flatnonzero(np.abs(samples) > 0.1 * np.abs(samples).max())[0])
    begins = max(0, onset - SAMPLE_RATE * 3 // 10)
    assert backchannel_probability(samples[begins : onset + SAMPLE_RATE * 7 // 10]) < SURE_BACKCHANNEL


@pytest.mark.parametrize("name", ["mm", "who"])
def test_neither_level_nor_a_telephone_changes_what_it_is(name: str) -> None:
    sound = short(name)
    telephone = resampled(resampled(sound, SAMPLE_RATE, 8000), 8000, SAMPLE_RATE)
    found = [backchannel_probability(each) >= 0.5 for each in (sound, 0.05 * sound, telephone)]
    assert found == [name in HUMS] * 3


def test_it_hears_so_much_and_no_more() -> None:
    sound = np.tile(short("who"), 4)
    heard = FRAMES * SAMPLE_RATE // 100
    assert backchannel_probability(sound[:heard]) == backchannel_probability(sound)
    assert backchannel_probability(sound[: heard - SAMPLE_RATE // 2]) != backchannel_probability(sound)


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.zeros(SAMPLE_RATE, np.float32)], ids=["none", "zero"])
def test_silence_has_a_probability_too(samples: Samples) -> None:
    assert 0 <= backchannel_probability(samples) <= 1
    assert spectrogram(samples).shape[0] == FRAMES
