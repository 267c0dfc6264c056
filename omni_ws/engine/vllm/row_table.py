"""RowTable: the Thinker's states of one prompt, by position. KeptRows: the tables of conversations between requests."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.vllm.rows_channel import Rows, as_float32

#: What an entry without rows takes, in bytes, about.
_OVERHEAD_BYTES: Final = 4096


class RowTable:
    """States and M-RoPE positions of tokens. Each is stored once, as the model computes the same again."""

    def __init__(self) -> None:
        #: For each place, the row that holds its state; -1 for none.
        self._row_of: NDArray[np.int64] = np.full(0, -1)
        self._positions: NDArray[np.int64] = np.zeros((3, 0), np.int64)
        self._rows: NDArray[Any] = np.zeros((0, 0), np.float32)
        self._count = 0
        self._expected = 0

    def expect(self, rows: int) -> None:
        """Prepare for this number of rows, so that they need not be copied to grow."""
        self._expected = rows

    @property
    def nbytes(self) -> int:
        """What the table takes."""
        return self._row_of.nbytes + self._positions.nbytes + self._rows.nbytes

    def add(
        self,
        places: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: Rows,
    ) -> None:
        """Store the ``rows`` of ``places`` in the prompt; see RowsChannel for the shapes."""
        if places[-1] >= len(self._row_of):
            more = max(int(places[-1]) + 1, 2 * len(self._row_of)) - len(self._row_of)
            self._row_of = np.concatenate([self._row_of, np.full(more, -1)])
        new = self._row_of[places] < 0
        begin, end = self._count, self._count + int(new.sum())
        if end > len(self._rows):
            capacity = max(end, self._expected, len(self._rows) + len(self._rows) // 4)
            self._rows = _grown(self._rows, (capacity, rows.shape[1]), rows.dtype)
            self._positions = _grown(self._positions.T, (capacity, 3), np.dtype(np.int64)).T
        self._row_of[places[new]] = np.arange(begin, end)
        self._rows[begin:end] = rows[new]
        self._positions[:, begin:end] = positions[:, new]
        self._count = end

    def has(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return, for each of ``places``, whether its state is stored."""
        known = places < len(self._row_of)
        known[known] = self._row_of[places[known]] >= 0
        return known

    def positions(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the positions (3, n) of stored ``places``."""
        return self._positions[:, self._row_of[places]]

    def states(self, places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the states (n, width) of stored ``places``."""
        return as_float32(self._rows[self._row_of[places]])

    def cut(self, length: int) -> None:
        """Forget all from ``length`` on, and what is allocated for much more than there is."""
        places = np.flatnonzero(self._row_of[:length] >= 0)
        if len(places) == self._count and self._count >= len(self._rows) * 3 // 4:
            return
        rows = self._row_of[places]
        self._row_of = np.full(int(places[-1]) + 1 if len(places) else 0, -1)
        self._row_of[places] = np.arange(len(places))
        self._rows, self._positions = self._rows[rows], self._positions[:, rows]
        self._count = len(places)


def _grown(old: NDArray[Any], shape: tuple[int, int], kind: np.dtype[Any]) -> NDArray[Any]:
    new = np.empty(shape, kind)
    if len(old):
        new[: len(old)] = old
    return new


@dataclass(slots=True)
class KeptPrompt:
    """What is known of a prompt: its rows, and what they are rows of.

    Prompts with the same ``salt`` share cached prefixes. ``identity`` has a number for each place, which is the same in
    two prompts only where the tokens, or the media, are the same.
    """

    salt: str = field(default_factory=lambda: uuid.uuid4().hex)
    identity: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    table: RowTable = field(default_factory=RowTable)

    @property
    def nbytes(self) -> int:
        """What it takes."""
        return self.identity.nbytes + self.table.nbytes + _OVERHEAD_BYTES

    def follow(self, identity: NDArray[np.int64]) -> int:
        """Go on with a prompt of ``identity``; returns how many of its places are those of the one before.

        The rows of the others are forgotten.
        """
        same = shared_prefix(self.identity, identity)
        if same < len(self.identity):
            self.table.cut(same)
        self.identity = identity
        return same


def shared_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return the number of places from the beginning that are equal in both."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class KeptRows:
    """What is kept of each conversation for its next request, up to ``capacity`` bytes; the oldest goes first.

    vLLM does not compute what it finds in its prefix cache, so states of that have to be kept. A conversation has a
    salt of its own with them, which a request takes together: whoever finds nothing here finds nothing in the cache.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._kept: OrderedDict[str, KeptPrompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, conversation: str | None) -> KeptPrompt:
        """Remove and return what is kept of ``conversation``; an empty one, with a new salt, if nothing is."""
        kept = None if conversation is None else self._kept.pop(conversation, None)
        if kept is None:
            return KeptPrompt()
        self.nbytes -= kept.nbytes
        return kept

    def keep(self, conversation: str, prompt: KeptPrompt) -> None:
        """Keep ``prompt`` for the next request of the conversation."""
        prompt.table.cut(len(prompt.identity))
        self.take(conversation)
        self._kept[conversation] = prompt
        self.nbytes += prompt.nbytes
        while self.nbytes > self.capacity:
            self.take(next(iter(self._kept)))
