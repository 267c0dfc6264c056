"""Whether a short sound of a listener is an acknowledgement or no word at all, by its sound."""

from __future__ import annotations

from typing import Final

from omni_ws.audio.pcm import Samples
from omni_ws.audio.vad import SAMPLE_RATE

_FRAME: Final = SAMPLE_RATE // 100


def backchannel_probability(samples: Samples) -> float:
    """Return how probable it is that a sound ("mm-hm", "yeah", a laugh, a cough) is no word that means something.

    ``samples``, at 16 kHz: the voiced stretch, with up to 300 ms before it.
    """
    frames = samples[: len(samples) // _FRAME * _FRAME].reshape(-1, _FRAME)
    levels = (frames**2).mean(axis=1) if len(frames) else frames
    voiced_ms = 10 * int((levels > levels.max() / 1000).sum()) if len(frames) else 0
    return 0.7 if voiced_ms < 500 else 0.4
