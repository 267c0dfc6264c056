"""SnacDecoder: a decoder of windows of codec frames to audio, with the SNAC codec."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from snac import SNAC
from snac.layers import NoiseBlock
from torch import nn
from torch.nn.utils import parametrize

from omni_ws.audio.pcm import Samples
from omni_ws.engine.omni.talker_network import normal_at
from omni_ws.engine.vllm.talker import (
    CodecWindow,
    FrameLayout,
)
from omni_ws.errors import EngineFailed


class SnacDecoder:
    """A synchronous decoder of CodecWindows. For use by one thread at a time, such as the thread of a DecodeQueue.

    ``noise_seed`` makes SNAC's noise a function of the position in the clause, so that windows agree about the samples
    they share; None disables it. ``model`` is modified: its encoder is dropped, its weight parametrisations are
    removed and its noise is replaced. ``device`` None is a GPU if there is one. On a GPU, TF32 is disabled for all
    convolutions of this process.

    Raises EngineFailed for a codec that does not match ``layout``, or has attention.
    """

    def __init__(
        self,
        model: SNAC,
        layout: FrameLayout,
        *,
        device: str | None = None,
        noise_seed: int | None = 0,
    ) -> None:
        strides = model.vq_strides
        if tuple(max(strides) // stride for stride in strides) != layout.codes_per_frame:
            raise EngineFailed(f"the codec's strides {strides} do not match the slots of a frame, {layout.slots}")
        if model.codebook_size < layout.codebook_size:
            raise EngineFailed(
                f"the codec must have {layout.codebook_size} codes per codebook, got {model.codebook_size}"
            )
        if model.attn_window_size is not None:
            raise EngineFailed("a codec with attention has unlimited context and cannot be streamed exactly")
        self.sample_rate = int(model.sampling_rate)
        self.frame_samples = int(model.hop_length) * int(max(strides))
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._layout = layout
        #: The first frame of each window that is being decoded, and the number of frames in every window.
        self.starts = torch.zeros(1, dtype=torch.int64)
        self.frames = 1
        model.encoder = torch.nn.Identity()
        for module in model.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        self._replace_noise(model.decoder, noise_seed)
        self._model = model.to(self.device).eval()
        if self.device.startswith("cuda"):
            # With TF32, windows of different lengths would disagree about the samples they share.
            torch.backends.cudnn.allow_tf32 = False

    @classmethod
    def load(cls, codec: str, layout: FrameLayout, **options: Any) -> SnacDecoder:
        """Load the codec from a folder with ``config.json`` and ``pytorch_model.bin``, or by its name at the model hub.

        ``options`` are those of the constructor. Blocks. Raises EngineFailed.
        """
        try:
            model = SNAC.from_pretrained(codec)
        except Exception as error:
            where = "folder" if Path(codec).is_dir() else "model"
            raise EngineFailed(f"failed to load the codec {where} {codec}: {error}") from error
        return cls(model, layout, **options)

    @property
    def frame_ms(self) -> float:
        """The duration of a codec frame in milliseconds; 85.3 for SNAC at 24 kHz, with 2048 samples."""
        return self.frame_samples * 1000 / self.sample_rate

    def decode(self, windows: Sequence[CodecWindow]) -> list[Samples]:
        """Return the wanted samples of each window. Windows of the same length form a batch."""
        samples: list[Samples] = [np.empty(0, np.float32)] * len(windows)
        by_length = sorted(range(len(windows)), key=lambda index: len(windows[index].codes))
        for _, group in groupby(by_length, key=lambda index: len(windows[index].codes)):
            indices = list(group)
            for index, decoded in zip(indices, self._decode([windows[index] for index in indices]), strict=True):
                samples[index] = decoded
        return samples

    def _decode(self, windows: list[CodecWindow]) -> list[Samples]:
        """Decode a batch of windows of the same length."""
        codes = np.stack([window.codes for window in windows])
        with torch.inference_mode():
            books = [torch.from_numpy(book).to(self.device) for book in self._layout.books(codes)]
            self.starts = torch.tensor([window.first_frame for window in windows], device=self.device)
            self.frames = codes.shape[1]
            audio = self._model.decode(books)[:, 0].float().cpu().numpy()
        length = self.frame_samples
        return [
            audio[row, window.skip * length : (window.skip + window.keep) * length].copy()
            for row, window in enumerate(windows)
        ]

    def _replace_noise(self, decoder: nn.Module, seed: int | None) -> None:
        """Replace the noise blocks of ``decoder``, or, with ``seed`` None, remove them."""
        blocks = [
            (parent, name, child)
            for parent in decoder.modules()
            for name, child in parent.named_children()
            if isinstance(child, NoiseBlock)
        ]
        for number, (parent, name, block) in enumerate(blocks):
            noise = nn.Identity() if seed is None else PositionalNoise(block.linear, self, seed * 1009 + number)
            setattr(parent, name, noise)


class PositionalNoise(nn.Module):  # type: ignore[misc]
    """A replacement for one of SNAC's noise blocks, with the same weights.

    SNAC draws new random noise for each window. Here the noise is a hash of the position in the audio, so it is the
    same in every window.
    """

    def __init__(self, linear: nn.Module, decoder: SnacDecoder, seed: int) -> None:
        super().__init__()
        self.linear = linear
        self._decoder = weakref.proxy(decoder)  # which owns this module
        self._seed = seed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        per_frame = x.shape[-1] // self._decoder.frames
        positions = self._decoder.starts[:, None] * per_frame + torch.arange(x.shape[-1], device=x.device)
        mixed: torch.Tensor = x + normal_at(positions, self._seed)[:, None].to(x.dtype) * self.linear(x)
        return mixed
