"""Talkers and vocoders of this package over made weights."""

from __future__ import annotations

from typing import TypeAlias

import torch

from benchmarks.gpu.made_weights import MadeTensors, code2wav_weights, token2wav_weights
from benchmarks.gpu.shapes import Family, OmniShape
from omni_ws.engine.omni.qwen3_code2wav import Code2WavShape, Qwen3Code2Wav
from omni_ws.engine.omni.slot_talker import SlotTalker
from omni_ws.engine.omni.talker_network import CodePredictor, Qwen3Talker, Qwen25Talker, SlotSpace
from omni_ws.engine.omni.transformer import OmniSpeaker
from omni_ws.engine.omni.vocoder import (
    ODE_STEPS,
    Qwen25Token2Wav,
    Token2WavNetwork,
)

Vocoder: TypeAlias = Qwen3Code2Wav | Qwen25Token2Wav

_VOICE, _VOICE_TOKEN = "Chelsie", 151_672
#: Three seconds of speech that tell the vocoder what the voice is like.
_REFERENCE_FRAMES = 300


def load_talker(
    shape: OmniShape, device: str, dtype: torch.dtype, *, slots: int, longest: int, made_on: str | None = None
) -> SlotTalker:
    """Return the Talker of ``shape``, not warmed up; its weights are made on ``made_on``, or on its device."""
    source, space = MadeTensors(shape, made_on or device), SlotSpace(slots, longest, device, dtype)
    if shape.family is Family.QWEN3:
        return SlotTalker(Qwen3Talker(source, shape.config, space))
    return SlotTalker(Qwen25Talker(source, shape.config, space, {_VOICE: _VOICE_TOKEN}))


def load_predictor(shape: OmniShape, device: str, dtype: torch.dtype, *, slots: int) -> CodePredictor:
    """Return Qwen3's code predictor alone."""
    config = shape.config["talker_config"]["code_predictor_config"]
    return CodePredictor(MadeTensors(shape, device), "talker.code_predictor", config, slots, device, dtype)


def load_vocoder(shape: OmniShape, device: str, *, slots: int, made_on: str | None = None) -> Vocoder:
    """Return the vocoder of ``shape``, not warmed up; its weights are made on ``made_on``, or on its device."""
    if shape.family is Family.QWEN3:
        weights = code2wav_weights(shape, made_on or device)
        sizes = Code2WavShape.read(shape.config["code2wav_config"])
        return Qwen3Code2Wav(sizes, weights, slots=slots, device=device)
    config = shape.config["token2wav_config"]
    weights = token2wav_weights(shape, made_on or device)
    values = weights["code2wav_dit_model.input_embed.proj.weight"].shape[1]
    said = weights["code2wav_dit_model.text_embed.codec_embed.weight"].shape[1]
    heard = weights["code2wav_dit_model.input_embed.spk_encoder.fc.weight"].shape[0]
    bins = 80
    speaker = OmniSpeaker(
        _VOICE_TOKEN,
        torch.linspace(-1, 1, values - bins - said - heard)[None],
        torch.linspace(-1, 1, _REFERENCE_FRAMES * bins).reshape(1, _REFERENCE_FRAMES, bins),
    )
    network = Token2WavNetwork(config, weights, {_VOICE: speaker}, ode_steps=ODE_STEPS, device=torch.device(device))
    return Qwen25Token2Wav(network, slots=slots)
