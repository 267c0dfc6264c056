"""SmolLM2 from llama.cpp's GGUF into the files of transformers, as transformers reads it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

_CONTEXT = 8192


def convert(weights: Path, folder: Path) -> None:
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
