"""Causal convolutions of many streams: each stream is a slot, whose past inputs are kept between calls.

The result is that of one convolution over the whole stream, however it is cut. ``rows`` (batch,) int64 are the slots of
the batch's streams; the last slot is scratch, for rows that only fill a batch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from omni_ws.config.values import ConfigurationError

#: The tensors of a module or checkpoint, by their names.
Weights = Mapping[str, Tensor]


class SlotMemory:
    """Owns the tensors that hold something for each slot: ``slots`` and one for scratch."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = slots
        self.device = device
        self._tensors: list[Tensor] = []

    def tensor(self, *shape: int) -> Tensor:
        """Return a new tensor of zeros, (slots + 1, *shape) float32."""
        made = torch.zeros((self.slots + 1, *shape), device=self.device)
        self._tensors.append(made)
        return made

    def clear(self, slot: int) -> None:
        """Set all that is held for ``slot`` to zero."""
        for tensor in self._tensors:
            tensor[slot].zero_()

    @property
    def nbytes(self) -> int:
        total: int = sum(tensor.nbytes for tensor in self._tensors)
        return total


class CausalConvolution:
    """A convolution with stride 1 that sees only the past, which is zero before the start of a stream."""

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, *, dilation: int = 1, groups: int = 1) -> None:
        self._weight, self._bias = weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"]
        self._dilation, self._groups = dilation, groups
        self._reach = (self._weight.shape[2] - 1) * dilation
        self._past = memory.tensor(self._weight.shape[1] * groups, self._reach)

    def __call__(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return what follows from the next inputs, (batch, channels, n) -> (batch, channels out, n)."""
        if self._reach:
            x = torch.cat((self._past[rows], x), -1)
            self._past[rows] = x[..., -self._reach :]
        return functional.conv1d(x, self._weight, self._bias, dilation=self._dilation, groups=self._groups)


class TransposedConvolution:
    """An upsampling convolution that cuts ``kernel - stride`` samples off both ends of a stream.

    What it makes of an input therefore needs the next input too. The first call of a stream returns that much less;
    what the end of the stream lacks, the whole one lacks as well. Raises ConfigurationError where the kernel is neither
    the stride nor twice the stride.
    """

    def __init__(self, weights: Weights, name: str, memory: SlotMemory, *, stride: int) -> None:
        self._weight, self._bias = weights[f"{name}.conv.weight"], weights[f"{name}.conv.bias"]
        self._stride = stride
        self._cut = self._weight.shape[2] - stride
        if self._cut not in (0, stride):
            kernel = self._weight.shape[2]
            raise ConfigurationError([f"{name}: a kernel of {kernel} with a stride of {stride} is not supported"])
        self._past = memory.tensor(self._weight.shape[0], 1) if self._cut else None

    def __call__(self, x: Tensor, rows: Tensor, *, first: bool) -> Tensor:
        """Return what follows from the next inputs; ``first`` says that they begin their streams.

        (batch, channels, n) -> (batch, channels out, n * stride), or (n - 1) * stride at the start of a stream.
        """
        if self._past is not None:
            if not first:
                x = torch.cat((self._past[rows], x), -1)
            self._past[rows] = x[..., -1:]
        made = functional.conv_transpose1d(x, self._weight, self._bias, stride=self._stride)
        return made[..., self._cut : made.shape[-1] - self._cut]
