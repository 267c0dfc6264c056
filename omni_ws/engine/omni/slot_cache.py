"""SlotCache: keys and values of all sessions of a Talker, in slots of one size."""

from __future__ import annotations

import torch

from omni_ws.engine.omni.block_shape import BlockShape


class SlotCache:
    """Keys and values (layers, slots, kv_heads, longest, head_dim). Lengths are kept by who uses it."""

    def __init__(self, shape: BlockShape, slots: int, longest: int, device: str, dtype: torch.dtype) -> None:
        size = (shape.layers, slots, shape.kv_heads, longest, shape.head_dim)
        # Zeros, because what a mask leaves out still meets the values: 0 times NaN would be NaN.
        self.keys = torch.zeros(size, device=device, dtype=dtype)
        self.values = torch.zeros(size, device=device, dtype=dtype)

    def piece(self, slot: int, start: int, count: int) -> SlotPiece:
        """Return the view of a pass over ``count`` positions of one session that follow ``start`` earlier ones."""
        return SlotPiece(self, slot, start, count)

    def row(self, lengths: torch.Tensor, window: int) -> SlotRow:
        """Return the view of a pass over one position of each of the first slots.

        ``lengths`` (B,) are the positions that each has; the new one is put behind them. All attend within the first
        ``window`` positions, which must be more than any length.
        """
        return SlotRow(self, lengths, window)


class SlotPiece:
    """A piece of one session's prompt."""

    def __init__(self, cache: SlotCache, slot: int, start: int, count: int) -> None:
        self._cache, self._slot, self._start, self._end = cache, slot, start, start + count
        ones = torch.ones(count, start + count, dtype=torch.bool, device=cache.keys.device)
        self.mask: torch.Tensor | None = ones.tril(start)[None]

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        here, end = slice(self._slot, self._slot + 1), self._end
        self._cache.keys[layer, here, :, self._start : end] = keys
        self._cache.values[layer, here, :, self._start : end] = values
        return self._cache.keys[layer, here, :, :end], self._cache.values[layer, here, :, :end]


class SlotRow:
    """The next position of many sessions. What it writes for a session without a row is overwritten by the next one."""

    def __init__(self, cache: SlotCache, lengths: torch.Tensor, window: int) -> None:
        self._cache, self._lengths, self._window = cache, lengths, window
        self._rows = torch.arange(len(lengths), device=lengths.device)
        self.mask: torch.Tensor | None = (torch.arange(window, device=lengths.device) <= lengths[:, None])[:, None]

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every_key, every_value = self._cache.keys[layer], self._cache.values[layer]
        every_key[self._rows, :, self._lengths] = keys[:, :, 0]
        every_value[self._rows, :, self._lengths] = values[:, :, 0]
        batch = len(self._rows)
        return every_key[:batch, :, : self._window], every_value[:batch, :, : self._window]
