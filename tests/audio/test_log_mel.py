"""Log-mel spectrograms: where tones are in them, and the same numbers as transformers'."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from support.patience import PATIENCE_SEC
from support.speech_clips import clip_samples

from omni_ws.audio.smart_turn import log_mel
from omni_ws.audio.vad import SAMPLE_RATE


def tone(hertz: float, seconds: float = 1.0) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.sin(2 * np.pi * hertz * np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE).astype(np.float32)


@pytest.mark.parametrize(("frames", "bands"), [(100, 80), (1200, 80), (3000, 128)])
def test_the_shape(frames: int, bands: int) -> None:
    spectrogram = log_mel(tone(440), frames, bands=bands)
    assert spectrogram.shape == (bands, frames)
    assert spectrogram.dtype == np.float32
    assert spectrogram.flags.c_contiguous


def test_higher_tones_are_in_higher_bands() -> None:
    loudest = [int(log_mel(tone(hertz), 100)[:, 50].argmax()) for hertz in (200, 400, 600, 800, 1600, 3200, 6400)]
    # Up to 1 kHz the bands are equally far apart, and above an octave is as many as any other.
    assert np.diff(loudest).tolist() == pytest.approx([5, 5, 5, 18, 18, 18], abs=1)


def test_what_is_missing_is_silence() -> None:
    short, long = tone(440, 0.5), np.concatenate([tone(440, 0.5), np.zeros(SAMPLE_RATE, np.float32)])
    assert np.array_equal(log_mel(short, 150), log_mel(long, 150))
    spectrogram = log_mel(short, 150)
    assert spectrogram[:, 60:].max() == spectrogram.min()


@pytest.mark.parametrize("samples", [np.zeros(0, np.float32), np.zeros(SAMPLE_RATE, np.float32)])
def test_silence_is_the_same_everywhere(samples: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    assert np.ptp(log_mel(samples, 100)) == 0


def test_no_point_is_far_below_the_loudest() -> None:
    spectrogram = log_mel(clip_samples("goforward"), 300)
    assert np.ptp(spectrogram) == pytest.approx(2.0)


def test_no_other_thread_works_or_waits_busily() -> None:
    # In a process of its own nothing else runs. The threads of the import wait busily during the first rounds.
    program = """
        import time
        import numpy as np
        from omni_ws.audio.smart_turn import log_mel
        for round in range(80):
            if round == 40:
                of_process, of_thread = time.process_time(), time.thread_time()
            log_mel(np.zeros(16_000, np.float32), 1200)
        print(time.process_time() - of_process, time.thread_time() - of_thread)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    of_process, of_thread = map(float, subprocess.check_output(command, timeout=PATIENCE_SEC).split())
    assert of_process < 1.2 * of_thread


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bands", [80, 128])
def test_the_numbers_are_those_of_transformers(bands: int) -> None:
    transformers = pytest.importorskip("transformers")
    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    clip = clip_samples("librivox_ss_0870")
    wanted = extractor(clip, sampling_rate=SAMPLE_RATE, return_tensors="np").input_features[0]
    assert np.abs(log_mel(clip, 3000, bands=bands) - wanted).max() < 1e-3
