"""How two models share a GPU: by the sizes of their weights, where the operator says nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from omni_ws.config.error import ConfigurationError

#: vLLM's name for the part of the whole GPU that a model claims.
SHARE: Final = "gpu_memory_utilization"
#: What both may claim together. The rest is for the codec and the contexts of CUDA.
_BOTH: Final = 0.9
#: No model works in less.
_LEAST: Final = 0.1
#: Of the Thinker, where the sizes are not known.
_UNKNOWN: Final = 0.65
#: The first kind of file that a checkpoint has is what vLLM loads.
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".gguf")


class Shares(NamedTuple):
    thinker: float
    talker: float


def memory_shares(
    thinker: int | None, talker: int | None, thinker_args: Mapping[str, Any], talker_args: Mapping[str, Any]
) -> Shares:
    """Parts of each GPU for two checkpoints of so many bytes, None where that is not known.

    A share that the arguments give is kept, and the other model gets what it leaves. Raises ConfigurationError for one
    that is no number.
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
    """The weights of a folder, or of a name that was downloaded before, else as its hub says; None: not known.

    Blocks, for seconds where the hub is asked.
    """
    folder = Path(model) if Path(model).is_dir() else _downloaded(model)
    if folder is not None:
        return _weights((path.name, path.stat().st_size) for path in folder.iterdir() if path.is_file())
    return _weights(_at_the_hub(model))


def _given(args: Mapping[str, Any], setting: str) -> float | None:
    share = args.get(SHARE)
    if share is None or (isinstance(share, int | float) and not isinstance(share, bool)):
        return share
    raise ConfigurationError([f"{setting}.{SHARE}: a number above 0, at most 1"])


def _rounded(share: float) -> float:
    return round(max(_LEAST, share), 3)


def _gpus(args: Mapping[str, Any]) -> int:
    """Over how many GPUs the weights of one copy are spread."""
    return int(args.get("tensor_parallel_size") or 1) * int(args.get("pipeline_parallel_size") or 1)


def _weights(files: Iterable[tuple[str, int]]) -> int | None:
    sizes = dict(files)
    for ending in _WEIGHTS:
        names = [name for name in sizes if name.endswith(ending)]
        # Some checkpoints hold their weights once more, in the form of those who made them.
        names = [name for name in names if not name.startswith("consolidated")] or names
        if names:
            return sum(sizes[name] for name in names)
    return None


def _downloaded(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(model, "config.json")
    except ValueError:  # no name that a model can have
        return None
    return Path(found).parent if isinstance(found, str) else None


def _at_the_hub(model: str) -> list[tuple[str, int]]:
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(model, files_metadata=True, timeout=5).siblings or ()
    except Exception:  # it is not there, not for us, or there is no network: vLLM will say so
        return []
    return [(file.rfilename, file.size or 0) for file in files]
