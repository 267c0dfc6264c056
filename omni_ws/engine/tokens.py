"""The contract of engines for token sessions: they process token lists and continue them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeAlias

from omni_ws.core.token_session import TokenImage, TokenRanges, VisionTokens

#: The limit on ``TokenGeneration.logprob_top_k``.
MAX_TOP_LOGPROBS: Final = 20
NOWHERE: Final = TokenRanges()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSampling:
    """Sampling parameters. ``top_k`` 0 disables it; ``stop_token_ids`` are added to the model's own."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGeneration:
    """One call to continue a token list.

    ``tokens`` is the whole list. It belongs to the session, which appends decoded tokens to it, so an engine copies
    what it keeps. With ``max_tokens`` 0 the list is computed without decoding. The ranges select the positions whose
    log-probabilities and readouts are reported.
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
    #: The name of the client's API key. Caches must not be shared between owners.
    owner: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOutput:
    """A decoded token, or one of the list that a range selects.

    ``readout`` has layers × concepts numbers, layer by layer; it is empty unless selected. ``logprobs`` are the most
    probable tokens at this position, in descending order, ``logprob`` is that of the token itself.
    """

    id: int
    position: int
    is_prefill: bool
    readout: Sequence[float] = ()
    logprobs: tuple[tuple[int, float], ...] = ()
    logprob: float | None = None


class TokenStop(Enum):
    """Why a call ended."""

    EOS = "eos"
    LENGTH = "length"
    #: The session was closed; reported by the server, not by engines.
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class TokensFinished:
    """The last output of a call."""

    reason: TokenStop


TokenEvent: TypeAlias = TokenOutput | TokensFinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutManifest:
    """The meaning of the numbers in a readout. Empty where readouts are disabled."""

    concepts: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    hidden_size: int = 0
    dtype: str = ""


class TokenEngine(Protocol):
    """The interface of ``HasTokens.tokens``; usable once the engine has started."""

    @property
    def max_model_len(self) -> int:
        """The longest list that the model processes, in tokens."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """The number of token IDs."""
        ...

    @property
    def vision_tokens(self) -> VisionTokens | None:
        """The IDs that form a vision block; None for models without images."""
        ...

    @property
    def readout_manifest(self) -> ReadoutManifest:
        """What readouts contain."""
        ...

    async def check_images(self, images: Sequence[TokenImage]) -> None:
        """Check images.

        Raises InvalidValue for one that cannot be decoded, or has another number of features than the model computes
        for it.
        """
        ...

    def generate_tokens(self, generation: TokenGeneration) -> AsyncIterator[TokenEvent]:
        """Continue a token list: an async generator that ends with one TokensFinished.

        It yields the selected tokens of the list, in order, then each decoded token; one with a readout after its own
        position has been computed. Closing the generator aborts the call. Raises as ``Engine.generate`` does, and
        ContextLengthExceeded before the first output.
        """
        ...


class HasTokens(Protocol):
    """An engine with ``EngineCapabilities.token_sessions``."""

    @property
    def tokens(self) -> TokenEngine:
        """Its interface for token sessions."""
        ...
