"""Weights made in the shapes of a checkpoint: what is computed from them is noise, and takes as long."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import torch

from benchmarks.gpu.shapes import Family, OmniShape
from omni_ws.engine.omni.transformer import CheckpointTensors

_EMBEDDINGS = "thinker.model.embed_tokens.weight"
#: Rows of the Thinker's table that are not zero: more than any token of the benchmark but the special ones.
_USED_ROWS = 4_096


class MadeTensors(CheckpointTensors):
    """Tensors in place of those of a checkpoint.

    Each depends on its name and shape alone, and is made on ``device`` when it is asked for. The
    Thinker's embeddings are on the CPU, as those of a checkpoint are.
    """

    def __init__(self, shape: OmniShape, device: str) -> None:
        self._device = device
        self._shapes = dict(_talker_shapes(shape))
        self._table = (shape.vocabulary, shape.thinker_size)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes or name == _EMBEDDINGS

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor of that name."""
        if name == _EMBEDDINGS:
            table = torch.zeros(self._table, dtype=torch.bfloat16)
            table[:_USED_ROWS] = made(name, (_USED_ROWS, self._table[1]), "cpu")
            return table
        return made(name, self._shapes[name], self._device)


def made(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    """Return weights by which values neither grow nor vanish: matrices scaled by their inputs, norms of one."""
    if len(shape) == 1:
        return torch.full(shape, _scale_by_channel(name), device=device)
    inputs = shape[0] * 2 if ".block.1." in name else torch.Size(shape[1:]).numel()
    # Residual branches are small, lest every difference grow to the peak.
    gain = 0.25 if ".conv2." in name or "dwconv" in name else 0.7 if len(shape) == 3 else 1.0
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    weights: torch.Tensor = torch.randn(shape, generator=generator, device=device) * gain * inputs**-0.5
    return weights


def _scale_by_channel(name: str) -> float:
    if name.endswith(("gamma", "scale")):
        return 0.3
    return 1.0 if "norm" in name and name.endswith("weight") else 0.0


def code2wav_weights(shape: OmniShape, device: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of Qwen3's Code2Wav."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    with torch.device("meta"):
        module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**shape.config["code2wav_config"]))
    weights = {name: made(name, tuple(tensor.shape), device) for name, tensor in module.state_dict().items()}
    last = max(name for name in weights if name.startswith("decoder.") and name.endswith(".conv.weight"))
    weights[last] *= 0.05
    return weights


def token2wav_weights(shape: OmniShape, device: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of Qwen2.5's Token2Wav."""
    from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

    # Made as a whole, on the CPU: its filters are constants that are kept among the weights.
    module = Qwen2_5OmniToken2WavModel._from_config(Qwen2_5OmniToken2WavConfig(**shape.config["token2wav_config"]))
    weights = dict(module.state_dict())
    matrices = {name for name, parameter in module.named_parameters() if parameter.ndim > 1}
    for name in matrices:
        weights[name] = made(name, tuple(weights[name].shape), device)
    return weights


def _talker_shapes(shape: OmniShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a Talker's tensors, as in the files of a checkpoint."""
    with torch.device("meta"):
        module = _qwen3_talker(shape) if shape.family is Family.QWEN3 else _qwen25_talker(shape)
    for name, tensor in module.state_dict().items():
        yield from _as_in_files(f"talker.{name}", tuple(tensor.shape))


def _as_in_files(name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of a tensor, or those of each expert where it fuses the experts of a layer."""
    if not (fused := re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)):
        yield name, shape
        return
    experts, rows, columns = shape
    for expert in range(experts):
        if fused[2] == "down":
            yield f"{fused[1]}.{expert}.down_proj.weight", (rows, columns)
        else:
            for part in ("gate", "up"):
                yield f"{fused[1]}.{expert}.{part}_proj.weight", (rows // 2, columns)


def _qwen3_talker(shape: OmniShape) -> Any:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configuration
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

    config = configuration.Qwen3OmniMoeTalkerConfig(**shape.config["talker_config"])
    return modeling.Qwen3OmniMoeTalkerForConditionalGeneration(config)


def _qwen25_talker(shape: OmniShape) -> Any:
    from transformers.models.qwen2_5_omni import configuration_qwen2_5_omni as configuration
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

    config = configuration.Qwen2_5OmniTalkerConfig(**shape.config["talker_config"])
    return modeling.Qwen2_5OmniTalkerForConditionalGeneration(config)
