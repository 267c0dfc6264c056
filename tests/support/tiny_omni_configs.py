"""The configurations of tiny Qwen2.5-Omni and Qwen3-Omni models: the released fields, few layers, narrow ones.

What is as transformers has it by default is left out.

``ids`` are those of the tokenizer's special tokens, by their text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

#: Of the Thinker: bytes, special tokens, the three roles.
VOCABULARY: Final = 320
#: Ids of the first codebook. Above them are, as in the released models, what controls the Talker.
CODEBOOK: Final = 64
#: Qwen2.5's only codebook; the padding follows it, and ends an answer as the end token does.
QWEN25_CODEBOOK: Final = 80

Ids = Mapping[str, int]


def qwen25_omni(ids: Ids) -> dict[str, Any]:
    return {
        "thinker_config": _qwen25_thinker(ids),
        "talker_config": _qwen25_talker(ids),
        "token2wav_config": {"dit_config": _dit(), "bigvgan_config": {"upsample_initial_channel": 64}},
    }


def qwen3_omni(ids: Ids) -> dict[str, Any]:
    return {
        "thinker_config": _qwen3_thinker(ids),
        "talker_config": _qwen3_talker(ids),
        "code2wav_config": {
            "codebook_size": CODEBOOK,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 2,
            "decoder_dim": 64,
        },
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
    }


def preprocessor(processor: str, *, patch_size: int, min_pixels: int) -> dict[str, Any]:
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


def _qwen25_rope(head: int) -> dict[str, Any]:
    section = [head // 8, head * 3 // 16, head * 3 // 16]
    return {"mrope_section": section, "rope_theta": 10_000.0}


def _qwen3_rope(head: int) -> dict[str, Any]:
    section = [head // 4, head // 8, head // 8]
    interleaved = {"mrope_interleaved": True, "interleaved": True}
    return {"mrope_section": section, "rope_theta": 10_000.0, **interleaved}


def _qwen25_media(ids: Ids) -> dict[str, Any]:
    return {
        "audio_token_index": ids["<|AUDIO|>"],
        "image_token_index": ids["<|IMAGE|>"],
        "video_token_index": ids["<|VIDEO|>"],
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
    }


def _qwen3_media(ids: Ids) -> dict[str, Any]:
    return {
        "audio_token_id": ids["<|audio_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "position_id_per_seconds": 13,
    }


def _audio_encoder() -> dict[str, Any]:
    return {
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
        "output_dim": 128,
    }


def _vision_encoder() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
    }


def _text(ids: Ids) -> dict[str, Any]:
    """What the language models of both Thinkers have in common."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "max_position_embeddings": 4096,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "tie_word_embeddings": False,
    }


def _speech_layers() -> dict[str, Any]:
    """The layers of what predicts codes, without their places."""
    return {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }


def _qwen25_thinker(ids: Ids) -> dict[str, Any]:
    text = {
        **_text(ids),
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": _qwen25_rope(64),
    }
    return {
        "text_config": text,
        "audio_config": _audio_encoder(),
        "vision_config": {**_vision_encoder(), "depth": 1, "fullatt_block_indexes": [0]},
        "user_token_id": ids["user"],
        **_qwen25_media(ids),
    }


def _qwen25_talker(ids: Ids) -> dict[str, Any]:
    return {
        "vocab_size": QWEN25_CODEBOOK + 4,
        "embedding_size": 128,
        **_speech_layers(),
        "rope_parameters": _qwen25_rope(32),
        "tts_text_pad_token_id": ids["<|tts_pad|>"],
        "tts_text_start_token_id": ids["<|tts_bos|>"],
        "tts_text_end_token_id": ids["<|tts_eos|>"],
        "tts_codec_pad_token_id": QWEN25_CODEBOOK,
        "tts_codec_start_token_id": QWEN25_CODEBOOK + 1,
        "tts_codec_end_token_id": QWEN25_CODEBOOK + 2,
        "tts_codec_mask_token_id": QWEN25_CODEBOOK + 3,
        "pad_token_id": QWEN25_CODEBOOK,
        **_qwen25_media(ids),
    }


def _dit() -> dict[str, Any]:
    return {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "head_dim": 32,
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


def _qwen3_layers(heads: int, **sizes: int) -> dict[str, Any]:
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 32,
        "rope_parameters": _qwen3_rope(32),
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        **sizes,
    }


def _qwen3_thinker(ids: Ids) -> dict[str, Any]:
    """With what vLLM asks for and transformers does not: tie_word_embeddings, image_size, apply_vit_abs_pos_embed."""
    sizes = {"intermediate_size": 128, "num_hidden_layers": 4, "num_experts": 8, "moe_intermediate_size": 64}
    text = {**_text(ids), **_qwen3_layers(4, **sizes), "bos_token_id": ids["<|endoftext|>"]}
    vision = {
        "depth": 3,
        "num_position_embeddings": 64,
        "image_size": 128,
        "apply_vit_abs_pos_embed": True,
        "deepstack_visual_indexes": [0, 1],
    }
    return {
        "text_config": text,
        "audio_config": {**_audio_encoder(), "downsample_hidden_size": 16},
        "vision_config": {**_vision_encoder(), **vision},
        "user_token_id": ids["user"],
        **_qwen3_media(ids),
    }


def _qwen3_talker(ids: Ids) -> dict[str, Any]:
    """The last 1024 ids of the first codebook are never spoken, as in the released model."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_experts": 4, "moe_intermediate_size": 32}
    text = {
        **_qwen3_layers(2, **sizes),
        "vocab_size": CODEBOOK + 1024,
        "num_hidden_layers": 2,
        "shared_expert_intermediate_size": 32,
    }
    predictor = {
        "vocab_size": CODEBOOK,
        **_speech_layers(),
        "num_code_groups": 16,
    }
    return {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": 16,
        "thinker_hidden_size": 128,
        "spatial_merge_size": 2,
        "seconds_per_chunk": 2,
        "accept_hidden_layer": 3,
        "codec_eos_token_id": CODEBOOK + 36,
        "codec_nothink_id": CODEBOOK + 37,
        "codec_think_bos_id": CODEBOOK + 38,
        "codec_think_eos_id": CODEBOOK + 39,
        "codec_pad_id": CODEBOOK + 40,
        "codec_bos_id": CODEBOOK + 41,
        "speaker_id": {"ethan": CODEBOOK + 46, "chelsie": CODEBOOK + 47, "aiden": CODEBOOK + 48},
        **_qwen3_media(ids),
    }
