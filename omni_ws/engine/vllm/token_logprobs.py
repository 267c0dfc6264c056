"""Log-probabilities of an answer's tokens, aligned with the text that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_ws.core.chunks import TokenLogprob

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
    """Holds the tokens of one answer back until their text is sent.

    vLLM reports a token when it is sampled, but its text later, if several tokens form a character or a stop string may
    have begun. The end of each token's text is determined with vLLM's own detokenizer.
    """

    def __init__(self, tokenizer: Any, data: TokenBytes, parameters: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._parameters = parameters
        self._detokenizer: Any = None
        #: The tokens that were not returned, each with the start and end of its text in the answer.
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        self._given = 0

    def add(self, tokens: Sequence[int], places: Sequence[Mapping[int, Any]], prompt: Sequence[int]) -> None:
        """Add sampled tokens with vLLM's log-probabilities. ``prompt`` is the prompt's tokens."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer(prompt)
        for token, place in zip(tokens, places, strict=True):
            begins = len(self._detokenizer.output_text)
            self._detokenizer.update([token], False)
            self._waiting.append((begins, len(self._detokenizer.output_text), self._read(token, place)))

    def take(self, length: int) -> tuple[TokenLogprob, ...]:
        """Return the tokens that end within the next ``length`` characters of the answer."""
        self._given += length
        count = 0
        for number, (begins, ends, _) in enumerate(self._waiting, 1):
            # A token that completes no character is returned with the one that does.
            if begins < ends <= self._given:
                count = number
        return tuple(self._waiting.popleft()[2] for _ in range(count))

    def rest(self, *, cut: bool) -> tuple[TokenLogprob, ...]:
        """Return the last tokens of the answer.

        If a stop string ``cut`` its text, those that begin before the cut.
        """
        rest = tuple(one for begins, _, one in self._waiting if not cut or begins < self._given)
        self._waiting.clear()
        return rest

    def _new_detokenizer(self, prompt: Sequence[int]) -> Any:
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        parameters = self._parameters.clone()
        parameters.stop = []
        request = SimpleNamespace(
            request_id="", sampling_params=parameters, prompt_token_ids=list(prompt), prompt_embeds=None
        )
        return IncrementalDetokenizer.from_new_request(self._tokenizer, request)  # type: ignore[arg-type,unused-ignore]

    def _read(self, token: int, place: Mapping[int, Any]) -> TokenLogprob:
        return self._data.logprob(token, place, self._parameters.logprobs or 0)
