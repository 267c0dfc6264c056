"""Speech that a voice renders once, and that is kept in a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.pcm import SampleLayout, Samples, samples_from_bytes
from omni_ws.engine.tts.synthesiser import SpokenWord


class Rendering:
    """A SynthesisListener that keeps the sound, and its rate in Hz."""

    def __init__(self) -> None:
        self._pcm16, self.rate = bytearray(), 24_000

    def audio(self, sample_rate: int, pcm16: bytes) -> bool:
        self.rate = sample_rate
        self._pcm16 += pcm16
        return True

    def words(self, words: list[SpokenWord]) -> None:
        """Nothing is needed of them."""

    @property
    def samples(self) -> Samples:
        return samples_from_bytes(bytes(self._pcm16), SampleLayout.S16)


def keep(file: Path, render: Callable[[], NDArray[Any]]) -> None:
    """Render into ``file`` (.npy) unless it is there. A file that is there is whole."""
    if not file.exists():
        part = file.with_suffix(".part.npy")
        np.save(part, render())
        part.rename(file)
