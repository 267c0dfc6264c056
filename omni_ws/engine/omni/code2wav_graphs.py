"""Code2WavGraphs: runs the Code2Wav network over arrays, on a GPU from CUDA graphs of a few shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ws.engine.omni.code2wav_network import Code2WavNetwork
from omni_ws.engine.omni.slot_convolutions import SlotMemory
from omni_ws.engine.omni.step_graphs import StepGraphs

#: Stands for the frames of a step that begins its streams, with one frame each.
_BEGIN: Final = 0


class Code2WavGraphs:
    """Calls ``network``, for up to so many streams as ``pieces`` has for each number of frames.

    On a GPU a batch is filled up to a size that was captured, with rows of the scratch slot; on a CPU it runs as it is.
    """

    def __init__(
        self, network: Code2WavNetwork, memory: SlotMemory, *, codebooks: int, pieces: Mapping[int, int]
    ) -> None:
        self._network = network
        self._device = memory.device
        self._on_gpu = memory.device.type == "cuda"
        self._scratch = memory.slots
        self._pieces = pieces
        rows = _filled(max(pieces.values()))
        self._codes = torch.zeros((rows, codebooks, max(pieces)), dtype=torch.int64, device=self._device)
        self._rows = torch.full((rows,), self._scratch, dtype=torch.int64, device=self._device)
        self._done = torch.zeros((rows,), dtype=torch.int64, device=self._device)
        self._graphs = StepGraphs(self._step, str(self._device))
        #: What the graphs take on the device.
        self.nbytes = 0

    def __call__(
        self, codes: NDArray[np.int64], rows: NDArray[np.int64], done: NDArray[np.int64], *, first: bool
    ) -> NDArray[np.float32]:
        """Return the samples of a batch, (batch, samples); see Code2WavNetwork for the arguments."""
        batch, _, frames = codes.shape
        size = _filled(batch) if self._on_gpu else batch
        self._codes[:batch, :, :frames] = torch.tensor(codes)
        self._done[:batch] = torch.tensor(done)
        self._rows[:batch] = torch.tensor(rows)
        self._rows[batch:size] = self._scratch
        samples: NDArray[np.float32] = self._graphs.run(size, _BEGIN if first else frames)[:batch].cpu().numpy()
        return samples

    def warm_up(self) -> None:
        """Capture all shapes on a GPU; on a CPU run each number of frames once."""
        self._rows.fill_(self._scratch)
        if not self._on_gpu:
            self._graphs.warm_up((1, frames) for frames in (_BEGIN, *self._pieces))
            return
        before = torch.cuda.memory_reserved(self._device)
        most = {**self._pieces, _BEGIN: max(self._pieces.values())}
        self._graphs.warm_up((size, frames) for frames in most for size in _sizes(most[frames]))
        self.nbytes = torch.cuda.memory_reserved(self._device) - before

    def _step(self, batch: int, frames: int) -> torch.Tensor:
        """Decode what is in the buffers."""
        codes = self._codes[:batch, :, : frames or 1]
        return self._network(codes, self._rows[:batch], self._done[:batch], first=frames == _BEGIN)


def _filled(batch: int) -> int:
    """Return the power of two to which a batch is filled."""
    return 1 << (batch - 1).bit_length()


def _sizes(most: int) -> list[int]:
    """Return the sizes to which batches of up to ``most`` are filled."""
    return [1 << power for power in range(_filled(most).bit_length())]
