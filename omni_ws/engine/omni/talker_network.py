"""TalkerNetwork: what the Talkers of both families do on the device, over slots of fixed shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.code_sampling import SamplingState
from omni_ws.engine.omni.prompt_reading import NONE, PromptReader, TalkerRows
from omni_ws.engine.omni.slot_cache import SlotCache
from omni_ws.engine.omni.talker_settings import TalkerSettings
from omni_ws.engine.omni.transformer import Transformer

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
