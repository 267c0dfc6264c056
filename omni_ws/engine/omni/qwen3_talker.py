"""Qwen3Talker: the Talker of Qwen3-Omni, 12.5 frames of 16 codes a second.

What it computes is what transformers' ``Qwen3OmniMoeForConditionalGeneration.generate`` does for one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from omni_ws.engine.omni.block_shape import BlockShape
from omni_ws.engine.omni.checkpoint_tensors import TensorSource
from omni_ws.engine.omni.code_predictor import CodePredictor
from omni_ws.engine.omni.code_sampling import SamplingState
from omni_ws.engine.omni.prompt_reading import TalkerRows, TurnTokens, UserTurnsReader
from omni_ws.engine.omni.talker_network import SlotSpace, TalkerNetwork
from omni_ws.engine.omni.talker_settings import TalkerSettings

#: The last ids of the vocabulary are no codes; of them only the end is ever drawn.
_SPECIAL_CODES: Final = 1024


class Qwen3Talker(TalkerNetwork):
    """Experts, a code predictor for 15 of the 16 codebooks; its rows are text, or states of what the user showed.

    ``config`` is the whole config.json. Raises ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = False

    def __init__(self, source: TensorSource, config: Mapping[str, Any], space: SlotSpace) -> None:
        talker = config["talker_config"]
        shape = BlockShape.of(talker["text_config"], "talker_config.text_config", interleaved=True)
        vocabulary = int(talker["text_config"]["vocab_size"])
        end = int(talker["codec_eos_token_id"])
        suppressed = [code for code in range(vocabulary - _SPECIAL_CODES, vocabulary) if code != end]
        sampling = SamplingState(space.slots, vocabulary, space.device, suppressed=suppressed)
        super().__init__(source, space, shape, sampling, "talker.model.codec_embedding.weight")
        predictor = talker["code_predictor_config"]
        self._predictor = CodePredictor(
            source, "talker.code_predictor", predictor, space.slots, space.device, space.dtype
        )
        self.codebooks = self._predictor.codebooks
        self._text = _Projection.load(source, "talker.text_projection", space)
        self._media = _Projection.load(source, "talker.hidden_projection", space)
        self._speakers: dict[str, int] = talker["speaker_id"]
        self.voices = tuple(sorted(self._speakers, key=lambda name: name.lower() != "ethan"))
        self.defaults = TalkerSettings(voice=self.voices[0], temperature=0.9, top_k=50, top_p=1.0)
        self.end_codes = frozenset([end])
        self.after_answer = (config["tts_eos_token_id"], config["tts_pad_token_id"])
        self._turns = TurnTokens.of(config)
        self._start = int(talker["codec_bos_id"])

    @property
    def _start_code(self) -> int:
        return self._start

    def reader(self, voice: str) -> UserTurnsReader:
        return UserTurnsReader(self._turns, self._speakers[voice], self.hidden_size)

    def _prompt_inputs(self, rows: TalkerRows) -> torch.Tensor:
        x = self._text(self._to_device(self.embedded(rows.tokens)))
        if len(rows.hidden):
            media = torch.tensor(np.flatnonzero(rows.states), device=self.space.device)
            x = x.index_copy(0, media, self._media(self._to_device(torch.from_numpy(rows.hidden))))
        return self._with_codes(x, rows)

    def _answer_inputs(self, rows: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
        return self._text(rows) + feedback

    def _frame(
        self, state: torch.Tensor, first: torch.Tensor, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        further, feedback = self._predictor(state, functional.embedding(first, self._codes), self._sampling, frames)
        return torch.cat((first[:, None], further), dim=1), feedback


@dataclass(frozen=True, slots=True)
class _Projection:
    """Two layers from the Thinker's size to the Talker's."""

    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def load(cls, source: TensorSource, prefix: str, space: SlotSpace) -> _Projection:
        first, second, first_bias, second_bias = (
            source.tensor(f"{prefix}.linear_fc{layer}.{kind}").to(space.device, space.dtype)
            for kind in ("weight", "bias")
            for layer in (1, 2)
        )
        return cls((first, second), (first_bias, second_bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.silu(functional.linear(x, self.weights[0], self.biases[0]))
        return functional.linear(inner, self.weights[1], self.biases[1])
