"""What the parts of an omni model hand on: rows from Thinker to Talker, codes from Talker to vocoder."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The next tokens of the prompt.

    ``tokens`` (n,) int64 and ``positions`` (3, n) int64, the Thinker's M-RoPE positions, are those of the whole prompt
    in order, including turns that the Talker does not read. ``hidden`` (k, hidden size) float32 holds the Thinker's
    states of the tokens that ``states`` (n,) bool marks: all of them for Qwen2.5, for Qwen3 those of audio, images
    and video.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    states: NDArray[np.bool_]
    hidden: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptReset:
    """The prompt begins anew: what came of it so far does not count."""


@dataclass(frozen=True, slots=True)
class AnswerRows:
    """The next tokens of the answer that are to be spoken, in order; the first item of this kind ends the prompt.

    ``tokens`` (n,) int64; ``hidden`` (n, hidden size) float32 for Qwen2.5, (0, hidden size) for Qwen3, whose Talker
    needs no states of the answer. The token that ends the answer is not among them.
    """

    tokens: NDArray[np.int64]
    hidden: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """No more rows follow."""


#: What a Talker reads.
TalkerItem = PromptRows | PromptReset | AnswerRows | AnswerEnd


class CodesEnd(StrEnum):
    """Why a Talker ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Codes:
    """The next codec frames: ``codes`` (n, codebooks) int64, one codebook for Qwen2.5 and 16 for Qwen3.

    ``end`` is set on the last item, which may be empty. ``rows_used`` is the number of answer rows that the Talker has
    read so far.
    """

    codes: NDArray[np.int64]
    end: CodesEnd | None = None
    rows_used: int = 0


@dataclass(frozen=True, slots=True)
class VocoderInput:
    """Codes to be decoded now: ``codes`` (n, codebooks) int64; ``last`` with the last of the answer."""

    codes: NDArray[np.int64]
    last: bool = False


@dataclass(frozen=True, slots=True)
class VocoderOutput:
    """Samples (n,) float32 that no later code changes, of ``frames`` codec frames; may be empty.

    There is one for each VocoderInput, in order.
    """

    samples: NDArray[np.float32]
    frames: int
