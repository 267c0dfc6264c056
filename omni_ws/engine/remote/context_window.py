"""ContextWindow: how much of a history goes to an upstream whose context is limited."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

#: Tokens for each byte of UTF-8 until an upstream has counted some: more than in most texts.
_FIRST_RATE: Final = 0.3
#: Prompts of fewer bytes say more about the chat template than about the text.
_LEAST_COUNTED_BYTES: Final = 200
#: How far an estimate may be off.
_MARGIN: Final = 1.05
#: Tokens that are kept free for an answer without a limit of its own.
_RESERVE: Final = 256
#: How often one request may be sent with fewer turns; the last time without any.
MOST_TRIES: Final = 5


class ContextWindow:
    """What is known of the context of a model: told by its server, or learnt from what that refused.

    The number of tokens in a text is estimated from the upstream's own counts.
    """

    def __init__(self) -> None:
        self._told: int | None = None
        self._learnt: int | None = None
        self._rate = _FIRST_RATE

    @property
    def limit(self) -> int | None:
        """The context in tokens, for prompt and answer together; None while it is not known."""
        known = [limit for limit in (self._told, self._learnt) if limit is not None]
        return min(known, default=None)

    def tell(self, limit: int | None) -> None:
        """Take what the upstreams say now. A change makes what was learnt before void."""
        if limit != self._told:
            self._told, self._learnt = limit, None

    def count(self, tokens: int, size: int) -> None:
        """Take an upstream's count of the tokens in a prompt of text whose ``size`` is in bytes."""
        cut = self.limit is not None and tokens > 0.9 * self.limit  # Ollama cuts, and counts what is left
        if size >= _LEAST_COUNTED_BYTES and not cut:
            self._rate = tokens / size

    def refuse(self, limit: int | None, tokens: int | None, size: int) -> None:
        """Take a refusal of a prompt of ``size`` bytes, with the numbers that it names."""
        if limit is not None:
            self._learnt = limit
        if tokens is not None and size >= _LEAST_COUNTED_BYTES:
            self._rate = tokens / size

    def left_out(self, turns: Sequence[int], *, fixed: int, answer: int | None) -> int:
        """Return how many of the oldest turns have to be left out.

        ``turns`` are the sizes of the turns, ``fixed`` is that of all that has to stay, both in bytes; ``answer`` is
        the limit of the answer in tokens.
        """
        if self.limit is None:
            return 0
        room = self.limit - min(answer or _RESERVE, self.limit // 2)
        size = fixed + sum(turns)
        for count, turn in enumerate(turns):
            if size * self._rate * _MARGIN <= room:
                return count
            size -= turn
        return len(turns)

    def left_out_next(self, tried: int, turns: Sequence[int], *, fixed: int, answer: int | None, attempt: int) -> int:
        """Return how many turns to leave out after ``tried`` were too few.

        ``attempt`` is the number of the try that was refused, counted from 1.
        """
        if attempt >= MOST_TRIES - 1:
            return len(turns)
        half = tried + max(1, (len(turns) - tried) // 2)
        estimated = self.left_out(turns, fixed=fixed, answer=answer)
        return max(tried + 1, estimated) if self.limit is not None and estimated > tried else half
