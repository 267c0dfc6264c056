"""How a GPU's memory is divided: between Thinker and Talker by their weights, or among the parts of an omni model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.vllm.checkpoint import OmniSizes

#: vLLM's argument for the share of a GPU's memory that a model may use.
SHARE: Final = "gpu_memory_utilization"
#: The share of Thinker and Talker together. The rest is for the codec and the CUDA contexts.
_BOTH: Final = 0.9
#: The minimum share of a model.
_LEAST: Final = 0.1
#: The Thinker's share when the sizes are unknown.
_UNKNOWN: Final = 0.65
#: The formats of weights, by vLLM's precedence: it loads the first one that a checkpoint has.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")


class Shares(NamedTuple):
    """Shares of a GPU's memory, from 0 to 1."""

    thinker: float
    talker: float


def memory_shares(
    thinker: int | None, talker: int | None, thinker_args: Mapping[str, Any], talker_args: Mapping[str, Any]
) -> Shares:
    """Return the shares for checkpoints of ``thinker`` and ``talker`` bytes, None if unknown.

    A share set in the arguments is kept, and the other model gets the rest. Raises ConfigurationError for one that is
    not a number.
    """
    first_given, second_given = _given(thinker_args, "vllm.args"), _given(talker_args, "vllm.talker_args")
    if first_given is not None:
        return Shares(first_given, _rounded(_BOTH - first_given) if second_given is None else second_given)
    if second_given is not None:
        return Shares(_rounded(_BOTH - second_given), second_given)
    if not thinker or not talker:
        return Shares(_UNKNOWN, _rounded(_BOTH - _UNKNOWN))
    first, second = thinker / _gpus(thinker_args), talker / _gpus(talker_args)
    share = min(_BOTH - _LEAST, max(_LEAST, _BOTH * first / (first + second)))
    return Shares(_rounded(share), _rounded(_BOTH - share))


def weights_bytes(model: str) -> int | None:
    """Return the size of a model's weights, from its folder, the download cache or the model hub; None if unknown.

    Blocks, for seconds if the hub is asked.
    """
    folder = Path(model) if Path(model).is_dir() else _downloaded(model)
    if folder is not None:
        return _weights((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return _weights(_at_the_hub(model))


def _given(args: Mapping[str, Any], setting: str) -> float | None:
    share = args.get(SHARE)
    if share is None or (isinstance(share, int | float) and not isinstance(share, bool)):
        return share
    raise ConfigurationError([f"{setting}.{SHARE}: must be a number greater than 0 and at most 1"])


def _rounded(share: float) -> float:
    return round(max(_LEAST, share), 3)


def _gpus(args: Mapping[str, Any]) -> int:
    """Return over how many GPUs the weights of one replica are distributed."""
    return int(args.get("tensor_parallel_size") or 1) * int(args.get("pipeline_parallel_size") or 1)


def _weights(files: Iterable[tuple[str, int]]) -> int | None:
    sizes = dict(files)
    for ending in _WEIGHTS:
        names = [name for name in sizes if name.endswith(ending)]
        # Some checkpoints contain their weights twice, the second time in their author's format.
        names = [name for name in names if not name.startswith("consolidated")] or names
        if names:
            return sum(sizes[name] for name in names)
    return None


def _downloaded(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # not a valid model name
        return None
    return Path(found).parent if isinstance(found, str) else None


def _at_the_hub(model: str) -> list[tuple[str, int]]:
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=5).siblings or ()
    except Exception:  # missing, private, or no network: vLLM reports it when it loads the model
        return []
    return [(file.rfilename, file.size or 0) for file in files]


#: The share of a GPU's memory that all parts of an omni model together may take.
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
