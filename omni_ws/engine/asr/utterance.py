"""Utterance: speech between two silences, as recognisers get it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_ws.audio.samples import Pcm16

#: The sample rate of all audio for recognisers, in Hz.
SAMPLE_RATE: Final = 16_000


@dataclass(frozen=True, slots=True)
class UtteranceLimits:
    """How long an utterance may get, in samples.

    It is cut at the first weak window after ``cut_after``, and in any case at ``longest``.
    """

    cut_after: int
    longest: int


@dataclass(slots=True)
class Utterance:
    """An utterance that grows while it is spoken. ``start_sample`` is its place in the audio of the request."""

    start_sample: int
    #: The samples before the speech itself.
    lead: int = 0
    length: int = 0
    #: Whether the speaker pauses just now.
    quiet: bool = False
    _blocks: list[Pcm16] = field(default_factory=list)

    @property
    def start_ms(self) -> int:
        return self.start_sample * 1000 // SAMPLE_RATE

    def append(self, block: Pcm16) -> None:
        self._blocks.append(block)
        self.length += len(block)

    def pcm(self, start: int = 0, end: int | None = None) -> Pcm16:
        """Return the samples from ``start`` to ``end``, counted from the beginning of the utterance."""
        whole = np.concatenate(self._blocks)
        self._blocks = [whole]
        return whole[start:end]
