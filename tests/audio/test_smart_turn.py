"""The model that tells whether a speaker has finished, with its real weights and real speech."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.real_models import fetched
from support.speech_clips import SAMPLE_RATE, clip_samples

from omni_ws.audio import vad
from omni_ws.audio.pcm import Samples
from omni_ws.audio.smart_turn import HEARD_SAMPLES, SmartTurn
from omni_ws.errors import EngineFailed

#: 160 ms of silence, after which the model is asked.
PAUSE = np.zeros(SAMPLE_RATE * 160 // 1000, np.float32)


def weights() -> Path:
    return fetched("smart-turn") / "smart-turn-v3.2-cpu.onnx"


@pytest.fixture(scope="module")
def model() -> SmartTurn:
    return SmartTurn(weights())


def spoken(name: str, *, until_sec: float | None = None) -> Samples:
    """A clip up to the end of its speech, or to ``until_sec``, and the pause."""
    samples = clip_samples(name)
    loud = np.flatnonzero(np.abs(samples) > 0.02 * np.abs(samples).max())
    end = loud[-1] + 1 if until_sec is None else int(until_sec * SAMPLE_RATE)
    return np.concatenate([samples[:end], PAUSE])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goforward", "cards_001", "cards_005", "librivox_ss_0870"])
def test_whoever_has_spoken_a_whole_sentence_has_finished(model: SmartTurn, name: str) -> None:
    assert model.finished(spoken(name)) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("until_sec", [1.8, 2.4, 4.3, 5.6])
def test_whoever_stops_within_a_sentence_has_not(model: SmartTurn, until_sec: float) -> None:
    assert model.finished(spoken("librivox_ss_0870", until_sec=until_sec)) < 0.5


@pytest.mark.slow
def test_it_hears_the_last_eight_seconds(model: SmartTurn) -> None:
    turn = spoken("goforward")
    before = np.random.default_rng(1).normal(0, 0.1, HEARD_SAMPLES).astype(np.float32)
    whole = np.concatenate([before, turn])
    assert model.finished(whole) == model.finished(whole[-HEARD_SAMPLES:])
    # What is missing before the turn is silence.
    padded = np.concatenate([np.zeros(HEARD_SAMPLES - len(turn), np.float32), turn])
    assert model.finished(turn) == model.finished(padded)
    assert 0 <= model.finished(np.empty(0, np.float32)) <= 1


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("missing", "there is no such file"),
        ("folder", "there is no such file"),
        ("text", "ONNX Runtime cannot load it"),
        ("another network", "it has other inputs or outputs"),
    ],
)
def test_another_file_is_refused_with_a_reason(tmp_path: Path, what: str, reason: str) -> None:
    path = tmp_path / "turn.onnx"
    match what:
        case "folder":
            path.mkdir()
        case "text":
            path.write_text("no network")
        case "another network":
            path = vad.runtime_library().with_name("silero_vad.onnx")
    with pytest.raises(EngineFailed, match=f"is not a network of Smart Turn v3: {reason}$"):
        SmartTurn(path)
