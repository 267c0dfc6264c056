"""SmartTurn: tells from the sound of speech whether the speaker has finished (Smart Turn v3)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from omni_ws.audio.log_mel import FRAMES_PER_SEC, SAMPLE_RATE, log_mel
from omni_ws.audio.onnx_network import OnnxNetwork, Tensors
from omni_ws.audio.samples import Samples
from omni_ws.audio.vad import runtime_library
from omni_ws.errors import EngineFailed

#: The network hears this much, the end of which is the pause. What is missing is silence before.
HEARD_SEC: Final = 8
HEARD_SAMPLES: Final = HEARD_SEC * SAMPLE_RATE
_BANDS: Final = 80
_INPUT: Final = "input_features"
_OUTPUT: Final = "logits"
#: A variance this small is that of digital silence.
_LEAST_VARIANCE: Final = 1e-7


class SmartTurn:
    """The network of one file, about 9 MB. It does not look at words, and knows English best.

    A question takes some 60 ms, with the GIL released. For use by one thread at a time.
    """

    def __init__(self, model: Path) -> None:
        """Load the network. Raises EngineFailed with the reason where the file is none, or is another one."""
        self._features = np.zeros((1, _BANDS, HEARD_SEC * FRAMES_PER_SEC), np.float32)
        self._probability = np.full((1, 1), np.nan, np.float32)
        library = runtime_library()
        if not model.is_file():
            raise _wrong(model, "there is no such file")
        try:
            self._network = OnnxNetwork(library, model)
        except (OSError, AttributeError, RuntimeError) as error:
            raise _wrong(model, "ONNX Runtime cannot load it") from error
        self._inputs = Tensors(self._network, {_INPUT: self._features})
        self._outputs = Tensors(self._network, {_OUTPUT: self._probability})
        try:  # the runtime checks names and shapes when it runs
            silence = self.finished(np.zeros(SAMPLE_RATE, np.float32))
        except RuntimeError as error:
            raise _wrong(model, "it has other inputs or outputs") from error
        if not 0 <= silence <= 1:
            raise _wrong(model, f"it answers {silence:g}, which is no probability")

    def finished(self, turn: Samples) -> float:
        """Return the probability that the speaker of ``turn``, at 16 kHz, has finished. Raises RuntimeError."""
        heard = np.zeros(HEARD_SAMPLES, np.float32)
        turn = turn[-HEARD_SAMPLES:]
        heard[HEARD_SAMPLES - len(turn) :] = turn
        heard = (heard - heard.mean()) / np.sqrt(heard.var() + _LEAST_VARIANCE)
        self._features[0] = log_mel(heard, self._features.shape[2], bands=_BANDS)
        self._network.run(self._inputs, self._outputs)
        return float(self._probability[0, 0])


def _wrong(model: Path, reason: str) -> EngineFailed:
    return EngineFailed(f"{model} is not a network of Smart Turn v3: {reason}")
