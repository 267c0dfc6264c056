"""Qwen25Talker: the Talker of Qwen2.5-Omni, 50 codes a second.

What it computes is what transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` was trained to do for one
prompt: with the embeddings of codec_pad and codec_bos, which transformers 5.19 leaves out for prompts without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.code_sampling import SamplingState
from omni_ws.engine.omni.prompt_reading import TalkerRows, WholePromptReader
from omni_ws.engine.omni.speakers import default_speaker
from omni_ws.engine.omni.talker_network import SlotSpace, TalkerNetwork
from omni_ws.engine.omni.talker_settings import TalkerSettings


class Qwen25Talker(TalkerNetwork):
    """Every token of prompt and answer is a row: the Thinker's state and the token's embedding.

    ``config`` is the whole config.json, ``speakers`` the token that begins each voice's speech. Raises
    ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = True
    codebooks = 1

    def __init__(
        self, source: TensorSource, config: Mapping[str, Any], space: SlotSpace, speakers: Mapping[str, int]
    ) -> None:
        talker = config["talker_config"]
        shape = BlockShape.of(talker, "talker_config", interleaved=False)
        pad, start, end, mask = (int(talker[f"tts_codec_{name}_token_id"]) for name in ("pad", "start", "end", "mask"))
        self.end_codes = frozenset([pad, end])
        vocabulary = int(talker["vocab_size"])
        unheard = range(_readable_codes(config), vocabulary)
        suppressed = sorted({start, *unheard} - self.end_codes)
        # The prompt's codes count as had: transformers gives every row one.
        sampling = SamplingState(
            space.slots, vocabulary, space.device, suppressed=suppressed, penalised=[mask, pad, start]
        )
        super().__init__(source, space, shape, sampling, "talker.model.embed_tokens.weight")
        self._weight, self._bias = (
            source.tensor(f"talker.thinker_to_talker_proj.{kind}").to(space.device, space.dtype)
            for kind in ("weight", "bias")
        )
        self._speakers = dict(speakers)
        self.voices = tuple(sorted(self._speakers, key=lambda name: name != default_speaker(self._speakers)))
        self.defaults = TalkerSettings(voice=self.voices[0], temperature=0.9, top_k=40, top_p=0.8)
        self.after_answer = (talker["tts_text_end_token_id"], talker["tts_text_pad_token_id"])
        self._media = tuple(config["thinker_config"][f"{kind}_token_index"] for kind in ("audio", "image", "video"))
        self._pad, self._start = pad, start

    @property
    def _start_code(self) -> int:
        return self._start

    def reader(self, voice: str) -> WholePromptReader:
        return WholePromptReader(self._media, (self._speakers[voice], self._pad), self.hidden_size)

    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        x = self.embedded(rows.tokens)
        x[torch.from_numpy(rows.states)] += torch.from_numpy(rows.hidden)
        return self._projected(self._with_codes(self._to_device(x), rows))

    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        return self._projected(rows + feedback)

    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return first[:, None], functional.embedding(first, self._codes)

    def _projected(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


def _readable_codes(config: Mapping[str, Any]) -> int:
    """Return how many codes Token2Wav can read; the Talker has some between these and its special ones."""
    vocoder = config.get("token2wav_config", {}).get("dit_config", {})
    return int(vocoder.get("num_embeds", 8193)) + 1
