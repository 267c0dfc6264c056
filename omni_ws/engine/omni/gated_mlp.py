"""GatedMlp: the feed-forward network of a transformer's layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from omni_ws.engine.omni.checkpoint_tensors import TensorSource


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """SwiGLU; ``gate_up`` (2 * inner, H) holds both input matrices, ``down`` (H, inner)."""

    gate_up: torch.Tensor
    down: torch.Tensor

    @classmethod
    def load(cls, source: TensorSource, prefix: str, device: str, dtype: torch.dtype) -> GatedMlp:
        parts = [source.tensor(f"{prefix}.{name}_proj.weight").to(device, dtype) for name in ("gate", "up")]
        return cls(torch.cat(parts), source.tensor(f"{prefix}.down_proj.weight").to(device, dtype))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return functional.linear(functional.silu(gate) * up, self.down)
