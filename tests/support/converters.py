"""Weights of other programs into the files of transformers: SmolLM2 of llama.cpp, Whisper tiny.en of CTranslate2."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperProcessor,
    WhisperTokenizerFast,
)
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

_CONTEXT: Final = 8192
#: CTranslate2's number of the type; its settings have others.
_FLOAT16: Final = 4
#: What transformers calls the parts of a layer. CTranslate2 keeps projections of the same input in one matrix.
_PARTS: Final[Mapping[str, tuple[str, ...]]] = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}
_KINDS: Final = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def convert_smollm2(weights: Path, folder: Path) -> None:
    """``weights`` is a folder with one GGUF file of a Llama with tied embeddings."""
    (path,) = weights.glob("*.gguf")
    config = AutoConfig.from_pretrained(str(weights), gguf_file=path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # AutoModelForCausalLM.from_pretrained would do the same, and ask for a package more.
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lacking, unknown = model.load_state_dict(tensors, strict=False)
    assert (lacking, unknown) == (["lm_head.weight"], [])
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(weights), gguf_file=path.name)
    tokenizer.model_max_length = _CONTEXT
    tokenizer.save_pretrained(folder)


def convert_whisper(weights: Path, folder: Path) -> None:
    """``weights`` is a folder with ``model.bin`` (float16), ``config.json`` and ``tokenizer.json``."""
    with (weights / "model.bin").open("rb") as model:
        tensors = dict(_renamed(model))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((weights / "config.json").read_bytes())
    quiet = {"suppress_tokens": settings["suppress_ids"], "begin_suppress_tokens": settings["suppress_ids_begin"]}
    # But for these, the sizes and tokens of tiny.en are what it has by default.
    config = WhisperConfig(vocab_size=51864, dtype="float16", **quiet)
    config.architectures = ["WhisperForConditionalGeneration"]
    config.save_pretrained(folder)
    end = config.eos_token_id
    ids = {"decoder_start_token_id": end + 1, "eos_token_id": end, "bos_token_id": end, "pad_token_id": end}
    GenerationConfig(
        **ids, **quiet, max_length=448, no_timestamps_token_id=50362, is_multilingual=False
    ).save_pretrained(folder)
    tokenizer, extractor = (
        WhisperTokenizerFast(tokenizer_file=str(weights / "tokenizer.json")),
        WhisperFeatureExtractor(),
    )
    for part in (tokenizer, extractor, WhisperProcessor(extractor, tokenizer)):
        part.save_pretrained(folder)


def _renamed(model: BinaryIO) -> Iterator[tuple[str, torch.Tensor]]:
    for name, values in _variables(model):
        found = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
        assert found is not None, name
        side, layer, part, kind = found.groups()
        owner = f"model.{side}." + ("" if layer is None else f"layers.{layer}.")
        names = _PARTS.get(part, (part,))
        for one, rows in zip(names, np.split(values, len(names)), strict=True):
            if (one.endswith("k_proj"), kind) != (True, "bias"):  # it has none
                yield f"{owner}{one}.{_KINDS.get(kind, kind)}", torch.from_numpy(rows.copy())


def _variables(model: BinaryIO) -> Iterator[tuple[str, NDArray[Any]]]:
    """CTranslate2's binary format: a head, then each variable with name, shape, type and bytes."""

    def number() -> int:
        return int(struct.unpack("<I", model.read(4))[0])

    def text() -> str:
        (length,) = struct.unpack("<H", model.read(2))
        return model.read(length)[:-1].decode()

    number(), text(), number()  # version of the format, kind of model, its revision
    for _ in range(number()):
        name = text()
        shape = [number() for _ in range(model.read(1)[0])]
        kind = model.read(1)[0]
        content = model.read(number())
        if kind == _FLOAT16:
            yield name, np.frombuffer(content, np.float16).reshape(shape)
