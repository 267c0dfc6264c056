"""CodePredictor: the small transformer of Qwen3's Talker that makes a frame's further codes from its first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.code_sampling import SamplingState
from omni_ws.engine.omni.transformer import Transformer


class CodePredictor:
    """One pass over two rows, the Talker's state and the first code, then one for each further codebook but the last.

    ``config`` is ``code_predictor_config``. Its keys and values last for a frame.
    """

    def __init__(
        self, source: TensorSource, prefix: str, config: Mapping[str, Any], slots: int, device: str, dtype: torch.dtype
    ) -> None:
        self.codebooks = int(config["num_code_groups"])
        self.shape = BlockShape.of(config, "talker_config.code_predictor_config")
        self._transformer = Transformer(source, f"{prefix}.model", self.shape, device, dtype)

        def each(name: str) -> list[torch.Tensor]:
            numbers = range(self.codebooks - 1)
            return [source.tensor(f"{prefix}.{name}.{number}.weight").to(device, dtype) for number in numbers]

        self._embeddings = each("model.codec_embedding")
        self._heads = each("lm_head")
        size = (self.shape.layers, slots, self.shape.kv_heads, self.codebooks, self.shape.head_dim)
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros_like(self._keys)
        self._first_mask = torch.ones(1, 2, 2, dtype=torch.bool, device=device).tril()
        positions = torch.arange(self.codebooks, device=device).expand(3, 1, -1)
        self._rotations = self._transformer.rotations(positions)

    def __call__(
        self, state: torch.Tensor, first: torch.Tensor, sampling: SamplingState, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the further codes (B, codebooks - 1) and the sum of all codes' embeddings (B, H).

        ``state`` (B, H) is the Talker's last state, ``first`` (B, H) the embedding of the first code, ``frames`` (B,)
        the numbers of the frames.
        """
        rows, total, codes = torch.stack((state, first), dim=1), first, []
        for number, (embedding, head) in enumerate(zip(self._embeddings, self._heads, strict=True)):
            done = number + 1 if number else 0
            rotations = self._rotations[0][:, done : number + 2], self._rotations[1][:, done : number + 2]
            kept = _FrameCache(self._keys, self._values, done, number + 2, None if number else self._first_mask)
            states = self._transformer(rows, rotations, kept)
            logits = functional.linear(states[:, -1], head).float()
            code = sampling.draw_residual(logits, frames, number + 1)
            codes.append(code)
            embedded = functional.embedding(code, embedding)
            total = total + embedded
            rows = embedded[:, None]
        return torch.stack(codes, dim=1), total


class _FrameCache:
    """The keys and values of positions ``start`` to ``end`` of the frame that is being made."""

    def __init__(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, end: int, mask: torch.Tensor | None
    ) -> None:
        self._keys, self._values, self._start, self._end = keys, values, start, end
        self.mask = mask

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch = len(keys)
        self._keys[layer, :batch, :, self._start : self._end] = keys
        self._values[layer, :batch, :, self._start : self._end] = values
        return self._keys[layer, :batch, :, : self._end], self._values[layer, :batch, :, : self._end]
