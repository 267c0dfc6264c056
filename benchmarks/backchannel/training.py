"""Training of the classifier of short sounds, with PyTorch (the extra ``vllm`` has it)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from omni_ws.audio.smart_turn import BANDS, CONVOLUTIONS, Class

_CHANNELS: Final = 32
_BATCH: Final = 128
_EPOCHS: Final = 24
_RATE: Final = 6e-3


class _Network(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        counts = (BANDS, *[_CHANNELS] * len(CONVOLUTIONS))
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, after, width, step, bias=False)
            for before, after, (width, step) in zip(counts, counts[1:], CONVOLUTIONS, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(_CHANNELS) for _ in CONVOLUTIONS)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(2 * _CHANNELS, len(Class))

    def forward(self, heard: torch.Tensor) -> torch.Tensor:
        signal = heard.transpose(1, 2)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            signal = torch.relu(norm(convolution(signal)))
        pooled = torch.cat((signal.mean(dim=2), signal.amax(dim=2)), dim=1)
        return self.head(self.drop(pooled))


@dataclass(frozen=True, slots=True)
class Sounds:
    """Spectrograms, the class of each, and how much each counts."""

    heard: NDArray[np.float16]
    classes: NDArray[np.int64]
    weight: NDArray[np.float32]


def train(sounds: Sounds, chosen_by: Sounds, file: Path, *, seed: int = 0) -> None:
    """Train, and write the weights of the epoch that does best on ``chosen_by``."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    network = _Network()
    batches = len(sounds.heard) // _BATCH
    optimiser = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, _RATE, total_steps=_EPOCHS * batches)
    best = np.inf
    for epoch in range(_EPOCHS):
        network.train()
        total = 0.0
        for rows in torch.randperm(len(sounds.heard))[: batches * _BATCH].reshape(-1, _BATCH):
            loss = _loss(network, sounds, rows.numpy(), mask=True)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            total += loss.item() / batches
        network.eval()
        with torch.no_grad():
            chosen = _loss(network, chosen_by, np.arange(len(chosen_by.heard))).item()
        print(f"epoch {epoch}: loss {total:.3f}, of the voices for choosing {chosen:.3f}", flush=True)
        if chosen < best:
            best = chosen
            _save(network, file)


def _loss(network: _Network, sounds: Sounds, rows: NDArray[np.int64], *, mask: bool = False) -> torch.Tensor:
    heard = torch.from_numpy(sounds.heard[rows].astype(np.float32))
    if mask:  # some bands are silenced in half of them, some frames in the other half, and all are moved
        low, first = int(torch.randint(0, BANDS - 6, ())), int(torch.randint(0, 60, ()))
        heard[: len(rows) // 2, :, low : low + 6] = 0
        heard[len(rows) // 2 :, first : first + 8] = 0
        heard = torch.roll(heard, int(torch.randint(-4, 5, ())), dims=1)
    classes, weight = torch.from_numpy(sounds.classes[rows]), torch.from_numpy(sounds.weight[rows])
    each = nn.functional.cross_entropy(network(heard), classes, reduction="none", label_smoothing=0.03)
    return (each * weight).sum() / weight.sum()


def _save(network: _Network, file: Path) -> None:
    arrays: dict[str, Any] = {}
    for layer, (convolution, norm) in enumerate(zip(network.convolutions, network.norms, strict=True)):
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        kernel, bias = convolution.weight * scale[:, None, None], norm.bias - norm.running_mean * scale
        # As (what a window holds, channels): of each band its frames, as sliding_window_view has them.
        arrays[f"kernel{layer}"] = kernel.detach().numpy().reshape(_CHANNELS, -1).T.astype(np.float16)
        arrays[f"bias{layer}"] = bias.detach().numpy().astype(np.float16)
    arrays["head"] = network.head.weight.detach().numpy().T.astype(np.float16)
    arrays["offset"] = network.head.bias.detach().numpy().astype(np.float16)
    np.savez_compressed(file, **arrays)
