"""Codec frames: the tokens of a speech language model as codes of a codec with several codebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: Codes of whole frames, shape (frames, slots of a frame), each within its codebook.
Codes: TypeAlias = NDArray[np.int32]


class OffPattern(Exception):
    """A token that cannot stand where it stands in its frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLayout:
    """How the tokens of one frame stand for codes.

    The token in slot ``i`` is ``first_token + i * codebook_size + code``; its code belongs to codebook ``slots[i]``.
    Codes of one codebook follow each other in time in the order of their slots.
    """

    first_token: int
    codebook_size: int = 4096
    slots: tuple[int, ...] = (0, 1, 2, 2, 1, 2, 2)

    def __post_init__(self) -> None:
        books = sorted(set(self.slots))
        if not self.slots or books != list(range(len(books))):
            raise ValueError("the slots name the codebooks 0, 1, …, each at least once")
        if self.first_token < 0 or self.codebook_size < 1:
            raise ValueError("tokens are counted from 0, and a codebook has at least one code")

    @property
    def end_token(self) -> int:
        """One past the last codec token."""
        return self.first_token + len(self.slots) * self.codebook_size

    @property
    def codes_per_frame(self) -> tuple[int, ...]:
        """How many codes of each codebook a frame has."""
        return tuple(self.slots.count(book) for book in range(max(self.slots) + 1))

    def tokens(self, codes: Codes) -> list[int]:
        offsets = self.first_token + np.arange(len(self.slots)) * self.codebook_size
        return [int(token) for token in (codes + offsets).reshape(-1)]

    def codes(self, tokens: Sequence[int]) -> Codes:
        """``tokens`` are those of whole frames. Raises OffPattern."""
        places = np.asarray(tokens, dtype=np.int64).reshape(-1, len(self.slots)) - self.first_token
        codes = places - np.arange(len(self.slots)) * self.codebook_size
        wrong = np.argwhere((codes < 0) | (codes >= self.codebook_size))
        if len(wrong):
            frame, slot = wrong[0]
            token = int(places[frame, slot]) + self.first_token
            raise OffPattern(f"token {token} stands in slot {slot} of frame {frame}")
        return codes.astype(np.int32)

    def books(self, codes: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """The codes of each codebook in time; ``codes`` is (…, frames, slots), what comes out (…, frames × codes)."""
        slots = np.array(self.slots)
        return [
            codes[..., slots == book].reshape(*codes.shape[:-2], -1).astype(np.int64) for book in range(max(slots) + 1)
        ]


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """The next frames of a clause. A clause ends with ``last``, which may come without frames.

    Clauses are numbered from 0 within a response; each is decoded by itself.
    """

    clause: int
    codes: Codes
    last: bool


class FrameAssembler:
    """Tokens as they come become whole frames; what is left at the end is no frame."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> Codes:
        """The frames that ``tokens`` complete, often none. Raises OffPattern."""
        self._tokens += tokens
        whole = len(self._tokens) - len(self._tokens) % len(self._layout.slots)
        codes = self._layout.codes(self._tokens[:whole])
        del self._tokens[:whole]
        return codes
