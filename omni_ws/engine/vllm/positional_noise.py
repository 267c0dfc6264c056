"""Deterministic noise for SNAC's decoder, as a function of the position in the audio.

SNAC's decoder adds random noise in its layers. Drawn anew for each window, it would make overlapping windows disagree
about the samples that they share. Here it is a hash of the position, so every window computes the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from snac.layers import NoiseBlock
from torch import nn

from omni_ws.engine.omni.talker_network import normal_at


class NoisePositions:
    """The positions of the windows being decoded, shared by all noise blocks of a decoder."""

    def __init__(self) -> None:
        self.starts = torch.zeros(1, dtype=torch.int64)
        self.frames = 1

    @contextmanager
    def at(self, starts: torch.Tensor, *, frames: int) -> Iterator[None]:
        """Set the first frame of each window, and the number of frames in every one, for a decoding."""
        self.starts, self.frames = starts, frames
        yield


class PositionalNoise(nn.Module):  # type: ignore[misc]
    """Replaces one of SNAC's noise blocks, with the same weights."""

    def __init__(self, linear: nn.Module, positions: NoisePositions, seed: int) -> None:
        super().__init__()
        self.linear = linear
        self._positions = positions
        self._seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        per_frame = x.shape[-1] // self._positions.frames
        positions = self._positions.starts[:, None] * per_frame + torch.arange(x.shape[-1], device=x.device)
        mixed: torch.Tensor = x + normal_at(positions, self._seed)[:, None].to(x.dtype) * self.linear(x)
        return mixed


def replace_noise(decoder: nn.Module, positions: NoisePositions, seed: int | None) -> None:
    """Replace the noise blocks of ``decoder``, or, with ``seed`` None, remove them."""
    blocks = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if isinstance(child, NoiseBlock)
    ]
    for number, (parent, name, block) in enumerate(blocks):
        noise = nn.Identity() if seed is None else PositionalNoise(block.linear, positions, seed * 1009 + number)
        setattr(parent, name, noise)
