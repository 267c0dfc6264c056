"""The network of Qwen2.5's Token2Wav over batches of windows: transformers' modules, and each constant computed once.

A mel spectrogram is the solution of a differential equation: the DiT gives the derivative, a RungeKutta takes the
steps, and BigVGAN turns the mel frames into samples. transformers' own ``sample`` draws the noise for
the length at hand and runs the speaker encoder in each of the 36 evaluations; nothing else differs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import pi, prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniToken2WavConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from omni_ws.config.values import ConfigurationError
from omni_ws.engine.omni.positional_normal import normal_at
from omni_ws.engine.omni.speakers import OmniSpeaker
from omni_ws.engine.omni.step_graphs import StepGraphs

#: The authors' values: how far the solution follows the codes, and how times gather at the begin.
_GUIDANCE: Final = 0.5
_SWAY: Final = -1.0
#: Graphs are for so many windows, and for the largest number of a batch.
_BATCHES: Final = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class _Voice:
    """What the DiT is told of a speaker, in row 0, and where it is to be told nothing, in row 1: each (2, values)."""

    heard: Tensor
    embedding: Tensor


class Token2WavNetwork:
    """``weights`` are the tensors of the module ``token2wav``, ``config`` is ``token2wav_config`` of the checkpoint.

    Equations are solved in ``ode_steps`` - 1 steps. Raises ConfigurationError for weights that do not fit.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        speakers: Mapping[str, OmniSpeaker],
        *,
        ode_steps: int,
        device: torch.device,
    ) -> None:
        if ode_steps < 2:
            raise ConfigurationError([f"ode_steps must be at least 2, got {ode_steps}"])
        settings = Qwen2_5OmniToken2WavConfig(**config)
        try:
            with torch.device(device):
                model = Qwen2_5OmniToken2WavModel._from_config(settings, attn_implementation="sdpa")
            # Released checkpoints may have constants besides, which the model computes itself.
            loaded = model.load_state_dict({name: tensor.float() for name, tensor in weights.items()}, strict=False)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigurationError([f"token2wav: {error}"]) from error
        if loaded.missing_keys:
            raise ConfigurationError([f"token2wav: the checkpoint has no tensor {loaded.missing_keys[0]}"])
        self.device = device
        self._dit, self._vocoder = model.eval().code2wav_dit_model, model.code2wav_bigvgan_model
        dit = settings.dit_config
        self.bins: int = dit.mel_dim
        #: The number of codes, the mel frames of each, and the codes of a block.
        self.codes: int = self._dit.text_embed.codec_embed.num_embeddings
        self.mel_per_code: int = dit.repeats
        self.codes_per_block: int = dit.block_size // dit.repeats
        self.samples_per_mel = prod(settings.bigvgan_config.upsample_rates)
        self._weight_bytes: int = sum(tensor.nbytes for tensor in model.state_dict().values())
        #: The ends of the solver's steps, the begin first.
        self.times: Sequence[float] = _times(ode_steps).tolist()
        self._batches: list[int] = []
        self._graphs = StepGraphs(lambda batch, frames: self._evaluate(*self._inputs(batch, frames)), str(device))
        #: The longest window so far, of which others are parts.
        self._longest = 0
        self.voices: Sequence[str] = tuple(speakers)
        with torch.inference_mode():
            self._voices = {name: self._voice(name, speaker) for name, speaker in speakers.items()}

    @property
    def memory_bytes(self) -> int:
        """What the weights take; on a GPU all that PyTorch has reserved there, graphs included."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_reserved(self.device))
        return self._weight_bytes

    def warm_up(self, frames: Sequence[int], *, batch: int) -> None:
        """Run windows of so many mel frames, and on a GPU capture them in batches of up to ``batch``."""
        longest, width = max(frames), self._dit.hidden_size
        self._shape(longest)
        with torch.inference_mode(), self.device:
            self._buffers = (
                torch.zeros(batch),
                torch.zeros(batch, longest, self.bins),
                torch.zeros(2, batch, longest, width),
            )
            self._batches = [size for size in _BATCHES if size < batch] + [batch]
            self._graphs.warm_up((size, length) for size in self._batches for length in frames)

    def noise(self, seed: int, begin: int, end: int) -> Tensor:
        """Return what the mel frames from ``begin`` to ``end`` of an answer begin as, (frames, bins)."""
        positions = torch.arange(begin * self.bins, end * self.bins, device=self.device)
        return normal_at(positions, seed).view(-1, self.bins)

    def conditions(self, voice: str, codes: Tensor) -> Tensor:
        """Return what stays the same in each evaluation of a window, for its codes (n,): (2, mel frames, values)."""
        with torch.inference_mode():
            dit, known = self._dit, self._voices[voice]
            said = dit.text_embed(torch.stack([codes, torch.zeros_like(codes)]))
            heard, embedding = (each[:, None].expand(-1, said.shape[1], -1) for each in (known.heard, known.embedding))
            projection = dit.input_embed.proj
            constant = torch.cat([heard, said, embedding], -1)
            return functional.linear(constant, projection.weight[:, self.bins :], projection.bias)

    def derivative(self, times: Sequence[float], mels: Sequence[Tensor], conditions: Sequence[Tensor]) -> Tensor:
        """Return the derivatives of windows at ``times``: of mel frames (frames, bins), (batch, frames, bins).

        All windows are equally long; each has ``conditions``.
        """
        batch, frames = len(mels), len(mels[0])
        size = next((size for size in self._batches if size >= batch), batch)
        with torch.inference_mode():
            given = torch.tensor(times, device=self.device), torch.stack([*mels]), torch.stack([*conditions], 1)
            if (size, frames) not in self._graphs:
                return self._evaluate(*given)
            to_times, to_mels, to_conditions = self._inputs(batch, frames)
            for target, source in zip((to_times, to_mels, to_conditions), given, strict=True):
                target.copy_(source)
            # The next run writes over what this one returns.
            return self._graphs.run(size, frames)[:batch].clone()

    def sound(self, mels: Tensor) -> Tensor:
        """Return the samples of mel frames (batch, frames, bins): (batch, frames * samples_per_mel)."""
        with torch.inference_mode():
            samples: Tensor = self._vocoder(mels.transpose(1, 2))
            # It drops the dimension of a batch of one.
            return samples.view(len(mels), -1)

    def _voice(self, name: str, speaker: OmniSpeaker) -> _Voice:
        encoder, expected = self._dit.input_embed.spk_encoder, self._dit.config.enc_emb_dim
        mel, embedding = speaker.reference_mel.to(self.device), speaker.condition.to(self.device)
        if embedding.shape[1] != expected or mel.shape[2] != self.bins:
            raise ConfigurationError([f"speaker {name}: {expected} values and {self.bins} mel bins are needed"])
        heard = torch.cat([encoder(mel), encoder(torch.zeros_like(mel))])
        return _Voice(heard, torch.cat([embedding, torch.zeros_like(embedding)]))

    def _inputs(self, batch: int, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the buffers that graphs read: times, mel frames and conditions."""
        times, mels, conditions = self._buffers
        return times[:batch], mels[:batch, :frames], conditions[:, :batch, :frames]

    def _evaluate(self, times: Tensor, mels: Tensor, conditions: Tensor) -> Tensor:
        """Return the derivative at ``times`` (batch,); ``conditions`` (2, batch, frames, values)."""
        dit, batch = self._dit, len(mels)
        rotary, distance = self._shape(mels.shape[1])
        emb = dit.time_embed(times).repeat(2, 1)
        projected = functional.linear(mels, dit.input_embed.proj.weight[:, : self.bins])
        x = (projected + conditions).flatten(0, 1)
        for block in dit.transformer_blocks:
            x = block(x, emb, position_embeddings=rotary, block_diff=distance)
        guided, free = dit.proj_out(dit.norm_out(x, emb)).split(batch)
        result: Tensor = guided + (guided - free) * _GUIDANCE
        return result

    def _shape(self, frames: int) -> tuple[Any, Tensor]:
        """Return rotations and distances in blocks, (1, 1, frames, frames), for windows of so many mel frames."""
        if self._longest < frames:
            positions = torch.arange(frames, device=self.device)
            blocks = positions // self._dit.block_size
            self._rotary = self._dit.rotary_embed(torch.empty(0, device=self.device), positions[None])
            self._distances = (blocks[None] - blocks[:, None])[None, None]
            self._longest = frames
        rotary = tuple(each[:, :frames] for each in self._rotary)
        return rotary, self._distances[..., :frames, :frames]


def _times(steps: int) -> Tensor:
    times = torch.linspace(0, 1, steps)
    return times + _SWAY * (torch.cos(pi / 2 * times) - 1 + times)
