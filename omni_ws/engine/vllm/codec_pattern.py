"""Logits processors that constrain a speech language model to the tokens of each slot in its codec frames.

vLLM loads them by name in its engine process. They exist twice because each generation of vLLM's model runner has an
interface of its own; the configuration of the engine decides which one runs (``processor_name``). A request opts in by
``extra_arguments``; all others are unaffected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as RowLogitsProcessor

_KEY: Final = "codec_pattern"


class Pattern(NamedTuple):
    """The allowed tokens: in slot ``i``, ``codebook_size`` IDs from ``first_token + i * codebook_size``.

    ``stop`` is allowed after each whole frame.
    """

    first_token: int
    codebook_size: int
    slots: int
    stop: int


def extra_arguments(pattern: Pattern) -> dict[str, Any]:
    """Return the ``SamplingParams.extra_args`` of a request that is constrained to ``pattern``."""
    return {_KEY: list(pattern)}


def processor_name(vllm_config: Any) -> str:
    """Return the entry of ``logits_processors`` for the model runner that this configuration uses."""
    processor = CodecPatternRows if vllm_config.use_v2_model_runner else CodecPattern
    return f"{processor.__module__}:{processor.__qualname__}"


def _pattern_of(params: SamplingParams) -> Pattern | None:
    """Return the pattern that a request asks for, or None. Raises ValueError for a malformed one."""
    wanted = (params.extra_args or {}).get(_KEY)
    if wanted is None:
        return None
    if not isinstance(wanted, list | tuple) or len(wanted) != 4 or any(type(number) is not int for number in wanted):
        raise ValueError(f"{_KEY} must be [first token, codebook size, slots per frame, stop token]")
    pattern = Pattern(*wanted)
    if min(pattern.first_token, pattern.stop) < 0 or min(pattern.codebook_size, pattern.slots) < 1:
        raise ValueError(f"{_KEY}: token ids must not be negative; codebook size and slots must be at least 1")
    return pattern


class CodecPattern(AdapterLogitsProcessor):  # type: ignore[misc]
    """The processor for the first generation of the model runner, called for one request at a time."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _pattern_of(sampling_params)

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> partial[torch.Tensor] | None:
        pattern = _pattern_of(params)
        return None if pattern is None else partial(_keep_slot, pattern)


def _keep_slot(pattern: Pattern, output_tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Mask all logits but those of the tokens allowed after ``output_tokens``."""
    done = len(output_tokens)
    slot = done % pattern.slots
    low = pattern.first_token + slot * pattern.codebook_size
    kept = torch.full_like(logits, -math.inf)
    kept[low : low + pattern.codebook_size] = logits[low : low + pattern.codebook_size]
    if slot == 0 and done:
        kept[pattern.stop] = logits[pattern.stop]
    return kept


class CodecPatternRows(RowLogitsProcessor):  # type: ignore[misc]
    """The processor for the second generation, called for all rows of a step at once, on the device."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self._requests = req_states
        #: A Pattern for each index of a request; its ``slots`` is 0 for requests without one.
        self._patterns = np.zeros((req_states.max_num_reqs, len(Pattern._fields)), np.int64)
        self._on_device = torch.zeros(self._patterns.shape, dtype=torch.int64, device=req_states.device)
        self._tokens = torch.arange(req_states.vocab_size, device=req_states.device)
        self._changed = False

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _pattern_of(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        pattern = _pattern_of(sampling_params)
        self._patterns[req_idx] = (0, 0, 0, 0) if pattern is None else pattern
        self._changed = True
        return pattern is not None

    def apply_staged_writes(self) -> None:
        if self._changed:
            # Transfer a copy, because the next step may change the host's array before the transfer has finished.
            self._on_device.copy_(torch.from_numpy(self._patterns.copy()))
            self._changed = False

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        if not self._patterns[ctx.idx_mapping_np, Pattern._fields.index("slots")].any():
            return logits
        requests = ctx.expanded_idx_mapping.long()
        first, size, slots, stop = self._on_device[requests].unsqueeze(-1).unbind(1)
        # A row samples the token after the one at ``pos``.
        done = (ctx.pos + 1 - self._requests.prompt_len.gpu[requests]).long().unsqueeze(-1)
        slot = done % slots.clamp(min=1)
        low = first + slot * size
        kept = (self._tokens >= low) & (self._tokens < low + size)
        kept |= (self._tokens == stop) & (slot == 0) & (done > 0)
        kept |= slots == 0
        return logits.masked_fill_(~kept[:, : logits.shape[-1]], -math.inf)
