"""The sizes of Qwen3-Omni-30B-A3B and Qwen2.5-Omni-7B as far as their voices have them, and tiny ones.

The dictionaries are laid out as config.json, and hold what the models here read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Family(StrEnum):
    QWEN3 = "Qwen3-Omni-30B-A3B"
    QWEN25 = "Qwen2.5-Omni-7B"


@dataclass(frozen=True, slots=True)
class OmniShape:
    """A model: its configuration, the Thinker's table of embeddings, and how long a frame of its codes lasts.

    ``frame_ms`` is the duration of a codec frame; ``prompt`` holds the tokens that begin and end the user's turn.
    """

    family: Family
    name: str
    config: dict[str, Any]
    vocabulary: int
    thinker_size: int
    frame_ms: float
    prompt: tuple[tuple[int, ...], tuple[int, ...]]


_TURN, _TURN_END, _USER, _ASSISTANT, _LINE = 151_644, 151_645, 872, 77_091, 198
_PROMPT: Final = ((_TURN, _USER, _LINE), (_TURN_END, _LINE, _TURN, _ASSISTANT, _LINE))
#: The narrow Thinker of the tiny shapes.
_TINY_THINKER: Final = 64


def omni_shape(family: Family, *, tiny: bool) -> OmniShape:
    """Return the shape of ``family``; with ``tiny``, its layers are few and narrow."""
    name = f"{family}{', tiny' if tiny else ''}"
    if family is Family.QWEN3:
        return OmniShape(family, name, _qwen3(tiny), 152_064, _TINY_THINKER if tiny else 2_048, 80.0, _PROMPT)
    return OmniShape(family, name, _qwen25(tiny), 152_064, _TINY_THINKER if tiny else 3_584, 20.0, _PROMPT)


def _qwen3(tiny: bool) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    text = {
        "vocab_size": 3_072,
        "hidden_size": 1_024,
        "num_hidden_layers": 20,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 384,
        "shared_expert_intermediate_size": 768,
        "norm_topk_prob": True,
        "intermediate_size": 2_048,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {**rope, "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    }
    predictor = {
        "vocab_size": 2_048,
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "num_code_groups": 16,
        "rope_parameters": rope,
    }
    code2wav: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    if tiny:
        narrow = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
        narrow |= {"head_dim": 32, "intermediate_size": 64}
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        sections = {**text["rope_parameters"], "mrope_section": [8, 4, 4]}  # type: ignore[dict-item]
        text |= {**narrow, **experts, "shared_expert_intermediate_size": 32, "rope_parameters": sections}
        predictor |= narrow
        code2wav |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
        code2wav |= {"num_hidden_layers": 2, "decoder_dim": 32}
    talker = {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": 16,
        "thinker_hidden_size": _TINY_THINKER if tiny else 2_048,
        "spatial_merge_size": 2,
        "codec_eos_token_id": 2_150,
        "codec_nothink_id": 2_155,
        "codec_think_bos_id": 2_156,
        "codec_think_eos_id": 2_157,
        "codec_pad_id": 2_148,
        "codec_bos_id": 2_149,
        "speaker_id": {"chelsie": 2_301, "ethan": 2_302, "aiden": 2_303},
    }
    return {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"audio_token_id": 151_675, "image_token_id": 151_655, "video_token_id": 151_656},
        "talker_config": talker,
        "code2wav_config": code2wav,
        "im_start_token_id": _TURN,
        "user_token_id": _USER,
        "assistant_token_id": _ASSISTANT,
        "tts_pad_token_id": 151_671,
        "tts_bos_token_id": 151_672,
        "tts_eos_token_id": 151_673,
    }


def _qwen25(tiny: bool) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [16, 24, 24]}
    talker = {
        "vocab_size": 8_448,
        "embedding_size": 3_584,
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 18_944,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tts_text_end_token_id": 151_861,
        "tts_text_pad_token_id": 151_859,
        "tts_codec_pad_token_id": 8_292,
        "tts_codec_start_token_id": 8_293,
        "tts_codec_end_token_id": 8_294,
        "tts_codec_mask_token_id": 8_296,
        "pad_token_id": 8_292,
    }
    token2wav: dict[str, Any] = {"dit_config": {}, "bigvgan_config": {}}
    if tiny:
        talker |= {"embedding_size": _TINY_THINKER, "hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32}
        talker |= {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
        talker |= {"rope_parameters": {**rope, "mrope_section": [4, 6, 6]}}
        dit = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32, "emb_dim": 32}
        dit |= {"enc_dim": 16, "enc_emb_dim": 16, "enc_attention_channels": 8, "enc_se_channels": 8}
        dit |= {"enc_channels": [16, 16, 16, 16, 48], "look_ahead_layers": [1], "look_backward_layers": [0]}  # type: ignore[dict-item]
        token2wav = {"dit_config": dit, "bigvgan_config": {"mel_dim": 80, "upsample_initial_channel": 64}}
        token2wav["bigvgan_config"] |= {"resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3, 5]]}
    media = {"audio_token_index": 151_646, "image_token_index": 151_655, "video_token_index": 151_656}
    return {
        "model_type": "qwen2_5_omni",
        "thinker_config": media,
        "talker_config": talker,
        "token2wav_config": token2wav,
    }
