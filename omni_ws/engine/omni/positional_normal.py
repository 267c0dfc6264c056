"""Normal noise as a function of the position, so that overlapping windows agree on what they share."""

from __future__ import annotations

import math
from typing import Final

import torch

_MASK_31: Final = (1 << 31) - 1


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
