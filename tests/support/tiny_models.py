"""Checkpoints with random weights, built in seconds: what they say is noise, how they are served is real.

``python -m support.tiny_models FOLDER`` builds those that ``make serve-tiny`` serves, and their configuration file.
Every builder writes into ``folder``, does nothing where that was built before, and returns it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
)

#: Simple enough for tests to write the prompts themselves. A line break after a tag would not be printed.
CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m['role'] }}{% if m['tool_call_id'] %} {{ m['tool_call_id'] }}{% endif %}: "
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% elif m['content'] %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}"
    "{% if m['tool_calls'] %}{% for call in m['tool_calls'] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}{% endif %}"
    "{{ '\\n' }}{% endfor %}assistant:"
)

#: The bytes as tokenizers write them, in the order of their tokens.
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS, PAD = 256, 257, 258
_VOCABULARY = 512
#: The first codec token of the Talker: its special tokens come after the bytes.
CODEC_BASE = 263
END_OF_SPEECH = 262
CODEBOOK = 64

#: Arguments of vLLM that make a small model start fast and take little.
ENGINE_ARGS: Mapping[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "block_size": 32,
    "use_tqdm_on_load": False,
}
MULTIMODAL_ARGS: Mapping[str, Any] = {**ENGINE_ARGS, "skip_mm_profiling": True, "mm_processor_cache_gb": 0.05}


Options = ParamSpec("Options")


def _builder(build: Callable[Concatenate[Path, Options], None]) -> Callable[Concatenate[Path, Options], Path]:
    @wraps(build)
    def built(folder: Path, /, *arguments: Options.args, **options: Options.kwargs) -> Path:
        complete = folder / ".complete"
        if not complete.exists():
            folder.mkdir(parents=True, exist_ok=True)
            torch.manual_seed(0)
            build(folder, *arguments, **options)
            complete.touch()
        return folder

    return built


def bytewise(special: Sequence[str]) -> Tokenizer:
    """A tokenizer whose tokens are the bytes, in the order of ``ALPHABET``, and after them ``special``."""
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def _tokenizer(*special: str, eos: str = "<|eos|>", chat_template: str | None = CHAT_TEMPLATE) -> Any:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytewise(["<|bos|>", "<|eos|>", "<|pad|>", *special]),
        bos_token="<|bos|>",
        eos_token=eos,
        pad_token="<|pad|>",
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _text_config(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": _VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "initializer_range": 0.08,
        **changes,
    }


@_builder
def build_text_model(folder: Path, *, larger: bool = False, thinks: bool = False) -> None:
    """A Llama of a quarter of a million weights; a token is a byte.

    The prefill of a ``larger`` one takes long enough to be measured: half a second for 1,600 tokens on a slow core. The
    answers of one that ``thinks`` begin with thought, unless ``enable_thinking`` is false: it has the tokens for that.
    """
    tokenizer = _tokenizer()
    if thinks:
        tokenizer.add_tokens(["<think>", "</think>"])
        tokenizer.chat_template += "<think>{% if enable_thinking is false %}</think>{% endif %}"
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 8} if larger else {}
    sizes |= {"num_attention_heads": 12, "num_key_value_heads": 4} if larger else {"max_position_embeddings": 2048}
    model = LlamaForCausalLM(LlamaConfig(**_text_config(head_dim=64, **sizes)))
    prefer_letters(model.lm_head.weight)
    model.save_pretrained(folder)


def prefer_letters(head: torch.Tensor) -> None:
    """Greedy answers are readable, so that different answers are different texts: half of all bytes are no UTF-8."""
    mute(head, (token for token in range(len(head)) if token >= len(ALPHABET) or not "!" <= ALPHABET[token] <= "~"))


def mute(head: torch.Tensor, tokens: Iterable[int]) -> None:
    """Greedily, none of ``tokens`` is ever chosen: some other logit is above 0."""
    with torch.no_grad():
        head[list(tokens)] = 0


@_builder
def build_talker(folder: Path, *, codebook: int = CODEBOOK) -> None:
    """A Llama that knows bytes and seven codebooks of ``codebook`` codec tokens each."""
    special = ("<|soh|>", "<|eoh|>", "<|sos|>", "<|eos_speech|>")
    _tokenizer(*special, eos="<|eos_speech|>", chat_template=None).save_pretrained(folder)
    size = CODEC_BASE + 7 * codebook
    config = LlamaConfig(
        **_text_config(vocab_size=size + -size % 64, head_dim=64, eos_token_id=END_OF_SPEECH, initializer_range=0.02)
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@_builder
def build_audio_model(folder: Path) -> None:
    """A Qwen2-Audio of half a million weights."""
    tokenizer = _tokenizer("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    extractor = WhisperFeatureExtractor(feature_size=16, return_attention_mask=True)
    Qwen2AudioProcessor(
        feature_extractor=extractor,
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        audio_token="<|AUDIO|>",
        audio_bos_token="<|audio_bos|>",
        audio_eos_token="<|audio_eos|>",
    ).save_pretrained(folder)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 16,
            "encoder_layers": 1,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "d_model": 32,
            "max_source_positions": 1500,
            "scale_embedding": False,
            "activation_function": "gelu",
        },
        text_config={"model_type": "qwen2", **_text_config()},
        audio_token_index=259,
    )
    model = Qwen2AudioForConditionalGeneration(config)
    prefer_letters(model.get_output_embeddings().weight)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "multi_modal_projector" in name:
                weight *= 30  # loud enough to change greedy answers
    model.save_pretrained(folder)
    _rename_weights(folder / "model.safetensors")


@_builder
def build_whisper(folder: Path) -> None:
    """A multilingual Whisper of a layer each; a token is a byte."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    special = ["<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)]
    special += ["<|translate|>", "<|transcribe|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer = _tokenizer(*special, chat_template=None)
    extractor = WhisperFeatureExtractor(feature_size=16)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    begin = tokenizer.convert_tokens_to_ids("<|startoftranscript|>")
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "decoder_start_token_id": begin}
    config = WhisperConfig(
        vocab_size=_VOCABULARY,
        num_mel_bins=16,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_target_positions=448,
        begin_suppress_tokens=None,
        suppress_tokens=None,
        **ids,
    )
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    GenerationConfig(is_multilingual=True, max_length=448, **ids).save_pretrained(folder)


def _rename_weights(path: Path) -> None:
    """Newer transformers save names that the released checkpoints do not have and vLLM does not know."""
    renamed = {}
    for name, weight in load_file(path).items():
        name = name.removeprefix("model.")
        if name.startswith("lm_head"):
            name = f"language_model.{name}"
        elif name.startswith("language_model."):
            inner = name.removeprefix("language_model.")
            while inner.startswith("model."):
                inner = inner.removeprefix("model.")
            name = f"language_model.{inner}" if inner.startswith("lm_head") else f"language_model.model.{inner}"
        renamed[name] = weight.clone()
    save_file(renamed, path, {"format": "pt"})


@_builder
def build_vision_model(folder: Path) -> None:
    """A Qwen2-VL; needs torchvision."""
    special = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
    _tokenizer(*special).save_pretrained(folder)
    rope = {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10_000.0}
    config = Qwen2VLConfig(
        vision_config={
            "depth": 1,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        text_config=_text_config(rope_parameters=rope),
        vision_start_token_id=259,
        vision_end_token_id=260,
        vision_token_id=261,
        image_token_id=262,
        video_token_id=263,
    )
    model = Qwen2VLForConditionalGeneration(config)
    prefer_letters(model.get_output_embeddings().weight)
    model.save_pretrained(folder)
    processor = {"processor_class": "Qwen2VLProcessor", "image_processor_type": "Qwen2VLImageProcessor"}
    pixels = {"min_pixels": 56 * 56, "max_pixels": 224 * 224, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **pixels}))


def codec_config(*, noise: bool = True) -> dict[str, Any]:
    """A SNAC codec: rates, strides and kernels of the released codec at 24 kHz; few channels."""
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


@_builder
def build_codec(folder: Path) -> None:
    """In the form in which SNAC is released."""
    from snac import SNAC

    config = codec_config()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    torch.save(SNAC(**config).state_dict(), folder / "pytorch_model.bin")


def write_talker_profile(path: Path, codec: Path) -> Path:
    """Of the Talker that ``build_talker`` builds, which speaks the codes of that codec."""
    path.write_text(
        f"prefix = [259, 256]\nsuffix = [260, 261]\nstop = [{END_OF_SPEECH}]\n"
        f'text = "{{voice}}: {{text}}"\nfirst_token = {CODEC_BASE}\ncodebook_size = {CODEBOOK}\n'
        f"codec = {json.dumps(str(codec.resolve()))}\nframes_per_character = 1.0\nspare_frames = 4\n"
        '[voices]\nada = "ada"\nbob = "bob"\n[sampling]\ntemperature = 1.0\n'
    )
    return path


def _toml(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def main(folder: Path, omni: str | None) -> None:
    settings = _omni_model(folder, omni) if omni else _speaking_models(folder)
    (folder / "serve.toml").write_text(
        f'engine = "vllm"\n\n[vllm]\n{settings}'
        # Random weights know no end: where the client asks for nothing else, an answer is a line, and always the same.
        f"\n[vllm.args.override_generation_config]\n{_toml({'max_new_tokens': 40, 'temperature': 0})}"
        # They would also write blanks for ever where a grammar lets them.
        '\n[vllm.args.structured_outputs_config]\nbackend = "xgrammar"\ndisable_any_whitespace = true\n'
    )


def _speaking_models(folder: Path) -> str:
    """Settings of a model that hears, and a Talker that reads its answers."""
    models = {
        "model": str(build_audio_model(folder / "thinker")),
        "tool_parser": "hermes",
        "talker": str(build_talker(folder / "talker")),
        "talker_profile": str(write_talker_profile(folder / "talker.toml", build_codec(folder / "codec"))),
    }
    return f"{_toml(models)}\n[vllm.talker_args]\n{_toml(ENGINE_ARGS)}\n[vllm.args]\n{_toml(MULTIMODAL_ARGS)}"


def _omni_model(folder: Path, omni: str) -> str:
    """Settings of an omni model with its own voice."""
    from support.tiny_omni import Family, build_omni

    model = build_omni(Family(omni), folder / omni)
    settings = {"model": str(model), "tool_parser": "hermes", "omni_sessions": 4, "omni_positions": 1024}
    args = {**MULTIMODAL_ARGS, "max_num_batched_tokens": 2048}
    return f"{_toml(settings)}\n[vllm.args]\n{_toml(args)}"


if __name__ == "__main__":
    # Whole paths: the profile names the codec's folder.
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else None)
