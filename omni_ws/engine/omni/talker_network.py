"""What the Talkers of both families do on the device: TalkerNetwork, over slots of fixed shape, and the draw of codes.

Shapes: B sessions, V codes of a vocabulary.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from omni_ws.engine.omni.checkpoint import TensorSource
from omni_ws.engine.omni.prompt_reading import NONE, PromptReader, TalkerRows
from omni_ws.engine.omni.step_model import TalkerSettings
from omni_ws.engine.omni.transformer import BlockShape, SlotCache, Transformer

#: The table of the Thinker's embeddings, of which only rows are read.
EMBEDDINGS: Final = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """How many sessions a Talker holds, with how many positions each, and where."""

    slots: int
    longest: int
    device: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step reads, for every slot: fixed buffers, so that a CUDA graph can hold the step.

    ``rows`` (slots, hidden size of the Thinker) are the rows of the answer, ``lengths``, ``positions`` and ``frames``
    (slots,) how many positions a slot has, the position of the next one and the number of the frame. What a slot that
    is not ``active`` (slots,) computes has no effect.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    frames: torch.Tensor
    active: torch.Tensor


class TalkerNetwork(ABC):
    """Weights, slots and the two passes: over a piece of one session's prompt, and over a row of many sessions."""

    #: The names of the voices, the default first.
    voices: tuple[str, ...]
    #: What a session has that asks for nothing.
    defaults: TalkerSettings
    #: The tokens that follow the answer's rows: the first once, the second for ever.
    after_answer: tuple[int, int]
    #: The first codes that end an answer.
    end_codes: frozenset[int]
    codebooks: int
    #: Whether a row of the answer contains the Thinker's state.
    answer_states: bool

    def __init__(
        self, source: TensorSource, space: SlotSpace, shape: BlockShape, sampling: SamplingState, first_codes: str
    ) -> None:
        self.space = space
        self._embeddings = source.tensor(EMBEDDINGS)
        self._transformer = Transformer(source, "talker.model", shape, space.device, space.dtype)
        self._cache = SlotCache(shape, space.slots, space.longest, space.device, space.dtype)
        self._sampling = sampling
        self._head = source.tensor("talker.codec_head.weight").to(space.device, space.dtype)
        #: The embeddings of first codes.
        self._codes = source.tensor(first_codes).to(space.device, space.dtype)
        #: What the codes of a slot's last frame add to its next row.
        self._feedback = torch.zeros(space.slots, self._codes.shape[1], device=space.device, dtype=space.dtype)

    @property
    def memory_bytes(self) -> int:
        """What the tensors on the device take."""
        return held_bytes(vars(self), {id(self._embeddings)})

    @property
    def hidden_size(self) -> int:
        """The size of the Thinker's states and embeddings."""
        return int(self._embeddings.shape[1])

    @property
    def vocabulary(self) -> int:
        """The number of the Thinker's tokens."""
        return int(self._embeddings.shape[0])

    @abstractmethod
    def reader(self, voice: str) -> PromptReader:
        """Return what reads a prompt that is to be answered in ``voice``."""

    def open(self, slot: int, settings: TalkerSettings) -> None:
        """Make a slot ready for a session."""
        self._sampling.open(slot, settings)
        self._feedback[slot] = self._codes[self._start_code]

    def reset(self) -> None:
        """Forget what all slots hold."""
        self._cache.keys.zero_()
        self._cache.values.zero_()
        self._feedback.zero_()

    @property
    @abstractmethod
    def _start_code(self) -> int:
        """The code that stands for the one before the first."""

    def embedded(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return the Thinker's embeddings (n, hidden size) float32, on the CPU; zeros for NONE."""
        there = torch.from_numpy(tokens != NONE)
        rows = self._embeddings[torch.from_numpy(np.maximum(tokens, 0))].float()
        return rows.masked_fill_(~there[:, None], 0)

    def prefill(self, slot: int, start: int, rows: TalkerRows) -> None:
        """Compute keys and values of a piece of a prompt, behind the ``start`` positions that the slot has."""
        positions = torch.tensor(rows.positions, device=self.space.device)[:, None]
        kept = self._cache.piece(slot, start, len(rows))
        self._transformer(self._prompt_inputs(rows)[None], self._transformer.rotations(positions), kept)

    def step(self, inputs: StepInputs, batch: int, window: int) -> torch.Tensor:
        """Return a frame (batch, codebooks) for each of the first ``batch`` slots.

        ``window`` is more than any of their lengths.
        """
        lengths, frames = inputs.lengths[:batch], inputs.frames[:batch]
        active = inputs.active[:batch].bool()
        positions = inputs.positions[:batch].expand(3, -1)[..., None]
        x = self._answer_inputs(inputs.rows[:batch], self._feedback[:batch])
        kept = self._cache.row(lengths, window)
        state = self._transformer(x[:, None], self._transformer.rotations(positions), kept)[:, 0]
        first = self._sampling.draw(functional.linear(state, self._head).float(), frames, active)
        codes, feedback = self._frame(state, first, frames)
        self._feedback[:batch] = torch.where(active[:, None], feedback, self._feedback[:batch])
        return codes

    def _to_device(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(self.space.device, self.space.dtype)

    def _with_codes(self, x: torch.Tensor, rows: TalkerRows) -> torch.Tensor:
        """Add the embeddings of the rows' codes to ``x`` (n, size)."""
        where = np.flatnonzero(rows.codes != NONE)
        if not len(where):
            return x
        codes = torch.tensor(rows.codes[where], device=self.space.device)
        return x.index_add(0, torch.tensor(where, device=self.space.device), self._codes[codes])

    @abstractmethod
    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        """Return the transformer's input (n, H) for a piece of a prompt."""

    @abstractmethod
    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        """Return the transformer's input (B, H) for rows of answers and what the last frames add to them."""

    @abstractmethod
    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return whole frames (B, codebooks) from states and first codes, and what they add to the next rows."""


def held_bytes(thing: Any, counted: set[int]) -> int:
    """Return the size of all tensors in an object and in what it holds, but for those in ``counted`` (ids)."""
    if id(thing) in counted:
        return 0
    counted.add(id(thing))
    match thing:
        case torch.Tensor():
            return int(thing.nbytes)
        case dict():
            inside = list(thing.values())
        case list() | tuple():
            inside = list(thing)
        case _ if is_dataclass(thing):
            inside = [getattr(thing, field.name) for field in fields(thing)]
        case _:
            inside = list(getattr(thing, "__dict__", {}).values())
    return sum(held_bytes(part, counted) for part in inside)


#: How many draws a frame has room for: one for each codebook.
_DRAWS: Final = 64


class SamplingState:
    """Settings of the slots' sessions, and which codes each has had, on the device.

    Each session's codes are drawn as if it were alone: noise is a function of its seed and its frame.
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
    keys = _hashed(_hashed(seeds) ^ _hashed(draws & _MASK_31))
    bits = _hashed(keys[:, None] ^ _hashed(codes))
    uniform = (bits.double() + 0.5) / (1 << 31)
    return -torch.log(-torch.log(uniform)).float()


def normal_at(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a standard normal sample for each position (an integer), determined by position and seed.

    So overlapping windows agree on what they share.
    """
    first = _hashed(positions * 2, seed).double() / (1 << 31)
    second = _hashed(positions * 2 + 1, seed).double() / (1 << 31)
    # The Box-Muller transform; 1 - first is never 0.
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


_MASK_31: Final = (1 << 31) - 1


def _hashed(numbers: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return 31 well-mixed bits for each number of up to 31 bits. Products stay below 2^63, as all factors have 31."""
    mixed = (numbers + ((seed * 0x5851F42D + 0x14057B7E) & _MASK_31)) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
