"""What of a GPU's memory an omni model's parts take: whether it suffices, and what is left to the Thinker."""

from __future__ import annotations

from typing import Final

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.omni_model import OmniSizes

#: The share of a GPU's memory that all parts together may take.
_ALL: Final = 0.92
#: What a process takes besides its tensors, in bytes: CUDA's context and libraries.
_CONTEXT_BYTES: Final = 700_000_000
#: What the Thinker computes with, its graphs, and the least cache that is of use, in bytes.
_LEAST_CACHE_BYTES: Final = 8_000_000_000


def check_omni_fits(model: str, sizes: OmniSizes, *, total: int, gpus: int) -> None:
    """Raise ConfigurationError if the model does not fit into GPUs of ``total`` bytes each.

    ``gpus`` is over how many the Thinker's weights are distributed; the other parts are on the first.
    """
    thinker = sizes.thinker // gpus
    needed = thinker + sizes.talker + sizes.vocoder + 3 * _CONTEXT_BYTES + _LEAST_CACHE_BYTES
    if needed <= _ALL * total:
        return
    raise ConfigurationError(
        [
            f"{model} does not fit into a GPU of {_gb(total)}: the Thinker's weights take {_gb(thinker)}, and to "
            f"compute and to remember at least {_gb(_LEAST_CACHE_BYTES)}; the Talker takes {_gb(sizes.talker)}, the "
            f"vocoder {_gb(sizes.vocoder)}, the processes {_gb(3 * _CONTEXT_BYTES)}. Take quantised weights, "
            "vllm.args.tensor_parallel_size, smaller vllm.omni_sessions or vllm.omni_positions, or text alone: "
            "--vllm.omni-speech false"
        ]
    )


def thinker_share(voice_bytes: int, *, total: int) -> float:
    """Return the share of a GPU of ``total`` bytes that is left to the Thinker beside a voice of ``voice_bytes``."""
    return round(_ALL - (voice_bytes + 2 * _CONTEXT_BYTES) / total, 3)


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
