"""Deterministic noise for SNAC's decoder, as a function of the position in the audio.

SNAC's decoder adds random noise in its layers. Drawn anew for each window, it would make overlapping windows disagree
about the samples that they share. Here it is a hash of the position, so every window computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from snac.layers import NoiseBlock
from torch import nn

_MASK_31 = (1 << 31) - 1


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


def normal_at(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a standard normal sample for each position (an integer), determined by position and seed."""
    first = _hashed(positions * 2, seed).double() / (1 << 31)
    second = _hashed(positions * 2 + 1, seed).double() / (1 << 31)
    # The Box-Muller transform; 1 - first is never 0.
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


def _hashed(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """Return 31 well-mixed bits for each number. Products stay below 2^63, as all factors have 31 bits."""
    mixed = (numbers + ((seed * 0x5851F42D + 0x14057B7E) & _MASK_31)) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
