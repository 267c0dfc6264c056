"""Whisper from the files of CTranslate2 into those of transformers."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizerFast,
)

Variables = dict[str, npt.NDArray[Any]]

#: CTranslate2's numbers of types; strings and the like have others.
_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_ENGLISH_VOCABULARY = 51864
_WIDTH_OF_HEAD = 64


def convert(weights: Path, folder: Path) -> None:
    """``weights`` is a folder with ``model.bin`` (float16), ``config.json`` and ``tokenizer.json``."""
    with (weights / "model.bin").open("rb") as model:
        variables = _variables(model)
    save_file(_renamed(variables), folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((weights / "config.json").read_bytes())
    mels = variables["encoder/conv1/weight"].shape[1]
    # Multilingual models have a token more before their special ones.
    offset = int(len(variables["decoder/embeddings/weight"]) != _ENGLISH_VOCABULARY)
    end = 50256 + offset
    ids = {"decoder_start_token_id": end + 1, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
    _config(variables, settings, mels, ids).save_pretrained(folder)
    GenerationConfig(
        **ids,
        max_length=448,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        no_timestamps_token_id=50362 + offset,
        is_multilingual=bool(offset),
    ).save_pretrained(folder)
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(weights / "tokenizer.json"))
    tokenizer.save_pretrained(folder)
    extractor = WhisperFeatureExtractor(feature_size=mels)
    extractor.save_pretrained(folder)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)


def _variables(model: BinaryIO) -> Variables:
    """CTranslate2's binary format: a head, then each variable with name, shape, type and bytes."""

    def number() -> int:
        return int(struct.unpack("<I", model.read(4))[0])

    def text() -> str:
        (length,) = struct.unpack("<H", model.read(2))
        return model.read(length)[:-1].decode()

    number(), text(), number()  # version of the format, kind of model, its revision
    variables: Variables = {}
    for _ in range(number()):
        name = text()
        shape = [number() for _ in range(model.read(1)[0])]
        kind = model.read(1)[0]
        content = model.read(number())
        if kind in _TYPES:
            variables[name] = np.frombuffer(content, _TYPES[kind]).reshape(shape)
    return variables


def _renamed(variables: Variables) -> dict[str, torch.Tensor]:
    renamed: dict[str, torch.Tensor] = {}
    width = variables["decoder/embeddings/weight"].shape[1]

    def put(name: str, values: npt.NDArray[Any]) -> None:
        renamed[f"model.{name}"] = torch.from_numpy(np.ascontiguousarray(values).copy()).half()

    def linear(name: str, source: str) -> None:
        put(f"{name}.weight", variables[f"{source}/weight"])
        put(f"{name}.bias", variables[f"{source}/bias"])

    def norm(name: str, source: str) -> None:
        put(f"{name}.weight", variables[f"{source}/gamma"])
        put(f"{name}.bias", variables[f"{source}/beta"])

    def split(name: str, source: str, parts: tuple[str, ...]) -> None:
        """CTranslate2 keeps projections of the same input in one matrix."""
        for index, part in enumerate(parts):
            rows = slice(index * width, (index + 1) * width)
            put(f"{name}.{part}.weight", variables[f"{source}/weight"][rows])
            if part != "k_proj":  # which has none
                put(f"{name}.{part}.bias", variables[f"{source}/bias"][rows])

    for side in ("encoder", "decoder"):
        for layer in range(_layers(variables, side)):
            name, source = f"{side}.layers.{layer}", f"{side}/layer_{layer}"
            norm(f"{name}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
            split(f"{name}.self_attn", f"{source}/self_attention/linear_0", ("q_proj", "k_proj", "v_proj"))
            linear(f"{name}.self_attn.out_proj", f"{source}/self_attention/linear_1")
            if side == "decoder":
                norm(f"{name}.encoder_attn_layer_norm", f"{source}/attention/layer_norm")
                split(f"{name}.encoder_attn", f"{source}/attention/linear_0", ("q_proj",))
                split(f"{name}.encoder_attn", f"{source}/attention/linear_1", ("k_proj", "v_proj"))
                linear(f"{name}.encoder_attn.out_proj", f"{source}/attention/linear_2")
            norm(f"{name}.final_layer_norm", f"{source}/ffn/layer_norm")
            linear(f"{name}.fc1", f"{source}/ffn/linear_0")
            linear(f"{name}.fc2", f"{source}/ffn/linear_1")
        norm(f"{side}.layer_norm", f"{side}/layer_norm")
        put(f"{side}.embed_positions.weight", variables[f"{side}/position_encodings/encodings"])
    for convolution in (1, 2):
        linear(f"encoder.conv{convolution}", f"encoder/conv{convolution}")
    put("decoder.embed_tokens.weight", variables["decoder/embeddings/weight"])
    return renamed


def _layers(variables: Variables, side: str) -> int:
    found = (re.match(rf"{side}/layer_(\d+)/", name) for name in variables)
    return 1 + max(int(match[1]) for match in found if match)


def _config(variables: Variables, settings: dict[str, Any], mels: int, ids: dict[str, int]) -> WhisperConfig:
    vocabulary, width = variables["decoder/embeddings/weight"].shape
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=_layers(variables, "encoder"),
        decoder_layers=_layers(variables, "decoder"),
        encoder_attention_heads=width // _WIDTH_OF_HEAD,
        decoder_attention_heads=width // _WIDTH_OF_HEAD,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=mels,
        max_source_positions=1500,
        max_target_positions=448,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        dtype="float16",
        **ids,
    )
    config.architectures = ["WhisperForConditionalGeneration"]
    return config
