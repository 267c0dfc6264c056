"""Noise that belongs to a place in the sound instead of to the moment at which it is drawn.

SNAC's decoder mixes fresh random noise into its layers. Two windows that overlap would then disagree about the samples
they share. Here the noise of a place is computed from its number, so that every window finds the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from snac.layers import NoiseBlock
from torch import nn

_MASK_31 = (1 << 31) - 1


class NoisePlaces:
    """Where the windows begin that are being decoded. Shared by the noise blocks of one decoder."""

    def __init__(self) -> None:
        self.starts = torch.zeros(1, dtype=torch.int64)
        self.frames = 1

    @contextmanager
    def at(self, starts: torch.Tensor, *, frames: int) -> Iterator[None]:
        """``starts``: the first frame of each window; all are of ``frames`` frames."""
        self.starts, self.frames = starts, frames
        yield


class PositionalNoise(nn.Module):  # type: ignore[misc]
    """Stands for SNAC's noise block, with its weights."""

    def __init__(self, linear: nn.Module, places: NoisePlaces, seed: int) -> None:
        super().__init__()
        self.linear = linear
        self._places = places
        self._seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        per_frame = x.shape[-1] // self._places.frames
        places = self._places.starts[:, None] * per_frame + torch.arange(x.shape[-1], device=x.device)
        mixed: torch.Tensor = x + normal_at(places, self._seed)[:, None].to(x.dtype) * self.linear(x)
        return mixed


def place_noise(decoder: nn.Module, places: NoisePlaces, seed: int | None) -> None:
    """Replaces the noise blocks of ``decoder``, or, without a seed, takes them out."""
    blocks = [
        (parent, name, child)
        for parent in decoder.modules()
        for name, child in parent.named_children()
        if isinstance(child, NoiseBlock)
    ]
    for number, (parent, name, block) in enumerate(blocks):
        noise = nn.Identity() if seed is None else PositionalNoise(block.linear, places, seed * 1009 + number)
        setattr(parent, name, noise)


def normal_at(places: torch.Tensor, seed: int) -> torch.Tensor:
    """A draw from the normal distribution for each place (integers), always the same for the same place and seed."""
    first = _hashed(places * 2, seed).double() / (1 << 31)
    second = _hashed(places * 2 + 1, seed).double() / (1 << 31)
    # 1 - first is never 0.
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


def _hashed(numbers: torch.Tensor, seed: int) -> torch.Tensor:
    """31 well-mixed bits of each number. Products stay below 2^63: factors of 31 bits each."""
    mixed = (numbers + ((seed * 0x5851F42D + 0x14057B7E) & _MASK_31)) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
