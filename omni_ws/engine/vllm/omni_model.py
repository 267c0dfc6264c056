"""OmniModel: a Qwen omni model as its config.json describes it, before anything of it is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from omni_ws.config.values import ConfigurationError


class OmniFamily(StrEnum):
    """The families of omni models whose voice is known, by ``model_type``."""

    QWEN25 = "qwen2_5_omni"
    QWEN3 = "qwen3_omni_moe"


#: vLLM's arguments that say which version of a model is meant, and where it is kept.
_PLACE: Final = {"revision": "revision", "download_dir": "cache_dir"}
#: The modules of a checkpoint beside the Thinker's.
_VOCODERS: Final[Mapping[OmniFamily, str]] = {OmniFamily.QWEN25: "token2wav", OmniFamily.QWEN3: "code2wav"}
#: Vocoders run in float32, whatever their weights are stored in.
_VOCODER_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class OmniModel:
    """``model`` is a name or a folder, ``config`` the whole config.json, ``args`` are vLLM's engine arguments."""

    model: str
    family: OmniFamily
    config: Mapping[str, Any]
    args: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The model as clients see it."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model

    @property
    def speaks(self) -> bool:
        """Whether the checkpoint has a Talker; Thinking variants have none."""
        return self.config.get("enable_audio_output") is not False and "talker_config" in self.config

    @property
    def vocoder(self) -> str:
        """The name of the vocoder's module in the checkpoint."""
        return _VOCODERS[self.family]

    def folder(self) -> Path:
        """Return the folder with all files, which are downloaded if need be. Blocks. Raises ConfigurationError."""
        if Path(self.model).is_dir():
            return Path(self.model)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.model, **_place(self.args)))
        except Exception as error:
            raise ConfigurationError([f"{self.model} cannot be downloaded: {error}"]) from error


@dataclass(frozen=True, slots=True)
class OmniSizes:
    """What the parts of an omni model take once loaded, in bytes."""

    thinker: int
    talker: int
    vocoder: int


def find_omni_model(model: str, args: Mapping[str, Any]) -> OmniModel | None:
    """Return what ``model`` is if it is an omni model, from its folder, the download cache or the model hub.

    Blocks, for seconds if the hub is asked. A model that is nowhere is for vLLM to report.
    """
    path = Path(model) / "config.json" if Path(model).is_dir() else _fetched_config(model, args)
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path is not None else None
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("model_type") not in tuple(OmniFamily):
        return None
    return OmniModel(model, OmniFamily(config["model_type"]), config, args)


def omni_sizes(model: OmniModel, folder: Path, *, sessions: int, positions: int) -> OmniSizes:
    """Return what the parts take, from the files' headers alone. Raises ConfigurationError."""
    from omni_ws.engine.omni.checkpoint import CheckpointTensors
    from omni_ws.engine.omni.slot_talker import talker_memory

    tensors = CheckpointTensors(folder)
    return OmniSizes(
        thinker=tensors.bytes_of("thinker."),
        talker=talker_memory(folder, slots=sessions, longest=positions),
        vocoder=tensors.bytes_of(f"{model.vocoder}.", _VOCODER_BYTES),
    )


def _fetched_config(model: str, args: Mapping[str, Any]) -> Path | None:
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(model, "config.json", **_place(args), etag_timeout=5))
    except Exception:  # missing, private, no valid name, no network, or no vLLM with its packages
        return None


def _place(args: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: args[name] for name, ours in _PLACE.items() if args.get(name) is not None}
