"""Loads the Talker of a checkpoint, and tells beforehand how much memory it will take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import CheckpointTensors
from omni_ws.engine.omni.qwen3_talker import Qwen3Talker
from omni_ws.engine.omni.qwen25_talker import Qwen25Talker
from omni_ws.engine.omni.slot_talker import SlotTalker
from omni_ws.engine.omni.speakers import load_speakers
from omni_ws.engine.omni.talker_network import SlotSpace, TalkerNetwork

_Load = Callable[[CheckpointTensors, Mapping[str, Any], SlotSpace, Path], TalkerNetwork]


def _qwen3(source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace, folder: Path) -> TalkerNetwork:
    return Qwen3Talker(source, config, space)


def _qwen25(source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace, folder: Path) -> TalkerNetwork:
    tokens = {name: speaker.bos_token for name, speaker in load_speakers(folder).items()}
    return Qwen25Talker(source, config, space, tokens)


#: By ``model_type``: how to load it, and where config.json has the sizes of the Talker's transformer.
_FAMILIES: Final[Mapping[str, tuple[_Load, tuple[str, ...]]]] = {
    "qwen3_omni_moe": (_qwen3, ("talker_config", "text_config")),
    "qwen2_5_omni": (_qwen25, ("talker_config",)),
}


def load_talker(
    folder: str | Path,
    *,
    slots: int,
    longest: int,
    device: str | None = None,
    dtype: str | None = None,
    piece: int = 256,
    read_late: bool | None = None,
) -> SlotTalker:
    """Load the Talker of the checkpoint in ``folder``, and nothing else of it.

    It has ``slots`` for sessions, each with ``longest`` positions for what the Talker reads of the prompt and for the
    frames of the answer. ``device`` is by default a GPU if there is one, ``dtype`` "bfloat16" there and "float32" on a
    CPU; ``piece`` and ``read_late`` are SlotTalker's. Raises ConfigurationError.
    """
    folder = Path(folder)
    config = _config(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = dtype or ("float32" if torch.device(device).type == "cpu" else "bfloat16")
    space = SlotSpace(slots, longest, device, getattr(torch, dtype))
    load, _ = _FAMILIES[config["model_type"]]
    try:
        network = load(CheckpointTensors(folder), config, space, folder)
    except KeyError as error:
        raise ConfigurationError([f"{folder / 'config.json'}: {error.args[0]} is missing"]) from error
    return SlotTalker(network, piece=piece, read_late=read_late)


def talker_memory(folder: str | Path, *, slots: int, longest: int, value_bytes: int = 2) -> int:
    """Return the bytes that ``load_talker`` will take for weights and slots; only the files' headers are read.

    A value takes ``value_bytes``. What CUDA's context, its libraries and the graphs take comes on top.
    Raises ConfigurationError.
    """
    folder = Path(folder)
    config = _config(folder)
    sizes: Mapping[str, Any] = config
    _, path = _FAMILIES[config["model_type"]]
    try:
        for name in path:
            sizes = sizes[name]
        vocabulary = int(sizes["vocab_size"])
    except KeyError as error:
        raise ConfigurationError([f"{folder / 'config.json'}: {error.args[0]} is missing"]) from error
    position = BlockShape.of(sizes, ".".join(path)).positions_bytes(value_bytes)
    # Of each code a slot notes whether its session has had it.
    return CheckpointTensors(folder).bytes_of("talker.", value_bytes) + slots * (longest * position + vocabulary)


def _config(folder: Path) -> Mapping[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError([f"{path}: not readable: {error}"]) from error
    if kind not in _FAMILIES:
        raise ConfigurationError([f"{path}: model_type {kind!r} has no Talker here; known are {', '.join(_FAMILIES)}"])
    if "talker_config" not in config:
        raise ConfigurationError([f"{path}: the model has no Talker"])
    result: Mapping[str, Any] = config
    return result
