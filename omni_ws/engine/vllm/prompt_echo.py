"""PromptEcho: a prompt that is given back at the head of its answer, with the log-probabilities of its tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, Final

from omni_ws.core.chunks import TokenLogprob
from omni_ws.engine.vllm.token_logprobs import TokenBytes

#: Tokens of a piece: so many are named at a stretch.
PIECE_TOKENS: Final = 256


class PromptEcho:
    """``text`` is the prompt where it came as one; where token ids came, it is what they stand for.

    ``top`` is how many of the likeliest tokens are named at each place; None: there are no log-probabilities.
    """

    def __init__(
        self, tokenizer: Any, data: TokenBytes, tokens: Sequence[int], *, text: str | None, top: int | None
    ) -> None:
        self._data = data
        self._tokens = tokens
        self._top = top
        self._parts = [text] if text is not None and top is None else _parts(tokenizer, data, tokens, text)

    def pieces(self, told: Sequence[Mapping[int, Any] | None] | None) -> Iterator[tuple[str, tuple[TokenLogprob, ...]]]:
        """Text, and the tokens that it is made of. ``told`` is what vLLM tells of each place of the prompt."""
        if self._top is None or told is None:
            yield "".join(self._parts), ()
            return
        for start in range(0, len(self._tokens), PIECE_TOKENS):
            places = range(start, min(start + PIECE_TOKENS, len(self._tokens)))
            named = tuple(
                replace(
                    self._data.logprob(self._tokens[place], told[place], self._top),
                    data=self._parts[place].encode(),
                )
                for place in places
            )
            yield "".join(self._parts[place] for place in places), named


def _parts(tokenizer: Any, data: TokenBytes, tokens: Sequence[int], text: str | None) -> list[str]:
    """The part of the text that each token adds; a character of several tokens is added by one of them.

    Of a text, the tokenizer says where its tokens end: a mark of the beginning that it adds has no part in it.
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
