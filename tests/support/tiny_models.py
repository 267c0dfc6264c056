"""Checkpoints with random weights, built in seconds: what they say is noise, how they are served is real.

``python -m support.tiny_models FOLDER`` builds those that ``make serve-tiny`` serves, and their configuration file.
Every builder writes into ``folder``, does nothing where it has done so before, and returns it.

Omni models are in the layout of the released ones: Thinker, Talker and vocoder, the files of the processor and, for
Qwen2.5, the speakers in ``spk_dict.pt``. Greedy answers are letters and have no end. Configurations have the released
fields, but few and narrow layers; what is as transformers has it by default is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
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


#: Another builder builds anew.
_VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
Options = ParamSpec("Options")


def _builder(build: Callable[Concatenate[Path, Options], None]) -> Callable[Concatenate[Path, Options], Path]:
    @wraps(build)
    def built(folder: Path, /, *arguments: Options.args, **options: Options.kwargs) -> Path:
        complete = folder / ".complete"
        if complete.exists() and complete.read_text() == _VERSION:
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Beside it: who looks into the folder at the same time finds a whole model.
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            torch.manual_seed(0)
            build(made, *arguments, **options)
            (made / ".complete").write_text(_VERSION)
            made.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
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
        name = re.sub("^lm_head", "language_model.lm_head", name.removeprefix("model."))
        name = re.sub(r"^language_model\.(model\.)*(?!lm_head)", "language_model.model.", name)
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


class Family(StrEnum):
    QWEN25 = "qwen2.5-omni"
    QWEN3 = "qwen3-omni"


#: As the released models have it, for plain text. What is heard or seen is a placeholder in the text.
OMNI_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _tokens(place: str, begin: str, end: str) -> dict[str, str]:
    around = [(one, *name) for one in ("vision", "audio") for name in (("bos", begin), ("eos", end))]
    return {f"{one}_token": place.format(one, one.upper()) for one in ("image", "audio", "video")} | {
        f"{one}_{name}_token": f"<|{one}_{tag}|>" for one, name, tag in around
    }


#: What processors ask the tokenizer for, by its attributes.
MEDIA_TOKENS: Final[Mapping[Family, Mapping[str, str]]] = {
    Family.QWEN25: _tokens("<|{1}|>", "bos", "eos"),
    Family.QWEN3: _tokens("<|{0}_pad|>", "start", "end"),
}
_SPEECH_TOKENS: Final[Mapping[Family, tuple[str, ...]]] = {
    Family.QWEN25: ("<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>"),
    Family.QWEN3: ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
}
#: Qwen3 looks for the token of a role after <|im_start|>, so each is a single one.
_ROLES: Final = ("system", "user", "assistant")
_END: Final = "<|im_end|>"
_PAD: Final = "<|endoftext|>"

_LANGUAGE_MODELS: Final = ("thinker.model.", "thinker.lm_head.", "talker.")

#: Frames of the speakers' reference mel; the two differ in length, as released ones may.
_REFERENCE_FRAMES: Final[Mapping[str, int]] = {"Chelsie": 60, "Ethan": 75}


#: Of the Thinker: bytes, special tokens, the three roles.
OMNI_VOCABULARY: Final = 320
#: Ids of the first codebook. Above them are, as in the released models, what controls the Talker.
QWEN3_CODEBOOK: Final = 64
#: Qwen2.5's only codebook; the padding follows it, and ends an answer as the end token does.
QWEN25_CODEBOOK: Final = 80

#: Ids of the tokenizer's special tokens, by their text.
Ids = Mapping[str, int]

#: The layers of what predicts codes; other parts are as narrow but for a few sizes.
_NARROW: Final[Mapping[str, int]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
_HEARING: Final = {
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "d_model": 64,
    "output_dim": 128,
}
_SEEING: Final = {"hidden_size": 64, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
#: What vLLM asks for and transformers does not: image_size, apply_vit_abs_pos_embed.
_QWEN3_SEEING: Final = {
    **_SEEING,
    "depth": 3,
    "num_position_embeddings": 64,
    "image_size": 128,
    "apply_vit_abs_pos_embed": True,
    "deepstack_visual_indexes": [0, 1],
}
_DIT: Final = {
    **_NARROW,
    "num_hidden_layers": 4,
    "emb_dim": 32,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 3],
    "num_embeds": QWEN25_CODEBOOK + 1,
    "enc_emb_dim": 16,
    "enc_dim": 16,
    "enc_channels": [16, 16, 16, 16, 48],
    "enc_attention_channels": 8,
    "enc_se_channels": 8,
}


def _media(family: Family, ids: Ids) -> dict[str, int]:
    """The tokens of media in the fields of a Thinker and a Talker."""
    tokens, suffix = MEDIA_TOKENS[family], "index" if family is Family.QWEN25 else "id"
    around = (("start", "bos"), ("end", "eos"))
    return {f"{one}_token_{suffix}": ids[tokens[f"{one}_token"]] for one in ("audio", "image", "video")} | {
        f"{one}_{end}_token_id": ids[tokens[f"{one}_{name}_token"]]
        for one in ("audio", "vision")
        for end, name in around
    }


def _text(ids: Ids, **sizes: Any) -> dict[str, Any]:
    """The language model of a Thinker. vLLM asks for tie_word_embeddings, transformers does not."""
    return {
        "vocab_size": OMNI_VOCABULARY,
        "hidden_size": 128,
        "max_position_embeddings": 4096,
        "eos_token_id": ids[_END],
        "pad_token_id": ids[_PAD],
        "tie_word_embeddings": False,
        **sizes,
    }


def _qwen25_rope(head: int) -> dict[str, Any]:
    return {"mrope_section": [head // 8, head * 3 // 16, head * 3 // 16], "rope_theta": 10_000.0}


def _experts(count: int, **sizes: int) -> dict[str, Any]:
    """The layers of Qwen3's Thinker and Talker, whose heads have 32 places."""
    rope = {"mrope_section": [8, 4, 4], "rope_theta": 10_000.0, "mrope_interleaved": True, "interleaved": True}
    return {"num_experts": count, "num_experts_per_tok": 2, "norm_topk_prob": True, "rope_parameters": rope, **sizes}


def _qwen25_config(ids: Ids) -> dict[str, Any]:
    media, codes = _media(Family.QWEN25, ids), QWEN25_CODEBOOK
    text = {**_NARROW, "intermediate_size": 256, "num_hidden_layers": 3, "num_key_value_heads": 2}
    text = _text(ids, **{**text, "hidden_size": 128, "head_dim": 64}, rope_parameters=_qwen25_rope(64))
    thinker = {
        "text_config": text,
        "audio_config": _HEARING,
        "vision_config": {**_SEEING, "depth": 1, "fullatt_block_indexes": [0]},
        "user_token_id": ids["user"],
        **media,
    }
    talker = {
        "vocab_size": codes + 4,
        "embedding_size": 128,
        **_NARROW,
        "rope_parameters": _qwen25_rope(32),
        **{
            f"tts_text_{name}_token_id": ids[f"<|tts_{tag}|>"]
            for name, tag in (("pad", "pad"), ("start", "bos"), ("end", "eos"))
        },
        **{f"tts_codec_{name}_token_id": codes + at for at, name in enumerate(("pad", "start", "end", "mask"))},
        "pad_token_id": codes,
        **media,
    }
    vocoder = {"dit_config": _DIT, "bigvgan_config": {"upsample_initial_channel": 64}}
    return {"thinker_config": thinker, "talker_config": talker, "token2wav_config": vocoder}


def _qwen3_config(ids: Ids) -> dict[str, Any]:
    """The last 1024 ids of the first codebook are never spoken, as in the released model."""
    media = {**_media(Family.QWEN3, ids), "position_id_per_seconds": 13}
    text = {**_NARROW, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    thinker = {
        "text_config": _text(ids, **{**text, **_experts(8, moe_intermediate_size=64)}, bos_token_id=ids[_PAD]),
        "audio_config": {**_HEARING, "downsample_hidden_size": 16},
        "vision_config": _QWEN3_SEEING,
        "user_token_id": ids["user"],
        **media,
    }
    speaking = _experts(
        4, moe_intermediate_size=32, shared_expert_intermediate_size=32, vocab_size=QWEN3_CODEBOOK + 1024
    )
    control = ("codec_eos_token", "codec_nothink", "codec_think_bos", "codec_think_eos", "codec_pad", "codec_bos")
    talker = {
        "text_config": {**_NARROW, **speaking},
        "code_predictor_config": {**_NARROW, "vocab_size": QWEN3_CODEBOOK, "num_code_groups": 16},
        "num_code_groups": 16,
        "thinker_hidden_size": 128,
        "spatial_merge_size": 2,
        "seconds_per_chunk": 2,
        "accept_hidden_layer": 3,
        **{f"{name}_id": QWEN3_CODEBOOK + 36 + place for place, name in enumerate(control)},
        "speaker_id": {name: QWEN3_CODEBOOK + 46 + place for place, name in enumerate(("ethan", "chelsie", "aiden"))},
        **media,
    }
    vocoder = {**_NARROW, "num_key_value_heads": 2, "codebook_size": QWEN3_CODEBOOK, "decoder_dim": 64}
    tokens = {"im_start": "<|im_start|>", "im_end": _END, "tts_pad": "<tts_pad>"}
    tokens |= {"tts_bos": "<tts_text_bos>", "tts_eos": "<tts_text_eod>", **{role: role for role in _ROLES}}
    named = {f"{name}_token_id": ids[token] for name, token in tokens.items()}
    return {"thinker_config": thinker, "talker_config": talker, "code2wav_config": vocoder, **named}


def _preprocessor(processor: str, *, patch_size: int, min_pixels: int) -> dict[str, Any]:
    """The released models' Qwen2.5 pads each sound to 300 s, most of what a short prompt takes: here it is 30 s."""
    return {
        "processor_class": processor,
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": min_pixels,
        "max_pixels": 224 * 224,
        "patch_size": patch_size,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "return_attention_mask": True,
    }


def omni_checkpoint(family: Family) -> Path:
    """The model in .cache; built unless it is there."""
    return build_omni(Path(".cache") / "tiny-omni" / f"{family}-{_VERSION[:12]}", family)


@_builder
def build_omni(folder: Path, family: Family) -> None:
    (_qwen25_omni if family is Family.QWEN25 else _qwen3_omni)(folder)


def _qwen25_omni(folder: Path) -> None:
    ids = _write_tokenizer(folder, Family.QWEN25)
    model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**_qwen25_config(ids)))
    _redraw(model)
    mute(model.talker.codec_head.weight, range(QWEN25_CODEBOOK, QWEN25_CODEBOOK + 4))
    vocoder = model.token2wav.code2wav_bigvgan_model
    level(vocoder.conv_post, lambda: vocoder(torch.randn(1, 80, 40)))
    model.save_pretrained(folder)
    speakers = {
        name: {
            "bos_token": ids["<|tts_bos|>"],
            "cond": torch.randn(1, 16),
            "ref_mel": torch.randn(1, frames, 80) - 4,
        }
        for name, frames in _REFERENCE_FRAMES.items()
    }
    torch.save(speakers, folder / "spk_dict.pt")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2_5OmniModel"]}, indent=1))
    _write_processor(folder, ids, _preprocessor("Qwen2_5OmniProcessor", patch_size=14, min_pixels=3136))


def _qwen3_omni(folder: Path) -> None:
    ids = _write_tokenizer(folder, Family.QWEN3)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**_qwen3_config(ids)))
    _redraw(model)
    mute(model.talker.codec_head.weight, range(QWEN3_CODEBOOK, QWEN3_CODEBOOK + 1024))
    codes = torch.randint(0, QWEN3_CODEBOOK, (1, 16, 20))
    level(model.code2wav.decoder[-1].conv, lambda: model.code2wav(codes))
    model.save_pretrained(folder)
    _write_processor(folder, ids, _preprocessor("Qwen3OmniMoeProcessor", patch_size=16, min_pixels=4096))


def _write_tokenizer(folder: Path, family: Family) -> dict[str, int]:
    """A token is a byte. Returns the ids of the special tokens and the roles."""
    media = MEDIA_TOKENS[family]
    special = [_PAD, "<|im_start|>", _END, *media.values(), *_SPEECH_TOKENS[family]]
    tokens = bytewise(special)
    tokens.add_tokens(list(_ROLES))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=_END, pad_token=_PAD, extra_special_tokens=dict(media)
    )
    tokenizer.chat_template = OMNI_TEMPLATE
    tokenizer.save_pretrained(folder)
    return {token: tokens.token_to_id(token) for token in (*special, *_ROLES)}


def _write_processor(folder: Path, ids: Mapping[str, int], preprocessor: Mapping[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    generation = {"eos_token_id": ids[_END], "pad_token_id": ids[_PAD]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def _redraw(model: torch.nn.Module) -> None:
    """Draw weights with which codes vary, sound is audible and every part of a model shows in what it makes."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.startswith(("token2wav.", "code2wav.")):
                _redraw_vocoder(name, weight)
            elif weight.ndim >= 2 and name.startswith(_LANGUAGE_MODELS):
                weight.normal_(0, 0.2 if name.startswith("thinker.") else 0.12)
                if name.startswith("talker.") and "embed" in name:
                    # So large that one added to a row, or forgotten, changes the codes.
                    weight.normal_(0, 1.0)
    prefer_letters(model.thinker.lm_head.weight)


def _redraw_vocoder(name: str, weight: torch.Tensor) -> None:
    if weight.ndim == 3:
        transposed = ".ups." in name or (".upsample." in name and ".0.conv." in name) or ".block.1.conv." in name
        fan_in = (weight.shape[0] if transposed else weight.shape[1]) * weight.shape[2]
        # Louder residual branches saturate the network, which makes noise of every difference.
        residual = any(part in name for part in (".convs2.", ".conv2.", ".dwconv."))
        weight.normal_(0, (2.0 if transposed else 0.25 if residual else 1.0) * fan_in**-0.5)
    elif weight.ndim == 2:
        weight.normal_(0, 0.3 if "embed" in name else 0.08)
    elif name.endswith((".gamma", ".scale")):
        weight.fill_(0.3)


def level(last: torch.nn.Module, decode: Callable[[], torch.Tensor]) -> None:
    """Scale the last convolution of a vocoder so that it uses half the range, and clips nothing."""
    with torch.no_grad():
        last.weight *= 1e-3
        if last.bias is not None:
            last.bias.zero_()
        last.weight *= 0.5 / decode().abs().max()


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
    model = build_omni(folder / omni, Family(omni))
    settings = {"model": str(model), "tool_parser": "hermes", "omni_sessions": 4, "omni_positions": 1024}
    args = {**MULTIMODAL_ARGS, "max_num_batched_tokens": 2048}
    return f"{_toml(settings)}\n[vllm.args]\n{_toml(args)}"


if __name__ == "__main__":
    # Whole paths: the profile names the codec's folder.
    main(Path(sys.argv[1]).resolve(), sys.argv[2] if len(sys.argv) > 2 else None)
