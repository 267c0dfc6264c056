"""Reads checkpoints: tensors by name, and the speakers of Qwen2.5-Omni."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import orjson
import torch
from safetensors import SafetensorError, safe_open

from omni_ws.config.values import ConfigurationError

_INDEX: Final = "model.safetensors.index.json"


class CheckpointTensors:
    """The tensors of the safetensors files in ``folder``; with an index, of all files that it names.

    The files are mapped into memory, so only the tensors that are used are read. Raises ConfigurationError for a folder
    without such files, and for damaged files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        index = folder / _INDEX
        try:
            if index.exists():
                files = set(orjson.loads(index.read_bytes())["weight_map"].values())
            else:
                files = {path.name for path in folder.glob("*.safetensors")}
            #: The open file of each tensor.
            self._files: dict[str, Any] = {}
            for file in sorted(files):
                opened = safe_open(str(folder / file), framework="pt")
                self._files |= dict.fromkeys(opened.keys(), opened)
        except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
            raise ConfigurationError([f"{folder}: not a readable safetensors checkpoint: {error}"]) from error
        if not self._files:
            raise ConfigurationError([f"{folder}: no safetensors files"])

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def names(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with ``prefix``."""
        return (name for name in self._files if name.startswith(prefix))

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor mapped from its file: pages are read as they are used.

        Raises ConfigurationError if there is none, and for quantised tensors (of one byte a value), since their scales
        are not applied.
        """
        if name not in self._files:
            raise ConfigurationError([f"{self._folder}: the checkpoint has no tensor {name}"])
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tensor.dtype.itemsize == 1:
            raise ConfigurationError([f"{self._folder}: {name} is quantised ({tensor.dtype}), which is not supported"])
        return tensor

    def bytes_of(self, prefix: str, value_bytes: int | None = None) -> int:
        """Return the bytes of all tensors whose names begin with ``prefix``; reads only the headers of the files.

        ``value_bytes`` is the size of a value in memory, by default the same as in the file.
        """
        total = 0
        for name in self.names(prefix):
            part = self._files[name].get_slice(name)
            bits = _bits(part.get_dtype()) if value_bytes is None else 8 * value_bytes
            total += prod(part.get_shape()) * bits // 8
        return total


def _bits(dtype: str) -> int:
    """Return the bits of a value, by safetensors' name of its type, such as BF16, F8_E4M3, I64 or BOOL."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8


SPEAKERS_FILE: Final = "spk_dict.pt"
_DEFAULT_SPEAKER: Final = "Chelsie"


@dataclass(frozen=True, slots=True)
class OmniSpeaker:
    """A voice: ``bos_token``, of the Thinker's vocabulary, begins the Talker's answer; the rest is for the vocoder.

    ``condition`` (1, n) float32 is the embedding of the speaker, ``reference_mel`` (1, frames, bins) float32 is some of
    the speaker's speech.
    """

    bos_token: int
    condition: torch.Tensor
    reference_mel: torch.Tensor


def load_speakers(folder: Path) -> dict[str, OmniSpeaker]:
    """Return the speakers by name. Raises ConfigurationError for a file that cannot be read, or has no speakers."""
    path = folder / SPEAKERS_FILE
    try:
        # ``weights_only``: an unrestricted pickle could run any code.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in torch's unpickler
        raise ConfigurationError([f"{path}: cannot be read: {error}"]) from error
    if not isinstance(loaded, Mapping) or not loaded:
        raise ConfigurationError([f"{path}: no speakers"])
    return {str(name): _speaker(f"{path}: {name}", entry) for name, entry in loaded.items()}


def default_speaker(names: Iterable[str]) -> str:
    """Return the default voice: the one of the model's authors, or else the first."""
    known = [*names]
    return _DEFAULT_SPEAKER if _DEFAULT_SPEAKER in known else known[0]


def _speaker(where: str, entry: Any) -> OmniSpeaker:
    try:
        bos, condition, mel = int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError([f"{where}: bos_token, cond and ref_mel are needed"]) from error
    if condition.ndim != 2 or mel.ndim != 3 or len(condition) != 1 or len(mel) != 1:
        raise ConfigurationError([f"{where}: cond must be (1, n) and ref_mel (1, frames, bins)"])
    return OmniSpeaker(bos, condition, mel)
