"""Converts the tokens of a speech language model to the codes of a codec with several codebooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

#: The codes of whole frames: int32 of shape (frames, slots), each an index into its slot's codebook.
Codes: TypeAlias = NDArray[np.int32]


class InvalidCodecToken(Exception):
    """A token that is not allowed at its position in the frame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameLayout:
    """How the tokens of a frame encode codes.

    A frame has a fixed number of slots, one token each. The token in slot ``i`` is ``first_token + i * codebook_size +
    code``, where the code is an index into codebook ``slots[i]``. Codes of the same codebook follow each other in time
    in the order of their slots: SNAC at 24 kHz has codebooks at 1, 2 and 4 codes per frame.
    """

    first_token: int
    codebook_size: int = 4096
    slots: tuple[int, ...] = (0, 1, 2, 2, 1, 2, 2)

    def __post_init__(self) -> None:
        books = sorted(set(self.slots))
        if not self.slots or books != list(range(len(books))):
            raise ValueError("slots must contain each codebook number 0, 1, … at least once")
        if self.first_token < 0 or self.codebook_size < 1:
            raise ValueError("first_token must not be negative, and codebook_size must be at least 1")

    @property
    def end_token(self) -> int:
        """The token ID after the last codec token."""
        return self.first_token + len(self.slots) * self.codebook_size

    @property
    def codes_per_frame(self) -> tuple[int, ...]:
        """The number of codes in a frame, for each codebook."""
        return tuple(self.slots.count(book) for book in range(max(self.slots) + 1))

    def tokens(self, codes: Codes) -> list[int]:
        """Return the tokens that encode ``codes``."""
        offsets = self.first_token + np.arange(len(self.slots)) * self.codebook_size
        return [int(token) for token in (codes + offsets).reshape(-1)]

    def codes(self, tokens: Sequence[int]) -> Codes:
        """Return the codes that the tokens of whole frames encode. Raises InvalidCodecToken."""
        places = np.asarray(tokens, dtype=np.int64).reshape(-1, len(self.slots)) - self.first_token
        codes = places - np.arange(len(self.slots)) * self.codebook_size
        wrong = np.argwhere((codes < 0) | (codes >= self.codebook_size))
        if len(wrong):
            frame, slot = wrong[0]
            token = int(places[frame, slot]) + self.first_token
            raise InvalidCodecToken(f"token {token} is not valid in slot {slot} of frame {frame}")
        return codes.astype(np.int32)

    def books(self, codes: NDArray[np.int32]) -> list[NDArray[np.int64]]:
        """Return the codes of each codebook in order of time.

        ``codes`` has the shape (…, frames, slots), the arrays returned (…, frames × codes per frame).
        """
        slots = np.array(self.slots)
        return [
            codes[..., slots == book].reshape(*codes.shape[:-2], -1).astype(np.int64) for book in range(max(slots) + 1)
        ]


@dataclass(frozen=True, slots=True)
class CodecFrames:
    """The next frames of a clause; ``last`` ends the clause, and may come without frames.

    Clauses are numbered from 0 within an answer. Each is decoded independently. ``text_end`` is where it ends in the
    text of the answer.
    """

    clause: int
    codes: Codes
    last: bool
    text_end: int


class FrameAssembler:
    """Collects tokens into whole frames. An incomplete frame at the end is dropped."""

    def __init__(self, layout: FrameLayout) -> None:
        self._layout = layout
        self._tokens: list[int] = []

    def feed(self, tokens: Sequence[int]) -> Codes:
        """Return the frames that ``tokens`` complete, often none. Raises InvalidCodecToken."""
        self._tokens += tokens
        whole = len(self._tokens) - len(self._tokens) % len(self._layout.slots)
        codes = self._layout.codes(self._tokens[:whole])
        del self._tokens[:whole]
        return codes
