"""Whole Qwen2.5-Omni and Qwen3-Omni models with random weights, in the layout of the released ones.

Thinker, Talker and vocoder are there, and so are the processor's files and, for Qwen2.5, the speakers in
``spk_dict.pt``. Greedy answers are letters and have no end. The configurations have the released fields, but few and
narrow layers; what is as transformers has it by default is left out.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from support import tiny_models
from support.tiny_models import bytewise, mute, prefer_letters
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)


class Family(StrEnum):
    QWEN25 = "qwen2.5-omni"
    QWEN3 = "qwen3-omni"


#: As the released models have it, for plain text. What is heard or seen is a placeholder in the text.
CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: What processors ask the tokenizer for, by its attributes.
MEDIA_TOKENS: Final[Mapping[Family, Mapping[str, str]]] = {
    Family.QWEN25: {
        "image_token": "<|IMAGE|>",
        "audio_token": "<|AUDIO|>",
        "video_token": "<|VIDEO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    },
    Family.QWEN3: {
        "image_token": "<|image_pad|>",
        "audio_token": "<|audio_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    },
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
VOCABULARY: Final = 320
#: Ids of the first codebook. Above them are, as in the released models, what controls the Talker.
CODEBOOK: Final = 64
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
        "vocab_size": VOCABULARY,
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
    speaking = _experts(4, moe_intermediate_size=32, shared_expert_intermediate_size=32, vocab_size=CODEBOOK + 1024)
    control = ("codec_eos_token", "codec_nothink", "codec_think_bos", "codec_think_eos", "codec_pad", "codec_bos")
    talker = {
        "text_config": {**_NARROW, **speaking},
        "code_predictor_config": {**_NARROW, "vocab_size": CODEBOOK, "num_code_groups": 16},
        "num_code_groups": 16,
        "thinker_hidden_size": 128,
        "spatial_merge_size": 2,
        "seconds_per_chunk": 2,
        "accept_hidden_layer": 3,
        **{f"{name}_id": CODEBOOK + 36 + place for place, name in enumerate(control)},
        "speaker_id": {name: CODEBOOK + 46 + place for place, name in enumerate(("ethan", "chelsie", "aiden"))},
        **media,
    }
    vocoder = {**_NARROW, "num_key_value_heads": 2, "codebook_size": CODEBOOK, "decoder_dim": 64}
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
    """Build the model in .cache, unless it is there; another builder builds another."""
    return build_omni(family, Path(".cache") / "tiny-omni" / f"{family}-{_builder()[:12]}")


def build_omni(family: Family, folder: Path) -> Path:
    """Build the model in ``folder``, unless this builder has done so before; returns ``folder``."""
    complete = folder / ".complete"
    if complete.exists() and complete.read_text() == _builder():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside it: who looks into the folder at the same time finds a whole model.
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _BUILDERS[family](made)
        (made / ".complete").write_text(_builder())
        made.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _builder() -> str:
    sources = (Path(__file__), Path(tiny_models.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _qwen25_omni(folder: Path) -> None:
    ids = _write_tokenizer(folder, Family.QWEN25)
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**_qwen3_config(ids)))
    _redraw(model)
    mute(model.talker.codec_head.weight, range(CODEBOOK, CODEBOOK + 1024))
    codes = torch.randint(0, CODEBOOK, (1, 16, 20))
    level(model.code2wav.decoder[-1].conv, lambda: model.code2wav(codes))
    model.save_pretrained(folder)
    _write_processor(folder, ids, _preprocessor("Qwen3OmniMoeProcessor", patch_size=16, min_pixels=4096))


_BUILDERS: Final = {Family.QWEN25: _qwen25_omni, Family.QWEN3: _qwen3_omni}


def _write_tokenizer(folder: Path, family: Family) -> dict[str, int]:
    """A token is a byte. Returns the ids of the special tokens and the roles."""
    media = MEDIA_TOKENS[family]
    special = [_PAD, "<|im_start|>", _END, *media.values(), *_SPEECH_TOKENS[family]]
    tokens = bytewise(special)
    tokens.add_tokens(list(_ROLES))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token=_END, pad_token=_PAD, extra_special_tokens=dict(media)
    )
    tokenizer.chat_template = CHAT_TEMPLATE
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
