"""SNAC's decoder: windows of codec frames become samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from snac import SNAC
from torch.nn.utils import parametrize

from omni_ws.audio.samples import Samples
from omni_ws.engine.vllm.codec_frames import FrameLayout
from omni_ws.engine.vllm.positional_noise import NoisePlaces, place_noise
from omni_ws.engine.vllm.snac_stream import CodecWindow
from omni_ws.errors import EngineFailed


class SnacDecoder:
    """Synchronous, for one thread at a time: use it through a DecodeQueue.

    SNAC adds noise between its layers. ``noise_seed`` draws it from the place in the clause, so that a sample is the
    same however the clause is cut into windows; None leaves the noise away. ``threads`` bounds what PyTorch uses on
    a CPU. ``model`` is changed: its encoder is dropped, its weights are made plain, its noise is replaced.
    """

    def __init__(
        self,
        model: SNAC,
        layout: FrameLayout,
        *,
        device: str | None = None,
        noise_seed: int | None = 0,
        threads: int | None = None,
    ) -> None:
        strides = model.vq_strides
        if tuple(max(strides) // stride for stride in strides) != layout.codes_per_frame:
            raise EngineFailed(f"the codec's strides {strides} do not fit frames of the slots {layout.slots}")
        if model.codebook_size < layout.codebook_size:
            raise EngineFailed(f"the codec has {model.codebook_size} codes a codebook, not {layout.codebook_size}")
        if model.attn_window_size is not None:
            raise EngineFailed(
                "a codec with attention hears further than its neighbours: it cannot be streamed exactly"
            )
        self.sample_rate = int(model.sampling_rate)
        self.frame_samples = int(model.hop_length) * int(max(strides))
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._layout = layout
        self._places = NoisePlaces()
        self._threads = threads
        model.encoder = torch.nn.Identity()
        for module in model.modules():
            if parametrize.is_parametrized(module, "weight"):
                parametrize.remove_parametrizations(module, "weight")
        place_noise(model.decoder, self._places, noise_seed)
        self._model = model.to(self.device).eval()
        if self.device.startswith("cuda"):
            # With shortened floats, windows of different lengths would not agree about the samples they share.
            torch.backends.cudnn.allow_tf32 = False

    @classmethod
    def load(cls, codec: str, layout: FrameLayout, **options: Any) -> SnacDecoder:
        """``codec`` is a folder with SNAC's ``config.json`` and ``pytorch_model.bin``, or a name on the model hub.

        Blocks; raises EngineFailed.
        """
        try:
            model = SNAC.from_pretrained(codec)
        except Exception as error:
            where = "folder" if Path(codec).is_dir() else "model"
            raise EngineFailed(f"the codec {where} {codec} cannot be loaded: {error}") from error
        return cls(model, layout, **options)

    @property
    def frame_ms(self) -> float:
        return self.frame_samples * 1000 / self.sample_rate

    def decode(self, windows: Sequence[CodecWindow]) -> list[Samples]:
        """The samples of the frames that each window wants. Windows of one length are decoded in one go."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        samples: list[Samples] = [np.empty(0, np.float32)] * len(windows)
        by_length = sorted(range(len(windows)), key=lambda index: len(windows[index].codes))
        for _, group in groupby(by_length, key=lambda index: len(windows[index].codes)):
            indices = list(group)
            for index, decoded in zip(indices, self._decode([windows[index] for index in indices]), strict=True):
                samples[index] = decoded
        return samples

    def _decode(self, windows: list[CodecWindow]) -> list[Samples]:
        """``windows`` are of one length."""
        codes = np.stack([window.codes for window in windows])
        with torch.inference_mode():
            books = [torch.from_numpy(book).to(self.device) for book in self._layout.books(codes)]
            starts = torch.tensor([window.first_frame for window in windows], device=self.device)
            with self._places.at(starts, frames=codes.shape[1]):
                audio = self._model.decode(books)[:, 0].float().cpu().numpy()
        length = self.frame_samples
        return [
            audio[row, window.skip * length : (window.skip + window.keep) * length].copy()
            for row, window in enumerate(windows)
        ]
