"""Experts: a mixture of feed-forward networks with a shared one, without a loop and without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.gated_mlp import GatedMlp

#: Up to so many pairs of row and expert, each pair's matrices are gathered: fewer operators, but each matrix is copied.
#: Above, rows are sorted by expert and each matrix is read once.
_GATHERED: Final = 16
#: The same where a sorted product would wait for the device, which a step must not do: 32 rows of 8 experts.
_GATHERED_OTHERWISE: Final = 256
#: The CUDA architectures on which PyTorch's grouped product of bfloat16 is one kernel.
_GROUPING: Final = (9, 10)


@dataclass(frozen=True, slots=True)
class Experts:
    """E experts, of which each row uses the ``per_token`` that the router prefers, and one that all rows use.

    ``gate_up`` (E, 2 * inner, H), ``down`` (E, H, inner).
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: GatedMlp
    shared_gate: torch.Tensor
    per_token: int
    normalise: bool
    gathered: int

    @classmethod
    def load(cls, source: TensorSource, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype) -> Experts:
        router = source.tensor(f"{prefix}.gate.weight").to(device, dtype)
        inner, size = source.tensor(f"{prefix}.experts.0.gate_proj.weight").shape
        gate_up = torch.empty(len(router), 2 * inner, size, device=device, dtype=dtype)
        down = torch.empty(len(router), size, inner, device=device, dtype=dtype)
        # Copied in place one by one: beside the matrices themselves, loading takes no memory of the device.
        for expert in range(len(router)):
            for name, place in (
                ("gate", gate_up[expert, :inner]),
                ("up", gate_up[expert, inner:]),
                ("down", down[expert]),
            ):
                place.copy_(source.tensor(f"{prefix}.experts.{expert}.{name}_proj.weight"))
        return cls(
            router=router,
            gate_up=gate_up,
            down=down,
            shared=GatedMlp.load(source, f"{prefix}.shared_expert", device, dtype),
            shared_gate=source.tensor(f"{prefix}.shared_expert_gate.weight").to(device, dtype),
            per_token=shape.experts_per_token,
            normalise=shape.normalise_experts,
            gathered=_most_gathered(device, dtype),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(-1, x.shape[-1])
        weights = functional.softmax(functional.linear(rows, self.router), dim=-1, dtype=torch.float32)
        weights, chosen = weights.topk(self.per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        made = self._gathered(rows, chosen) if chosen.numel() <= self.gathered else self._sorted(rows, chosen)
        mixed = (made * weights.to(x.dtype)[:, :, None]).sum(dim=1)
        shared = torch.sigmoid(functional.linear(rows, self.shared_gate)) * self.shared(rows)
        return (mixed + shared).view(x.shape)

    def _gathered(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return what each expert in ``chosen`` (rows, k) makes of its row, (rows, k, H)."""
        gate, up = torch.matmul(self.gate_up[chosen], rows[:, None, :, None]).squeeze(-1).chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        return torch.matmul(self.down[chosen], inner[..., None]).squeeze(-1)

    def _sorted(self, rows: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The same, with the pairs sorted by expert."""
        experts, order = chosen.view(-1).sort(stable=True)
        numbers = torch.arange(len(self.router), device=rows.device)
        ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
        inputs = rows[order // self.per_token]
        gate, up = functional.grouped_mm(inputs, self.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        made = functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        return torch.empty_like(made).index_copy_(0, order, made).view(*chosen.shape, -1)


def _most_gathered(device: str, dtype: torch.dtype) -> int:
    if torch.device(device).type != "cuda":
        return _GATHERED
    groups = dtype is torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in _GROUPING
    return _GATHERED if groups else _GATHERED_OTHERWISE
