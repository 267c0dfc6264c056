"""PromptEcho: the prompt as the beginning of its answer, with the log-probabilities of its tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from omni_ws.core.chunks import TokenLogprob
from omni_ws.engine.vllm.token_logprobs import TokenBytes

#: The number of tokens in a piece.
PIECE_TOKENS: Final = 256


class PromptEcho:
    """Splits a prompt into pieces of text with their tokens.

    ``text`` is the prompt if it was given as text; a prompt of token IDs is decoded. ``top`` is the number of most
    probable tokens to report for each position; None reports no log-probabilities.
    """

    def __init__(
        self, tokenizer: Any, data: TokenBytes, tokens: Sequence[int], *, text: str | None, top: int | None
    ) -> None:
        self._data = data
        self._tokens = tokens
        self._top = top
        self._parts = [text] if text is not None and top is None else _parts(tokenizer, data, tokens, text)

    def pieces(
        self, entries: Sequence[Mapping[int, Any] | None] | None
    ) -> Iterator[tuple[str, tuple[TokenLogprob, ...]]]:
        """Yield pieces of text with their tokens. ``entries`` is vLLM's ``prompt_logprobs``."""
        if self._top is None or entries is None:
            yield "".join(self._parts), ()
            return
        for start in range(0, len(self._tokens), PIECE_TOKENS):
            places = range(start, min(start + PIECE_TOKENS, len(self._tokens)))
            named = tuple(
                replace(
                    self._data.logprob(self._tokens[place], entries[place], self._top),
                    data=self._parts[place].encode(),
                )
                for place in places
            )
            yield "".join(self._parts[place] for place in places), named


def _parts(tokenizer: Any, data: TokenBytes, tokens: Sequence[int], text: str | None) -> list[str]:
    """Return the text that each token contributes; a character of several tokens belongs to one of them.

    Given ``text``, the tokenizer knows where its tokens end; special tokens that it adds contribute nothing.
    """
    if text is not None and tokenizer.is_fast:
        encoded = tokenizer(text, return_offsets_mapping=True)
        ends = [*accumulate((end for _, end in encoded["offset_mapping"]), max, initial=0)]
        ends[-1] = len(text)
        return [text[start:end] for start, end in pairwise(ends)]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    parts = [decoder.decode(data[token]) for token in tokens]
    parts[-1] += decoder.decode(b"", True)
    return parts
