"""How probable it is, by its sound, that a listener's short sound is an acknowledgement or no word at all.

A small network on a log-mel spectrogram; ``python -m benchmarks.backchannel train`` makes its weights, backchannel.npz.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from importlib.resources import files
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import Samples
from omni_ws.audio.smart_turn import log_mel


class Class(IntEnum):
    """What the network tells apart."""

    #: Hums, laughs, coughs, breaths, clicks.
    WORDLESS = 0
    ACKNOWLEDGEMENT = 1
    WORDS = 2


#: The network hears so many frames of 10 ms, from the beginning; missing ones are silence.
FRAMES: Final = 120
BANDS: Final = 40
#: A point that is this far below the loudest one counts as silent: 2.5 is 50 dB, since ``log_mel`` halves and halves.
_RANGE: Final = 1.25
#: The network's convolutions over time: the frames of each, and how far apart.
CONVOLUTIONS: Final = ((5, 2), (5, 2), (3, 1))
#: See ``smart_turn``: so few frames are multiplied at once that OpenBLAS starts no threads.
_AT_ONCE: Final = 16


def backchannel_probability(samples: Samples) -> float:
    """Return how probable it is that a sound ("mm-hm", "yeah", a laugh, a cough) is no word that means something.

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
    """Return what the network hears, of shape (FRAMES, BANDS): 1 is the loudest point, 0 what is 50 dB below."""
    heard = log_mel(samples, FRAMES, bands=BANDS).T
    return np.asarray(np.maximum(1 + (heard - heard.max()) / _RANGE, 0), np.float32)


def _times(rows: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([rows[start : start + _AT_ONCE] @ matrix for start in range(0, len(rows), _AT_ONCE)])


@cache
def _weights() -> dict[str, NDArray[np.float32]]:
    with files(__package__).joinpath("backchannel.npz").open("rb") as file, np.load(file) as content:
        return {name: content[name].astype(np.float32) for name in content.files}
