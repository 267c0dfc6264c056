"""What an engine is that works on token lists: it computes what a session holds, and goes on writing it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

from omni_ws.core.token_ranges import TokenRanges
from omni_ws.core.token_session import TokenImage, VisionTokens

#: How many of the likeliest tokens an engine names at most.
MAX_TOP_LOGPROBS: Final = 20
NOWHERE: Final = TokenRanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """``top_k`` 0 = all. ``stop_token_ids`` come on top of the model's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGeneration:
    """One call. ``tokens`` is the whole list and belongs to the session, which lengthens it: copy what is kept.

    ``max_tokens`` may be 0, which computes the list and decodes nothing.
    """

    request_id: str
    tokens: Sequence[int]
    images: tuple[TokenImage, ...]
    max_tokens: int
    sampling: TokenSampling = TokenSampling()
    logprob_ranges: TokenRanges = NOWHERE
    logprob_top_k: int = 0
    readout_ranges: TokenRanges = NOWHERE
    priority: int = 0
    #: The name of the API key that asks; what is cached for one is not shared with another.
    owner: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """A token of the list that a range covers, or one that was decoded.

    ``readout`` holds layers times concepts numbers, layer by layer; empty where none was asked for. ``logprobs`` are
    the likeliest tokens at this position, the likeliest first; ``logprob`` is that of the token itself.
    """

    id: int
    position: int
    is_prefill: bool
    readout: Sequence[float] = ()
    logprobs: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None


class TokenStop(Enum):
    EOS = "eos"
    LENGTH = "length"
    #: The session was closed meanwhile; no engine says so.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokensFinished:
    """The last output of a call."""

    reason: TokenStop


TokenEvent: TypeAlias = TokenOutput | TokensFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutManifest:
    """What the numbers of a readout mean. Empty where readouts are turned off."""

    concepts: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: str = ""


class TokenEngine(Protocol):
    """``tokens`` of an engine whose capabilities say ``token_sessions``, from when it has started."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def vision_tokens(self) -> VisionTokens | None: ...

    @property
    def readout_manifest(self) -> ReadoutManifest: ...

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        """Raises InvalidValue for an image that cannot be decoded, or whose number of features is not the model's."""
        ...

    def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        """An async generator: tokens of the list that a range covers, in order; every decoded token; TokensFinished.

        Decoded tokens come as they are written, one with a readout once its own position was computed. Closing it
        aborts the call. Raises as ``Engine.generate`` does; ContextLengthExceeded before the first output.
        """
        ...


class HasTokens(Protocol):
    """What such an engine has besides being an Engine."""

    @property
    def tokens(self) -> TokenEngine: ...
