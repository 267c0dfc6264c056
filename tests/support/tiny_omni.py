"""Whole Qwen2.5-Omni and Qwen3-Omni models with random weights, in the layout of the released ones.

Thinker, Talker and vocoder are there, and so
are the processor's files and, for Qwen2.5, the speakers in ``spk_dict.pt``. Greedy answers are letters and have no end.
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
from support import tiny_omni_configs as configs
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
    sources = (Path(__file__), Path(configs.__file__), Path(tiny_models.__file__))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()


def _qwen25_omni(folder: Path) -> None:
    ids = _write_tokenizer(folder, Family.QWEN25)
    torch.manual_seed(0)
    model = Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniConfig(**configs.qwen25_omni(ids)))
    _redraw(model)
    mute(model.talker.codec_head.weight, range(configs.QWEN25_CODEBOOK, configs.QWEN25_CODEBOOK + 4))
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
    _write_processor(folder, ids, configs.preprocessor("Qwen2_5OmniProcessor", patch_size=14, min_pixels=3136))


def _qwen3_omni(folder: Path) -> None:
    ids = _write_tokenizer(folder, Family.QWEN3)
    torch.manual_seed(0)
    model = Qwen3OmniMoeForConditionalGeneration(Qwen3OmniMoeConfig(**configs.qwen3_omni(ids)))
    _redraw(model)
    mute(model.talker.codec_head.weight, range(configs.CODEBOOK, configs.CODEBOOK + 1024))
    codes = torch.randint(0, configs.CODEBOOK, (1, 16, 20))
    level(model.code2wav.decoder[-1].conv, lambda: model.code2wav(codes))
    model.save_pretrained(folder)
    _write_processor(folder, ids, configs.preprocessor("Qwen3OmniMoeProcessor", patch_size=16, min_pixels=4096))


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
