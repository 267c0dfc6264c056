"""What the processes of an omni model load: its Talker, and its vocoder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from omni_ws.engine.omni.checkpoint_tensors import CheckpointTensors
from omni_ws.engine.omni.code2wav_network import Code2WavShape
from omni_ws.engine.omni.qwen3_code2wav import CONTEXT_FRAMES, Qwen3Code2Wav
from omni_ws.engine.omni.step_model import LoadedModel
from omni_ws.engine.omni.talker_loading import load_talker

#: Of both families, in Hz; no configuration has it.
SAMPLE_RATE: Final = 24_000


def talker(folder: str, slots: int, positions: int) -> LoadedModel:
    """Load the Talker. Its facts are ``voices``, the default first. Raises ConfigurationError."""
    model = load_talker(Path(folder), slots=slots, longest=positions)
    return LoadedModel(model, {"voices": model.voices})


def vocoder(folder: str, slots: int) -> LoadedModel:
    """Load the vocoder. Raises ConfigurationError.

    Its facts are ``sample_rate`` in Hz, ``frame_ms``, ``context_frames``, and ``block``, see VocoderStage.
    """
    path = Path(folder)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if "code2wav_config" in config:
        return _code2wav(path, config["code2wav_config"], slots, device)
    return _token2wav(path, config["token2wav_config"], slots, device)


def _code2wav(folder: Path, config: Mapping[str, Any], slots: int, device: torch.device) -> LoadedModel:
    shape = Code2WavShape.read(config)
    model = Qwen3Code2Wav(shape, _weights(folder, "code2wav."), slots=slots, device=device)
    return LoadedModel(model, _facts(model.samples_per_frame, context=CONTEXT_FRAMES))


def _token2wav(folder: Path, config: Mapping[str, Any], slots: int, device: torch.device) -> LoadedModel:
    from omni_ws.engine.omni.qwen25_token2wav import ODE_STEPS, Qwen25Token2Wav
    from omni_ws.engine.omni.speakers import load_speakers
    from omni_ws.engine.omni.token2wav_network import Token2WavNetwork
    from omni_ws.engine.omni.token2wav_windows import STREAMING

    weights, speakers = _weights(folder, "token2wav."), load_speakers(folder)
    network = Token2WavNetwork(config, weights, speakers, ode_steps=ODE_STEPS, device=device)
    model = Qwen25Token2Wav(network, slots=slots)
    return LoadedModel(
        model, _facts(model.samples_per_code, context=0, block=STREAMING.first * network.codes_per_block)
    )


def _facts(samples_per_frame: int, *, context: int, block: int | None = None) -> Mapping[str, Any]:
    frame_ms = samples_per_frame * 1000 / SAMPLE_RATE
    return {"sample_rate": SAMPLE_RATE, "frame_ms": frame_ms, "context_frames": context, "block": block}


def _weights(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by their names in it."""
    tensors = CheckpointTensors(folder)
    return {name.removeprefix(prefix): tensors.tensor(name) for name in tensors.names(prefix)}
