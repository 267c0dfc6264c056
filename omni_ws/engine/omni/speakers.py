"""The speakers of Qwen2.5-Omni: the checkpoint's ``spk_dict.pt``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from omni_ws.config.values import ConfigurationError

SPEAKERS_FILE: Final = "spk_dict.pt"
_DEFAULT: Final = "Chelsie"


@dataclass(frozen=True, slots=True)
class OmniSpeaker:
    """A voice: ``bos_token`` (of the Thinker's vocabulary) begins the Talker's answer, the rest is for the vocoder.

    ``condition`` (1, n) float32 is the speaker's embedding, ``reference_mel`` (1, frames, bins) float32 some speech.
    """

    bos_token: int
    condition: torch.Tensor
    reference_mel: torch.Tensor


def load_speakers(folder: Path) -> dict[str, OmniSpeaker]:
    """Return the speakers by name. Raises ConfigurationError where there are none, or anything but tensors is there."""
    path = folder / SPEAKERS_FILE
    try:
        # Only tensors and plain values: a pickle could run anything.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in torch's unpickler
        raise ConfigurationError([f"{path}: cannot be read: {error}"]) from error
    if not isinstance(loaded, Mapping) or not loaded:
        raise ConfigurationError([f"{path}: no speakers"])
    return {str(name): _speaker(f"{path}: {name}", entry) for name, entry in loaded.items()}


def default_speaker(names: Iterable[str]) -> str:
    """Return the voice of answers for which none is asked: that of the model's authors, or else the first."""
    known = [*names]
    return _DEFAULT if _DEFAULT in known else known[0]


def _speaker(where: str, entry: Any) -> OmniSpeaker:
    try:
        bos, condition, mel = int(entry["bos_token"]), entry["cond"].float(), entry["ref_mel"].float()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigurationError([f"{where}: bos_token, cond and ref_mel are needed"]) from error
    if condition.ndim != 2 or mel.ndim != 3 or len(condition) != 1 or len(mel) != 1:
        raise ConfigurationError([f"{where}: cond must be (1, n) and ref_mel (1, frames, bins)"])
    return OmniSpeaker(bos, condition, mel)
