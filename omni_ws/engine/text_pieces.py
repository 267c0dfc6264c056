"""Long texts, a piece at a time, so that others have their turn in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final, Self

#: Work on so many characters takes less than a millisecond.
PIECE_CHARACTERS: Final = 4096


def pieces_of(text: str) -> Iterator[str]:
    """``text``, cut every ``PIECE_CHARACTERS``; nothing where it is empty."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        yield text[start : start + PIECE_CHARACTERS]


class InTurns:
    """Iterates over the pieces of a text; the event loop runs what else waits before each but the first."""

    # No generator: one that is left in the middle would be closed by a task that nobody owns.

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
