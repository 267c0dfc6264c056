"""AlignedTokens: the tokens of one answer, held back until their text is sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from vllm import SamplingParams

T = TypeVar("T")


class AlignedTokens(Generic[T]):
    """Holds something about each token of one answer back until its text is sent.

    vLLM reports a token when it is sampled, but its text later, if several tokens form a character or a stop string may
    have begun. The end of each token's text is determined with vLLM's own detokenizer.
    """

    def __init__(self, tokenizer: Any, parameters: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._parameters = parameters
        self._detokenizer: Any = None
        #: The tokens that were not returned, each with the start and end of its text in the answer.
        self._waiting: deque[tuple[int, int, T]] = deque()
        self._given = 0

    def add(self, tokens: Sequence[int], items: Iterable[T], prompt: Sequence[int]) -> None:
        """Add sampled tokens, with an item for each. ``prompt`` is the prompt's tokens."""
        if self._detokenizer is None:
            self._detokenizer = self._new_detokenizer(prompt)
        for token, item in zip(tokens, items, strict=True):
            begins = len(self._detokenizer.output_text)
            self._detokenizer.update([token], False)
            self._waiting.append((begins, len(self._detokenizer.output_text), item))

    def take(self, length: int) -> tuple[T, ...]:
        """Return the items of tokens that end within the next ``length`` characters of the answer."""
        self._given += length
        count = 0
        for number, (begins, ends, _) in enumerate(self._waiting, 1):
            # A token that completes no character is returned with the one that does.
            if begins < ends <= self._given:
                count = number
        return tuple(self._waiting.popleft()[2] for _ in range(count))

    def rest(self, *, cut: bool) -> tuple[T, ...]:
        """Return the items of the last tokens of the answer.

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
