"""The network of Qwen3's Code2Wav over many streams of codec frames, exact however they are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.slot_convolutions import CausalConvolution, SlotMemory, TransposedConvolution, Weights
from omni_ws.engine.omni.window_transformer import WindowShape, WindowTransformer

_DILATIONS = (1, 3, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code2WavShape:
    """What ``code2wav_config`` of a checkpoint says. The names are those of the file where they are not plainer."""

    codebooks: int
    codebook_size: int
    decoder_dim: int
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    transformer: WindowShape

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Self:
        """Return the shape of a configuration. Raises ConfigurationError for one that is not supported."""
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise ConfigurationError([f"code2wav_config: hidden_act {act!r} is not supported"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if (kind := rope.get("rope_type", "default")) != "default":
            raise ConfigurationError([f"code2wav_config: rope_type {kind!r} is not supported"])
        size, heads = config.get("hidden_size", 1024), config.get("num_attention_heads", 16)
        shape = cls(
            codebooks=config.get("num_quantizers", 16),
            codebook_size=config.get("codebook_size", 2048),
            decoder_dim=config.get("decoder_dim", 1536),
            upsampling_ratios=tuple(config.get("upsampling_ratios", (2, 2))),
            upsample_rates=tuple(config.get("upsample_rates", (8, 5, 4, 3))),
            transformer=WindowShape(
                layers=config.get("num_hidden_layers", 8),
                heads=heads,
                kv_heads=config.get("num_key_value_heads", 16),
                head_dim=config.get("head_dim") or size // heads,
                window=config.get("sliding_window", 72),
                rope_theta=rope.get("rope_theta") or config.get("rope_theta", 10_000.0),
                norm_eps=config.get("rms_norm_eps", 1e-5),
            ),
        )
        if shape.samples_per_frame <= shape.samples_held:
            where = "code2wav_config: upsample_rates and upsampling_ratios"
            raise ConfigurationError([f"{where} by which one frame makes no sound are not supported"])
        return shape

    @property
    def samples_per_frame(self) -> int:
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def samples_held(self) -> int:
        """How many samples of the newest frame need the next frame; an answer ends without them."""
        held = 0
        for rate in self.upsample_rates:
            held = (held + 1) * rate
        return held


class Code2WavNetwork:
    """Embedding, transformer and convolutions.

    ``weights`` are the tensors of the module ``code2wav``, float32, on the device of ``memory``, which holds what is
    kept of each stream.
    """

    def __init__(self, shape: Code2WavShape, weights: Weights, memory: SlotMemory) -> None:
        self._embedding = weights["code_embedding.weight"]
        offsets = torch.arange(shape.codebooks, device=memory.device) * shape.codebook_size
        self._offsets = offsets.view(1, -1, 1)
        self._transformer = WindowTransformer(shape.transformer, weights, "pre_transformer", memory)
        self._upsample = [
            _Upsampling(weights, f"upsample.{index}", memory, ratio)
            for index, ratio in enumerate(shape.upsampling_ratios)
        ]
        self._enter = CausalConvolution(weights, "decoder.0", memory)
        self._decoder = [
            _DecoderBlock(weights, f"decoder.{index}.block", memory, rate)
            for index, rate in enumerate(shape.upsample_rates, 1)
        ]
        after = len(shape.upsample_rates) + 1
        self._leave_act = _SnakeBeta(weights, f"decoder.{after}")
        self._leave = CausalConvolution(weights, f"decoder.{after + 1}", memory)

    def __call__(self, codes: Tensor, rows: Tensor, done: Tensor, *, first: bool) -> Tensor:
        """Return the samples that the next frames settle, (batch, n * samples_per_frame); ``first``: less samples_held.

        ``codes`` (batch, codebooks, n) int64; ``rows`` (batch,) int64 are the slots of the streams, ``done`` (batch,)
        int64 the frames before these; ``first`` says that there are none in any of them.
        """
        # PyTorch's default on a GPU, convolutions in TF32, is off by a thousandth of the peak.
        precise = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
        with torch.inference_mode(), precise:
            x = functional.embedding(codes + self._offsets, self._embedding).mean(1)
            x = self._transformer(x, rows, done).transpose(1, 2)
            for upsampling in self._upsample:
                x = upsampling(x, rows, first=first)
            x = self._enter(x, rows)
            for block in self._decoder:
                x = block(x, rows, first=first)
            return self._leave(self._leave_act(x), rows)[:, 0].clamp(-1, 1)


class _SnakeBeta:
    """The activation x + sin²(a x) / b, with a and b by channel."""

    def __init__(self, weights: Weights, name: str) -> None:
        self._a = weights[f"{name}.alpha"].exp()[:, None]
        self._inverse_b = (1.0 / (weights[f"{name}.beta"].exp() + 1e-9))[:, None]

    def __call__(self, x: Tensor) -> Tensor:
        return x + self._inverse_b * torch.sin(x * self._a).square()


class _Upsampling:
    """A transposed convolution and a ConvNeXt block."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, ratio: int) -> None:
        self._up = TransposedConvolution(weights, f"{name}.0", memory, stride=ratio)
        channels = weights[f"{name}.1.gamma"].shape[0]
        self._depthwise = CausalConvolution(weights, f"{name}.1.dwconv", memory, groups=channels)
        self._norm = weights[f"{name}.1.norm.weight"], weights[f"{name}.1.norm.bias"]
        self._widen = weights[f"{name}.1.pwconv1.weight"], weights[f"{name}.1.pwconv1.bias"]
        self._narrow = weights[f"{name}.1.pwconv2.weight"], weights[f"{name}.1.pwconv2.bias"]
        self._gamma = weights[f"{name}.1.gamma"]

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        x = self._up(x, rows, first=first)
        inner = self._depthwise(x, rows).transpose(1, 2)
        inner = functional.layer_norm(inner, inner.shape[-1:], *self._norm, eps=1e-6)
        inner = functional.linear(functional.gelu(functional.linear(inner, *self._widen)), *self._narrow)
        return x + (self._gamma * inner).transpose(1, 2)


class _DecoderBlock:
    """Activation, transposed convolution and three dilated residual units."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, rate: int) -> None:
        self._act = _SnakeBeta(weights, f"{name}.0")
        self._up = TransposedConvolution(weights, f"{name}.1", memory, stride=rate)
        self._units = [
            (
                _SnakeBeta(weights, f"{name}.{index}.act1"),
                CausalConvolution(weights, f"{name}.{index}.conv1", memory, dilation=dilation),
                _SnakeBeta(weights, f"{name}.{index}.act2"),
                CausalConvolution(weights, f"{name}.{index}.conv2", memory),
            )
            for index, dilation in enumerate(_DILATIONS, 2)
        ]

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        x = self._up(self._act(x), rows, first=first)
        for act1, conv1, act2, conv2 in self._units:
            x = x + conv2(act2(conv1(act1(x), rows)), rows)
        return x
