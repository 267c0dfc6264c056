"""Transformer: the decoder stack of Talkers and code predictors, over a checkpoint's tensors.

Shapes: B sessions, n new positions of each, W positions that they attend to, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.experts import Experts
from omni_ws.engine.omni.gated_mlp import GatedMlp


class KeyValues(Protocol):
    """Where a pass puts its keys and values, and what it attends to."""

    #: True where a query may attend, (B or 1, n, W); None where every query may attend to all.
    mask: torch.Tensor | None

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep keys and values (B, kv_heads, n, head_dim); return those to attend to, (B, kv_heads, W, head_dim)."""
        ...


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a layer; those that are applied to the same input are one matrix."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    mlp: GatedMlp | Experts


class Transformer:
    """Layers and final norm. Biases, norms of queries and keys, and experts are used where the checkpoint has them."""

    def __init__(self, source: TensorSource, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype) -> None:
        self.shape = shape
        self._layers = [_load(source, f"{prefix}.layers.{i}", shape, device, dtype) for i in range(shape.layers)]
        self._norm = source.tensor(f"{prefix}.norm.weight").to(device, dtype)
        frequencies = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
        self._frequencies = (1.0 / shape.rope_theta**frequencies).to(device)
        self._axes = torch.tensor(shape.axes, device=device)
        self._dtype = dtype

    def rotations(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine (B, n, 1, head_dim) for M-RoPE ``positions`` (3, B, n)."""
        angles = positions[self._axes].permute(1, 2, 0).float() * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

    def __call__(self, x: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor], kept: KeyValues) -> torch.Tensor:
        """Return the normed states (B, n, H) of rows ``x`` (B, n, H)."""
        eps, size = self.shape.norm_eps, self.shape.hidden_size
        mask = self._grouped(kept.mask)
        for number, layer in enumerate(self._layers):
            x = x + self._attend(
                number, layer, functional.rms_norm(x, (size,), layer.attention_norm, eps), rotations, kept, mask
            )
            x = x + layer.mlp(functional.rms_norm(x, (size,), layer.mlp_norm, eps))
        return functional.rms_norm(x, (size,), self._norm, eps)

    def _grouped(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return what the mask adds to scores, for all queries that share keys: (B, n, W) to (B, 1, group * n, W)."""
        if mask is None:
            return None
        group = self.shape.heads // self.shape.kv_heads
        # Added rather than true or false: attention would convert it in every layer.
        added = torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)
        return added.repeat(1, group, 1)[:, None]

    def _attend(
        self,
        number: int,
        layer: _Layer,
        x: torch.Tensor,
        rotations: tuple[torch.Tensor, torch.Tensor],
        kept: KeyValues,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        shape, (batch, new, _) = self.shape, x.shape
        qkv = functional.linear(x, layer.qkv, layer.qkv_bias).view(batch, new, -1, shape.head_dim)
        queries, keys, values = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
        if layer.query_norm is not None and layer.key_norm is not None:
            queries = functional.rms_norm(queries, (shape.head_dim,), layer.query_norm, shape.norm_eps)
            keys = functional.rms_norm(keys, (shape.head_dim,), layer.key_norm, shape.norm_eps)
        queries, keys = _rotated(queries, rotations), _rotated(keys, rotations)
        every_key, every_value = kept.put(number, keys.transpose(1, 2), values.transpose(1, 2))
        # The queries that share keys are further queries of one head, so that keys are never repeated.
        queries = queries.transpose(1, 2).reshape(batch, shape.kv_heads, -1, shape.head_dim)
        mixed = functional.scaled_dot_product_attention(queries, every_key, every_value, attn_mask=mask)
        mixed = mixed.view(batch, shape.heads, new, shape.head_dim).transpose(1, 2).reshape(batch, new, -1)
        return functional.linear(mixed, layer.output)


def _rotated(x: torch.Tensor, rotations: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = rotations
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


def _load(source: TensorSource, prefix: str, shape: BlockShape, device: str, dtype: torch.dtype) -> _Layer:
    def get(name: str) -> torch.Tensor:
        return source.tensor(f"{prefix}.{name}").to(device, dtype)

    def get_if(name: str) -> torch.Tensor | None:
        return get(name) if f"{prefix}.{name}" in source else None

    parts = [f"self_attn.{part}_proj" for part in "qkv"]
    biased = f"{prefix}.{parts[0]}.bias" in source
    has_experts = f"{prefix}.mlp.gate.weight" in source
    return _Layer(
        attention_norm=get("input_layernorm.weight"),
        qkv=torch.cat([get(f"{part}.weight") for part in parts]),
        qkv_bias=torch.cat([get(f"{part}.bias") for part in parts]) if biased else None,
        query_norm=get_if("self_attn.q_norm.weight"),
        key_norm=get_if("self_attn.k_norm.weight"),
        output=get("self_attn.o_proj.weight"),
        mlp_norm=get("post_attention_layernorm.weight"),
        mlp=Experts.load(source, f"{prefix}.mlp", shape, device, dtype)
        if has_experts
        else GatedMlp.load(source, f"{prefix}.mlp", device, dtype),
    )
