"""SmolLM2 from llama.cpp's GGUF into the files of transformers, which reads GGUF only with a package more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from transformers import AutoTokenizer

_CONTEXT = 8192

#: llama.cpp's names of weights, and those of transformers.
_OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def convert(weights: Path, folder: Path) -> None:
    """``weights`` is a folder with one GGUF file of a Llama with tied embeddings."""
    (path,) = weights.glob("*.gguf")
    reader = GGUFReader(path)
    read: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items() if "tokenizer" not in name}
    heads, kv_heads = read["llama.attention.head_count"], read["llama.attention.head_count_kv"]
    converted = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        name = _name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _halves(values, heads if name.endswith("q_proj.weight") else kv_heads)
        converted[name] = values.to(torch.bfloat16).contiguous()
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})
    _write(folder / "config.json", _config(read, vocabulary=len(converted["model.embed_tokens.weight"])))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2})
    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    tokenizer.model_max_length = _CONTEXT
    tokenizer.save_pretrained(folder)


def _config(read: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": read["llama.embedding_length"],
        "intermediate_size": read["llama.feed_forward_length"],
        "num_hidden_layers": read["llama.block_count"],
        "num_attention_heads": read["llama.attention.head_count"],
        "num_key_value_heads": read["llama.attention.head_count_kv"],
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": round(float(read["llama.attention.layer_norm_rms_epsilon"]), 9),
        "rope_theta": float(read["llama.rope.freq_base"]),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    _, layer, weight, kind = name.split(".")
    return f"model.layers.{layer}.{_LAYER[weight]}.{kind}"


def _halves(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Turns llama.cpp's order of rows, which rotates pairs of neighbours, into that which rotates halves of a head."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
