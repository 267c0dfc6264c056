"""Log-probabilities of an answer's tokens, aligned with the text that they belong to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omni_ws.core.chunks import TokenLogprob
from omni_ws.engine.vllm.aligned_tokens import AlignedTokens

if TYPE_CHECKING:
    from vllm import SamplingParams


class TokenBytes:
    """The bytes of a tokenizer's tokens, which may be parts of characters."""

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._tokenizer = tokenizer
        try:
            self._vocabulary: list[bytes] = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
        except (ValueError, RuntimeError):
            self._vocabulary = []  # an unsupported tokenizer, which can only decode to text

    def __getitem__(self, token: int) -> bytes:
        if token < len(self._vocabulary):
            return self._vocabulary[token]
        text: str = self._tokenizer.decode([token])
        return text.encode()

    def logprob(self, token: int, place: Mapping[int, Any] | None, top: int) -> TokenLogprob:
        """Return a token with its log-probability and the ``top`` most probable ones.

        ``place`` is vLLM's entry for its position; None for the first token of a prompt.
        """
        if place is None:
            return self._named(token, None)
        # vLLM's entry also contains the token itself, whatever its rank.
        likeliest = sorted((one for one in place.items() if one[1].rank <= top), key=lambda one: one[1].rank)
        return self._named(
            token, place[token].logprob, tuple(self._named(other, one.logprob) for other, one in likeliest)
        )

    def _named(self, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self[token]
        return TokenLogprob(data.decode("utf-8", "replace"), data, logprob, top)


class AlignedLogprobs:
    """The tokens of one answer with their log-probabilities, held back until their text is sent."""

    def __init__(self, tokenizer: Any, data: TokenBytes, parameters: SamplingParams) -> None:
        self._data = data
        self._top = parameters.logprobs or 0
        self._aligned = AlignedTokens[TokenLogprob](tokenizer, parameters)
        self.take = self._aligned.take
        self.rest = self._aligned.rest

    def add(self, tokens: Sequence[int], places: Sequence[Mapping[int, Any]], prompt: Sequence[int]) -> None:
        """Add sampled tokens with vLLM's log-probabilities. ``prompt`` is the prompt's tokens."""
        named = [self._data.logprob(token, place, self._top) for token, place in zip(tokens, places, strict=True)]
        self._aligned.add(tokens, named, prompt)
