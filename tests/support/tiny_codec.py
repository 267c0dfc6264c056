"""A SNAC codec with random weights, and the profile of the tiny Talker that speaks its codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from snac import SNAC
from support.tiny_models import CODEBOOK, CODEC_BASE, END_OF_SPEECH


def codec_config(*, noise: bool = True) -> dict[str, Any]:
    """Rates, strides and kernels of the released codec at 24 kHz; few channels."""
    return {
        "sampling_rate": 24_000,
        "encoder_dim": 8,
        "encoder_rates": [2, 4, 8, 8],
        "decoder_dim": 64,
        "decoder_rates": [8, 8, 4, 2],
        "attn_window_size": None,
        "codebook_size": CODEBOOK,
        "codebook_dim": 8,
        "vq_strides": [4, 2, 1],
        "noise": noise,
        "depthwise": True,
    }


def build_codec(folder: Path) -> Path:
    """In the form in which SNAC is released. Does nothing where it was built before."""
    weights = folder / "pytorch_model.bin"
    if not weights.exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = codec_config()
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(1)
        torch.save(SNAC(**config).state_dict(), weights)
    return folder


def write_talker_profile(path: Path, codec: Path) -> Path:
    """For the Talker that ``tiny_models.build_talker`` builds."""
    path.write_text(
        f"prefix = [259, 256]\nsuffix = [260, 261]\nstop = [{END_OF_SPEECH}]\n"
        f'text = "{{voice}}: {{text}}"\nfirst_token = {CODEC_BASE}\ncodebook_size = {CODEBOOK}\n'
        f"codec = {json.dumps(str(codec.resolve()))}\nframes_per_character = 1.0\nspare_frames = 4\n"
        '[voices]\nada = "ada"\nbob = "bob"\n[sampling]\ntemperature = 1.0\n'
    )
    return path
