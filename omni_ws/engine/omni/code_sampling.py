"""Draws codes on the device, each session's as if it were alone: noise is a function of its seed and its frame.

Shapes: B sessions, V codes of a vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import torch

from omni_ws.engine.omni.talker_settings import TalkerSettings

_MASK_31: Final = (1 << 31) - 1
#: How many draws a frame has room for: one for each codebook.
_DRAWS: Final = 64


class SamplingState:
    """Settings of the slots' sessions, and which codes each has had, on the device.

    ``penalised`` are codes that count as had from the start, ``suppressed`` codes that are never drawn.
    """

    def __init__(
        self, slots: int, vocabulary: int, device: str, *, suppressed: list[int], penalised: list[int] | None = None
    ) -> None:
        self.temperature = torch.ones(slots, 1, device=device)
        self.top_k = torch.ones(slots, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(slots, 1, device=device)
        self.penalty = torch.ones(slots, 1, device=device)
        self.seed = torch.zeros(slots, dtype=torch.int64, device=device)
        self.had = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)
        self._vocabulary = vocabulary
        self._suppressed = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._suppressed[suppressed] = True
        self._first_had = torch.zeros(vocabulary, dtype=torch.bool, device=device)
        self._first_had[penalised or []] = True

    def open(self, slot: int, settings: TalkerSettings) -> None:
        """Take over a session's settings; it has had no codes."""
        # What is closer to 0 would let logits overflow.
        self.temperature[slot] = max(settings.temperature, 0.01) if settings.temperature else 0
        self.top_k[slot] = min(settings.top_k, self._vocabulary) if settings.top_k > 0 else self._vocabulary
        self.top_p[slot] = settings.top_p
        self.penalty[slot] = settings.repetition_penalty
        assert settings.seed is not None
        digest = blake2b(str(settings.seed).encode(), digest_size=4).digest()
        self.seed[slot] = int.from_bytes(digest) & _MASK_31
        self.had[slot] = self._first_had

    def draw(self, logits: torch.Tensor, frames: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return a code (B,) for ``logits`` (B, V) float32 of the first slots, and note it for those that are active.

        ``frames`` (B,) are the numbers of the frames. Penalty, suppression, temperature, top_k and top_p follow each
        other in this order.
        """
        batch = len(logits)
        had = self.had[:batch]
        penalty = self.penalty[:batch]
        logits = torch.where(had, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
        logits = logits.masked_fill(self._suppressed, -torch.inf)
        temperature = self.temperature[:batch]
        greedy = temperature == 0
        ordered, codes = (logits / temperature.masked_fill(greedy, 1)).sort(dim=-1, descending=True)
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        ordered = ordered.masked_fill(ranks >= self.top_k[:batch], -torch.inf)
        code = chosen(Candidates(ordered, codes, greedy), self.top_p[:batch], self.seed[:batch], frames * _DRAWS)
        had.scatter_(1, code[:, None], had.gather(1, code[:, None]) | active[:, None])
        return code

    def draw_residual(self, logits: torch.Tensor, frames: torch.Tensor, codebook: int) -> torch.Tensor:
        """Return a code (B,) of a further ``codebook``, from 1, as transformers draws them: top_k 50, top_p 0.8."""
        batch = len(logits)
        ordered, codes = logits.topk(min(50, logits.shape[-1]), dim=-1)
        candidates = Candidates(ordered, codes, self.temperature[:batch] == 0)
        return chosen(candidates, 0.8, self.seed[:batch], frames * _DRAWS + codebook)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Logits (B, C) in falling order, their codes (B, C), and whether a session takes the likeliest (B, 1)."""

    logits: torch.Tensor
    codes: torch.Tensor
    greedy: torch.Tensor


def chosen(
    candidates: Candidates, top_p: torch.Tensor | float, seeds: torch.Tensor, draws: torch.Tensor
) -> torch.Tensor:
    """Return a code (B,): the likeliest, or one drawn among the likeliest that together have ``top_p``."""
    probabilities = candidates.logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The likeliest always stays, whatever rounding leaves before it or of top_p.
    before[:, 0] = -1
    logits = candidates.logits.masked_fill(before >= top_p, -torch.inf)
    # The largest sum of logit and Gumbel noise is a draw from the softmax.
    noise = gumbel_noise(seeds, draws, candidates.codes).masked_fill(candidates.greedy, 0)
    best = (logits + noise).argmax(dim=-1, keepdim=True)
    return candidates.codes.gather(1, best)[:, 0]


def gumbel_noise(seeds: torch.Tensor, draws: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return noise for each of ``codes`` (B, C), determined by it, its row's seed (B,) and the number of the draw."""
    keys = _mixed(_mixed(seeds) ^ _mixed(draws & _MASK_31))
    bits = _mixed(keys[:, None] ^ _mixed(codes))
    uniform = (bits.double() + 0.5) / (1 << 31)
    return -torch.log(-torch.log(uniform)).float()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """Return 31 well-mixed bits for each number of 31 bits. Products stay below 2^62."""
    mixed = (numbers + 0x14057B7E) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
