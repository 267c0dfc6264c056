"""The sliding-window transformer of Qwen3's Code2Wav over many streams, each in a slot of fixed size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from omni_ws.engine.omni.slot_convolutions import SlotMemory, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowShape:
    """The shape of the transformer; ``window`` is the number of positions that one attends to, itself included."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    norm_eps: float


class WindowTransformer:
    """The blocks and the final norm.

    The keys and values of the last ``window - 1`` positions are kept for each slot, as they are after rotation. All
    shapes depend on the batch and on the number of new positions alone.
    """

    def __init__(self, shape: WindowShape, weights: Weights, name: str, memory: SlotMemory) -> None:
        self._shape = shape
        self._past = shape.window - 1
        self._blocks = [
            _Block(shape, weights, f"{name}.layers.{index}", memory, self._past) for index in range(shape.layers)
        ]
        self._norm = weights[f"{name}.norm.weight"]
        even = torch.arange(0, shape.head_dim, 2, dtype=torch.float, device=memory.device)
        self._frequencies = 1.0 / (shape.rope_theta ** (even / shape.head_dim))
        self._memory = memory

    def __call__(self, x: Tensor, rows: Tensor, done: Tensor) -> Tensor:
        """Return the outputs for the next positions of the streams, (batch, n, size) -> (batch, n, size).

        ``done`` (batch,) int64 is the number of positions before them.
        """
        new = x.shape[1]
        positions = done[:, None] + torch.arange(new, device=x.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)[:, None]
        mask = self._mask(new, done)
        for block in self._blocks:
            x = block(x, rows, angles.cos(), angles.sin(), mask)
        return _rms_norm(x, self._norm, self._shape.norm_eps)

    def _mask(self, new: int, done: Tensor) -> Tensor:
        """Return which of the kept and new positions each new one attends to, (batch, 1, n, past + n) bool."""
        key = torch.arange(self._past + new, device=done.device)
        query = torch.arange(new, device=done.device)[:, None]
        in_window = (key >= query) & (key <= query + self._past)
        filled = key >= self._past - done.clamp(max=self._past)[:, None]
        return in_window[None, None] & filled[:, None, None]


class _Block:
    """One layer: attention and gated network, each scaled by channel before it is added."""

    def __init__(self, shape: WindowShape, weights: Weights, name: str, memory: SlotMemory, past: int) -> None:
        self._shape = shape
        self._past = past
        self._keys = memory.tensor(shape.kv_heads, past, shape.head_dim)
        self._values = memory.tensor(shape.kv_heads, past, shape.head_dim)
        self._q, self._k, self._v, self._o = (_linear(weights, f"{name}.self_attn.{part}_proj") for part in "qkvo")
        self._gate, self._up, self._down = (
            _linear(weights, f"{name}.mlp.{part}_proj") for part in ("gate", "up", "down")
        )
        self._attention_norm = weights[f"{name}.input_layernorm.weight"]
        self._mlp_norm = weights[f"{name}.post_attention_layernorm.weight"]
        self._attention_scale = weights[f"{name}.self_attn_layer_scale.scale"]
        self._mlp_scale = weights[f"{name}.mlp_layer_scale.scale"]

    def __call__(self, x: Tensor, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        normed = _rms_norm(x, self._attention_norm, self._shape.norm_eps)
        x = x + self._attention_scale * self._attend(normed, rows, cosine, sine, mask)
        normed = _rms_norm(x, self._mlp_norm, self._shape.norm_eps)
        gated = functional.silu(functional.linear(normed, *self._gate)) * functional.linear(normed, *self._up)
        return x + self._mlp_scale * functional.linear(gated, *self._down)

    def _attend(self, x: Tensor, rows: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            functional.linear(x, *part).unflatten(-1, (-1, self._shape.head_dim)).transpose(1, 2)
            for part in (self._q, self._k, self._v)
        )
        keys = torch.cat((self._keys[rows], _rotated(key, cosine, sine)), 2)
        values = torch.cat((self._values[rows], value), 2)
        self._keys[rows] = keys[:, :, -self._past :]
        self._values[rows] = values[:, :, -self._past :]
        attended = functional.scaled_dot_product_attention(
            _rotated(query, cosine, sine),
            keys,
            values,
            attn_mask=mask,
            enable_gqa=self._shape.heads != self._shape.kv_heads,
        )
        return functional.linear(attended.transpose(1, 2).flatten(2), *self._o)


def _linear(weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
    return weights[f"{name}.weight"], weights.get(f"{name}.bias")


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine
