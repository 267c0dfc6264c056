"""Log-probabilities of the tokens of an answer, each with the text that it belongs to."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omni_ws.core.chunks import TokenLogprob

if TYPE_CHECKING:
    from vllm import SamplingParams


class TokenBytes:
    """The bytes of the tokens of one tokenizer: half a character where a token is that."""

    def __init__(self, tokenizer: Any) -> None:
        import xgrammar

        self._tokenizer = tokenizer
        try:
            self._vocabulary: list[bytes] = xgrammar.TokenizerInfo.from_huggingface(tokenizer).decoded_vocab
        except (ValueError, RuntimeError):
            self._vocabulary = []  # a tokenizer of another kind, which can only be asked for text

    def __getitem__(self, token: int) -> bytes:
        if token < len(self._vocabulary):
            return self._vocabulary[token]
        text: str = self._tokenizer.decode([token])
        return text.encode()

    def logprob(self, token: int, place: Mapping[int, Any] | None, top: int) -> TokenLogprob:
        """What vLLM tells of the ``place`` of a token, with the ``top`` likeliest there. Of a first one it is None."""
        if place is None:
            return self._named(token, None)
        # The token itself is among them, also where it is not one of the likeliest.
        likeliest = sorted((one for one in place.items() if one[1].rank <= top), key=lambda one: one[1].rank)
        return self._named(
            token, place[token].logprob, tuple(self._named(other, one.logprob) for other, one in likeliest)
        )

    def _named(self, token: int, logprob: float | None, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        data = self[token]
        return TokenLogprob(data.decode("utf-8", "replace"), data, logprob, top)


class AlignedLogprobs:
    """Keeps the tokens of one answer until their text goes out.

    vLLM gives a token when it was sampled, but its text later where several tokens make one character or where a stop
    string may have begun. Where the text of each token ends is found out in the same way as vLLM does it.
    """

    def __init__(self, tokenizer: Any, data: TokenBytes, parameters: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._parameters = parameters
        self._detokenizer: Any = None
        #: Tokens that were not given out, each with the place in the answer's text where its own begins and ends.
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        self._given = 0

    def add(self, tokens: Sequence[int], places: Sequence[Mapping[int, Any]], prompt: Sequence[int]) -> None:
        """What vLLM tells of sampled tokens. ``prompt`` is what stands before the first of them."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer(prompt)
        for token, place in zip(tokens, places, strict=True):
            begins = len(self._detokenizer.output_text)
            self._detokenizer.update([token], False)
            self._waiting.append((begins, len(self._detokenizer.output_text), self._read(token, place)))

    def take(self, length: int) -> tuple[TokenLogprob, ...]:
        """The tokens that end within the next ``length`` characters of the answer."""
        self._given += length
        count = 0
        for number, (begins, ends, _) in enumerate(self._waiting, 1):
            # One that makes no character yet goes with the one that completes it.
            if begins < ends <= self._given:
                count = number
        return tuple(self._waiting.popleft()[2] for _ in range(count))

    def rest(self, *, cut: bool) -> tuple[TokenLogprob, ...]:
        """The last tokens of a finished answer; where its text was ``cut``, those that begin before the cut."""
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
