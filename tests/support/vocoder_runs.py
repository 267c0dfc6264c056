"""Answers through a vocoder in steps, how their sound compares, and a check that nothing waits for a device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from omni_ws.engine.omni.step_process import StepModel, VocoderInput

Sound = NDArray[np.float32]


def finish(model: StepModel) -> dict[int, list[Sound]]:
    """Step until nothing is left to do; returns what each session got."""
    made: dict[int, list[Sound]] = {}
    while model.busy:
        for session, samples in model.step():
            made.setdefault(session, []).append(samples)
    return made


def decode(model: StepModel, items: Sequence[VocoderInput], session: int = 1, **settings: Any) -> list[Sound]:
    """Decode one answer, item by item."""
    model.open(session, settings)
    made = []
    for item in items:
        model.feed(session, item)
        made += finish(model)[session]
    model.close(session)
    return made


def joined(outputs: Iterable[Sound]) -> Sound:
    return np.concatenate([*outputs])


def difference(sound: Sound, expected: Sound) -> float:
    """Return the largest, in terms of the peak."""
    assert sound.shape == expected.shape
    return float(np.abs(sound - expected).max() / np.abs(expected).max())


_ATEN = torch.ops.aten
_WAITING = {
    _ATEN._local_scalar_dense,
    _ATEN.nonzero,
    _ATEN.is_nonzero,
    _ATEN.masked_select,
    _ATEN.equal,
    _ATEN.bincount,
}
_INDEXING = {_ATEN.index, _ATEN.index_put, _ATEN.index_put_}


class NothingWaits(TorchDispatchMode):  # type: ignore[misc]
    """Fails on what would make the host wait for a device, or size a tensor by another's values."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert operator.overloadpacket not in _WAITING, operator
        indices = arguments[1] if operator.overloadpacket in _INDEXING else ()
        assert all(index is None or index.dtype != torch.bool for index in indices), operator
        return operator(*arguments, **(named or {}))
