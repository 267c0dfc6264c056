"""A check that a computation on a device never makes the host wait for it, as CUDA graphs demand."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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
