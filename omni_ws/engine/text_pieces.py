"""Cuts long texts into pieces, so that work on them does not block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Self

#: The length of a piece; to cut it into clauses, or to look for stop strings, takes a few milliseconds at most.
PIECE_CHARACTERS: Final = 4096


def pieces_of(text: str, length: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield ``text`` in pieces of ``length``, in characters; nothing for an empty text."""
    for start in range(0, len(text), length):
        yield text[start : start + length]


class CooperativePieces:
    """Iterates over the pieces of a text, and lets other tasks run before each but the first."""

    # Not a generator: the event loop would close an abandoned one in a task without owner.

    def __init__(self, text: str) -> None:
        self._pieces = pieces_of(text)
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        piece = next(self._pieces, None)
        if piece is None:
            raise StopAsyncIteration
        if self._begun:
            await asyncio.sleep(0)
        self._begun = True
        return piece
