"""The Talkers of Qwen3-Omni and Qwen2.5-Omni."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.nn import functional

from omni_ws.engine.omni.checkpoint import CheckpointTensors, default_speaker
from omni_ws.engine.omni.prompt_reading import TalkerRows, TurnTokens, UserTurnsReader, WholePromptReader
from omni_ws.engine.omni.step_model import TalkerSettings
from omni_ws.engine.omni.talker_network import SamplingState, SlotSpace, TalkerNetwork
from omni_ws.engine.omni.transformer import BlockShape, Put, Transformer

#: The number of special ids at the end of the vocabulary, which are no codes; of these only the end code is drawn.
_SPECIAL_CODES: Final = 1024


class Qwen3Talker(TalkerNetwork):
    """The Talker of Qwen3-Omni: 12.5 frames of 16 codes a second.

    It is a top-k MoE with a shared expert, and a CodePredictor for 15 of the 16 codebooks. Its rows are text, or hidden
    states of the user's audio, images and video. It computes the same as transformers'
    ``Qwen3OmniMoeForConditionalGeneration.generate`` for one prompt.

    ``config`` is the whole config.json. Raises ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = False

    def __init__(self, source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace) -> None:
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
        self._start_code = int(talker["codec_bos_id"])

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
    """An MLP of two layers, from the Thinker's hidden size to the Talker's."""

    weights: tuple[torch.Tensor, torch.Tensor]
    biases: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def load(cls, source: CheckpointTensors, prefix: str, space: SlotSpace) -> _Projection:
        first, second, first_bias, second_bias = (
            source.tensor(f"{prefix}.linear_fc{layer}.{kind}").to(space.device, space.dtype)
            for kind in ("weight", "bias")
            for layer in (1, 2)
        )
        return cls((first, second), (first_bias, second_bias))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.silu(functional.linear(x, self.weights[0], self.biases[0]))
        return functional.linear(inner, self.weights[1], self.biases[1])


class CodePredictor:
    """The small transformer in Qwen3's Talker that predicts the further codes of a frame from the first one.

    For each frame there is one pass over two rows, the Talker's last state and the first code, and then one pass for
    each further code but the last. The KV cache holds one frame. ``config`` is ``code_predictor_config``.
    """

    def __init__(
        self,
        source: CheckpointTensors,
        prefix: str,
        config: Mapping[str, Any],
        slots: int,
        device: str,
        dtype: torch.dtype,
    ) -> None:
        self.codebooks = int(config["num_code_groups"])
        self.shape = BlockShape.of(config, "talker_config.code_predictor_config")
        self._transformer = Transformer(source, f"{prefix}.model", self.shape, device, dtype)

        def each(name: str) -> list[torch.Tensor]:
            numbers = range(self.codebooks - 1)
            return [source.tensor(f"{prefix}.{name}.{number}.weight").to(device, dtype) for number in numbers]

        self._embeddings = each("model.codec_embedding")
        self._heads = each("lm_head")
        size = (self.shape.layers, slots, self.shape.kv_heads, self.codebooks, self.shape.head_dim)
        self._keys = torch.zeros(size, device=device, dtype=dtype)
        self._values = torch.zeros_like(self._keys)
        self._first_mask = torch.ones(1, 2, 2, dtype=torch.bool, device=device).tril()
        positions = torch.arange(self.codebooks, device=device).expand(3, 1, -1)
        self._rotations = self._transformer.rotations(positions)

    def __call__(
        self, state: torch.Tensor, first: torch.Tensor, sampling: SamplingState, frames: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the further codes (B, codebooks - 1), and the sum of the embeddings of all codes (B, H).

        ``state`` (B, H) is the Talker's last state, ``first`` (B, H) the embedding of the first code, ``frames`` (B,)
        the numbers of the frames.
        """
        rows, total, codes = torch.stack((state, first), dim=1), first, []
        for number, (embedding, head) in enumerate(zip(self._embeddings, self._heads, strict=True)):
            done = number + 1 if number else 0
            rotations = self._rotations[0][:, done : number + 2], self._rotations[1][:, done : number + 2]
            mask = None if number else self._first_mask
            states = self._transformer(rows, rotations, self._put(done, number + 2), mask)
            logits = functional.linear(states[:, -1], head).float()
            code = sampling.draw_residual(logits, frames, number + 1)
            codes.append(code)
            embedded = functional.embedding(code, embedding)
            total = total + embedded
            rows = embedded[:, None]
        return torch.stack(codes, dim=1), total

    def _put(self, start: int, end: int) -> Put:
        """Return the access to the positions up to ``end`` of the frame, of which those from ``start`` on are new."""

        def put(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            batch = len(keys)
            self._keys[layer, :batch, :, start:end] = keys
            self._values[layer, :batch, :, start:end] = values
            return self._keys[layer, :batch, :, :end], self._values[layer, :batch, :, :end]

        return put


class Qwen25Talker(TalkerNetwork):
    """The Talker of Qwen2.5-Omni: 50 frames of one code a second.

    Every token of prompt and answer is a row: the Thinker's hidden state plus the token's embedding. It computes the
    same as transformers' ``Qwen2_5OmniForConditionalGeneration.generate`` for one prompt, except that it adds the
    embeddings of codec_pad and codec_bos, as in training; transformers 5.19 omits them for prompts without padding.

    ``config`` is the whole config.json, ``speakers`` has the token that begins the speech of each voice. Raises
    ConfigurationError for missing tensors, KeyError for missing settings.
    """

    answer_states = True
    codebooks = 1

    def __init__(
        self, source: CheckpointTensors, config: Mapping[str, Any], space: SlotSpace, speakers: Mapping[str, int]
    ) -> None:
        talker = config["talker_config"]
        shape = BlockShape.of(talker, "talker_config", interleaved=False)
        pad, start, end, mask = (int(talker[f"tts_codec_{name}_token_id"]) for name in ("pad", "start", "end", "mask"))
        self.end_codes = frozenset([pad, end])
        vocabulary = int(talker["vocab_size"])
        unreadable = range(_readable_codes(config), vocabulary)
        suppressed = sorted({start, *unreadable} - self.end_codes)
        # In transformers each row of the prompt has one of these codes, so the repetition penalty applies to them.
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
        self._pad, self._start_code = pad, start

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
    """Return the number of codes that Token2Wav can decode; the Talker's vocabulary has more, beside special codes."""
    vocoder = config.get("token2wav_config", {}).get("dit_config", {})
    return int(vocoder.get("num_embeds", 8193)) + 1
