"""The network that the Talkers of both families share (TalkerNetwork), and the sampling of codes (SamplingState).

Shapes: B sessions, V codes of a vocabulary, C candidate codes.
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

from omni_ws.engine.omni.checkpoint import CheckpointTensors
from omni_ws.engine.omni.prompt_reading import NONE, PromptReader, TalkerRows
from omni_ws.engine.omni.step_model import TalkerSettings
from omni_ws.engine.omni.transformer import BlockShape, SlotCache, Transformer

#: The Thinker's embeddings, which stay on the CPU: the Talker looks up single rows of them.
EMBEDDINGS: Final = "thinker.model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class SlotSpace:
    """The slots of a Talker: their number, the positions of each (``longest``), device and dtype."""

    slots: int
    longest: int
    device: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of a step, for every slot, in fixed buffers, which CUDA graphs require.

    ``rows`` (slots, hidden size of the Thinker) are rows of the answer. ``lengths`` (slots,) is the number of positions
    that a slot has, ``positions`` (slots,) the M-RoPE position of its next row, ``frames`` (slots,) the number of the
    frame. The result of a slot that is not ``active`` (slots,) is discarded.
    """

    rows: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    frames: torch.Tensor
    active: torch.Tensor


class TalkerNetwork(ABC):
    """Weights, KV cache in slots, and two forward passes: ``prefill`` of one session's prompt, ``step`` of a batch."""

    #: The names of the voices, the default first.
    voices: tuple[str, ...]
    #: The settings of a session that asks for none.
    defaults: TalkerSettings
    #: The tokens of the rows behind the answer: of the first such row, and of all further ones.
    after_answer: tuple[int, int]
    #: The codes of the first codebook that end an answer.
    end_codes: frozenset[int]
    codebooks: int
    #: Whether rows of the answer contain the Thinker's hidden states.
    answer_states: bool
    #: The code that stands in for the frame before the first.
    _start_code: int

    def __init__(
        self, source: CheckpointTensors, space: SlotSpace, shape: BlockShape, sampling: SamplingState, first_codes: str
    ) -> None:
        self.space = space
        self._embeddings = source.tensor(EMBEDDINGS)
        self._transformer = Transformer(source, "talker.model", shape, space.device, space.dtype)
        self._cache = SlotCache(shape, space.slots, space.longest, space.device, space.dtype)
        self._sampling = sampling
        self._head = source.tensor("talker.codec_head.weight").to(space.device, space.dtype)
        #: The embeddings of the first codebook.
        self._codes = source.tensor(first_codes).to(space.device, space.dtype)
        #: The sum of the embeddings of the codes in each slot's last frame, which is added to the next row.
        self._feedback = torch.zeros(space.slots, self._codes.shape[1], device=space.device, dtype=space.dtype)

    @property
    def memory_bytes(self) -> int:
        """The bytes of the tensors on the device."""
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
        """Return the PromptReader of a prompt that is to be answered in ``voice``."""

    def open(self, slot: int, settings: TalkerSettings) -> None:
        """Prepare a slot for a session."""
        self._sampling.open(slot, settings)
        self._feedback[slot] = self._codes[self._start_code]

    def reset(self) -> None:
        """Set the contents of all slots to zero."""
        self._cache.keys.zero_()
        self._cache.values.zero_()
        self._feedback.zero_()

    def embedded(self, tokens: NDArray[np.int64]) -> torch.Tensor:
        """Return the Thinker's embeddings (n, hidden size) float32, on the CPU; zeros for NONE."""
        there = torch.from_numpy(tokens != NONE)
        rows = self._embeddings[torch.from_numpy(np.maximum(tokens, 0))].float()
        return rows.masked_fill_(~there[:, None], 0)

    def prefill(self, slot: int, start: int, rows: TalkerRows) -> None:
        """Compute keys and values of rows of a prompt, which follow the ``start`` positions that the slot has."""
        positions = torch.tensor(rows.positions, device=self.space.device)[:, None]
        put, mask = self._cache.piece(slot, start, len(rows))
        self._transformer(self._prompt_inputs(rows)[None], self._transformer.rotations(positions), put, mask)

    def step(self, inputs: StepInputs, batch: int, window: int) -> torch.Tensor:
        """Return a frame of each of the first ``batch`` slots, (batch, codebooks).

        ``window`` must be larger than the lengths of these slots.
        """
        lengths, frames = inputs.lengths[:batch], inputs.frames[:batch]
        active = inputs.active[:batch].bool()
        positions = inputs.positions[:batch].expand(3, -1)[..., None]
        x = self._answer_inputs(inputs.rows[:batch], self._feedback[:batch])
        put, mask = self._cache.row(lengths, window)
        state = self._transformer(x[:, None], self._transformer.rotations(positions), put, mask)[:, 0]
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
        """Return the transformer's input (B, H) for rows of answers and the feedback of the last frames."""

    @abstractmethod
    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the frames (B, codebooks) with these last states and first codes, and their feedback (B, H)."""


def held_bytes(thing: Any, counted: set[int]) -> int:
    """Return the bytes of all tensors in an object graph, except for objects whose ids are in ``counted``."""
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


#: The numbers of draws that are reserved for a frame, one for each codebook.
_DRAWS: Final = 64


class SamplingState:
    """The sampling parameters of the sessions, on the device, and the codes that each session has drawn.

    The codes of a session do not depend on the batch: noise is a function of its seed and the number of the frame.
    ``penalised`` are codes to which the repetition penalty applies from the start, ``suppressed`` are never drawn.
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
        """Set the parameters of a new session, which has drawn no codes."""
        # A temperature closer to 0 would let logits overflow.
        self.temperature[slot] = max(settings.temperature, 0.01) if settings.temperature else 0
        self.top_k[slot] = min(settings.top_k, self._vocabulary) if settings.top_k > 0 else self._vocabulary
        self.top_p[slot] = settings.top_p
        self.penalty[slot] = settings.repetition_penalty
        assert settings.seed is not None
        digest = blake2b(str(settings.seed).encode(), digest_size=4).digest()
        self.seed[slot] = int.from_bytes(digest) & _MASK_31
        self.had[slot] = self._first_had

    def draw(self, logits: torch.Tensor, frames: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Draw a code (B,) from ``logits`` (B, V) float32 of the first slots, and note it for the active slots.

        ``frames`` (B,) are the numbers of the frames. The order is: repetition penalty, suppression, temperature,
        top_k, top_p.
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
        seeds, draws = self.seed[:batch], frames * _DRAWS
        code = _drawn(ordered, codes, greedy=greedy, top_p=self.top_p[:batch], seeds=seeds, draws=draws)
        had.scatter_(1, code[:, None], had.gather(1, code[:, None]) | active[:, None])
        return code

    def draw_residual(self, logits: torch.Tensor, frames: torch.Tensor, codebook: int) -> torch.Tensor:
        """Draw a code (B,) of ``codebook`` 1 or higher with transformers' parameters, top_k 50 and top_p 0.8."""
        batch = len(logits)
        ordered, codes = logits.topk(min(50, logits.shape[-1]), dim=-1)
        greedy, draws = self.temperature[:batch] == 0, frames * _DRAWS + codebook
        return _drawn(ordered, codes, greedy=greedy, top_p=0.8, seeds=self.seed[:batch], draws=draws)


def _drawn(
    logits: torch.Tensor,
    codes: torch.Tensor,
    *,
    greedy: torch.Tensor,
    top_p: torch.Tensor | float,
    seeds: torch.Tensor,
    draws: torch.Tensor,
) -> torch.Tensor:
    """Draw a code (B,) among the most probable that together have the probability ``top_p``.

    ``logits`` (B, C) of the candidate ``codes`` (B, C) are in descending order. Sessions that are ``greedy`` (B, 1) get
    the most probable code.
    """
    probabilities = logits.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    # The most probable code always stays, however sums and top_p are rounded.
    before[:, 0] = -1
    logits = logits.masked_fill(before >= top_p, -torch.inf)
    # The largest sum of logit and Gumbel noise is a draw from the softmax.
    noise = gumbel_noise(seeds, draws, codes).masked_fill(greedy, 0)
    best = (logits + noise).argmax(dim=-1, keepdim=True)
    return codes.gather(1, best)[:, 0]


def gumbel_noise(seeds: torch.Tensor, draws: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Return noise for ``codes`` (B, C), a function of the code and of its row's seed (B,) and draw number (B,)."""
    keys = _hashed(_hashed(seeds) ^ _hashed(draws & _MASK_31))
    bits = _hashed(keys[:, None] ^ _hashed(codes))
    uniform = (bits.double() + 0.5) / (1 << 31)
    return -torch.log(-torch.log(uniform)).float()


def normal_at(positions: torch.Tensor, seed: int) -> torch.Tensor:
    """Return a standard normal sample for each integer position, a function of position and seed alone.

    Overlapping windows therefore have the same noise where they overlap.
    """
    first = _hashed(positions * 2, seed).double() / (1 << 31)
    second = _hashed(positions * 2 + 1, seed).double() / (1 << 31)
    # The Box-Muller transform; 1 - first is never 0.
    return (torch.sqrt(-2 * torch.log1p(-first)) * torch.cos(2 * math.pi * second)).float()


_MASK_31: Final = (1 << 31) - 1


def _hashed(numbers: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return a hash of 31 bits for each number of up to 31 bits; products of two such numbers stay below 2^63."""
    mixed = (numbers + ((seed * 0x5851F42D + 0x14057B7E) & _MASK_31)) & _MASK_31
    for factor in (0x45D9F3B3, 0x2C1B3C6D, 0x297A2D39):
        mixed = mixed ^ (mixed >> 16)
        mixed = (mixed * factor) & _MASK_31
    return mixed ^ (mixed >> 15)
