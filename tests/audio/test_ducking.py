"""Audio that is lowered for a while: by how much, on which slope, and nothing of it lost."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_ws.audio.pcm import (
    DUCKED,
    RAMP_SEC,
    Ducker,
    decode_mu_law,
    encode_mu_law,
)
from omni_ws.core.chunks import AudioEncoding, AudioFormat

RATE = 8000
RAMP = round(RAMP_SEC * RATE)
#: A second at half of full scale.
TONE = np.full(RATE, 16_384, "<i2")


def levels(audio: bytes) -> NDArray[np.float64]:
    """What the samples of TONE were multiplied by."""
    return np.frombuffer(audio, "<i2") / 16_384


def test_audio_is_lowered_by_15_db_within_the_ramp_and_raised_again() -> None:
    ducker = Ducker(AudioFormat(sample_rate=RATE))
    data = TONE.tobytes()
    assert ducker.apply(data) is data  # what is not lowered costs nothing
    ducker.duck(True)
    down = levels(ducker.apply(data))
    assert 20 * np.log10(down[RAMP]) == pytest.approx(-15, abs=0.01)
    assert down[RAMP - 2] > down[RAMP] == down[-1]
    assert np.all(np.diff(down) <= 0)
    ducker.duck(False)
    up = levels(ducker.apply(data))
    assert up[0] > DUCKED
    assert np.all(np.diff(up) >= 0)
    assert up[RAMP] == 1
    assert ducker.apply(data) is data


@pytest.mark.parametrize("cut", [2, 14, 160, 4096])
def test_how_the_audio_is_cut_changes_nothing(cut: int) -> None:
    def run(size: int) -> bytes:
        ducker = Ducker(AudioFormat(sample_rate=RATE))
        ducker.duck(True)
        data = TONE.tobytes()
        return b"".join(ducker.apply(data[start : start + size]) for start in range(0, len(data), size))

    whole, pieces = (np.frombuffer(run(size), "<i2") for size in (2 * RATE, cut))
    assert len(pieces) == RATE
    assert np.abs(pieces.astype(int) - whole).max() <= 1


def test_a_ramp_turns_round_where_it_is() -> None:
    ducker = Ducker(AudioFormat(sample_rate=RATE))
    ducker.duck(True)
    half = levels(ducker.apply(TONE[: RAMP // 2].tobytes()))
    ducker.duck(False)
    back = levels(ducker.apply(TONE.tobytes()))
    assert DUCKED < half[-1] < back[0] < 1
    assert back[RAMP // 2] == 1


def test_where_nothing_plays_there_is_no_ramp() -> None:
    ducker = Ducker(AudioFormat(sample_rate=RATE))
    ducker.duck(True)
    ducker.settle()
    assert set(levels(ducker.apply(TONE.tobytes()))) == {round(16_384 * DUCKED) / 16_384}


def test_the_audio_of_a_telephone_is_lowered_as_much() -> None:
    ducker = Ducker(AudioFormat(AudioEncoding.PCMU, RATE))
    speech = (8000 * np.sin(np.arange(RATE) / 9)).astype(np.int16)
    data = encode_mu_law(speech)
    ducker.duck(True)
    ducker.apply(data)
    lowered = decode_mu_law(ducker.apply(data))
    level = float(np.sqrt(np.mean(lowered**2)) / np.sqrt(np.mean(decode_mu_law(data) ** 2)))
    assert 20 * np.log10(level) == pytest.approx(-15, abs=0.1)
    assert ducker.apply(b"\xff" * 160) == b"\xff" * 160  # silence stays so


def test_nothing_is_nothing() -> None:
    ducker = Ducker(AudioFormat(sample_rate=RATE))
    ducker.duck(True)
    assert ducker.apply(b"") == b""
