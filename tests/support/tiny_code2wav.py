"""Code2Wav of Qwen3-Omni with small random weights that make an audible sound without saturating."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape

CONFIG: dict[str, Any] = {
    "codebook_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "decoder_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}


def reference(seed: int = 0, **changes: Any) -> Qwen3OmniMoeCode2Wav:
    """Return transformers' module."""
    import torch
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    torch.manual_seed(seed)
    module = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**(CONFIG | changes))).eval()
    with torch.inference_mode():
        for name, weight in module.named_parameters():
            _draw(name, weight)
        codes = torch.randint(0, module.config.codebook_size, (1, module.config.num_quantizers, 20))
        module.decoder[-1].conv.weight.mul_(0.4 / float(module(codes).abs().max()))
    return module


def _draw(name: str, weight: Any) -> None:
    if weight.ndim == 3:
        # Residual branches are small, lest every error grow to the peak.
        gain = 0.25 if ".conv2." in name or "dwconv" in name else 0.7
        fan_in = weight.shape[0] * 2 if "block.1." in name else weight.shape[1] * weight.shape[2]
        weight.normal_(0, gain * fan_in**-0.5)
    elif weight.ndim == 2:
        weight.normal_(0, weight.shape[1] ** -0.5)
    elif name.endswith("gamma") or "scale" in name:
        weight.fill_(0.3)
    elif "alpha" in name or "beta" in name or name.endswith("bias"):
        weight.normal_(0, 0.1)


def shape(**changes: Any) -> Code2WavShape:
    """Return the shape of ``reference``."""
    from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape

    return Code2WavShape.read(CONFIG | changes)
