"""AnswerText: the text of an answer, within the limits of its request, in pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from omni_ws.core.chunks import FinishReason
from omni_ws.engine.answer_limit import AnswerLimit, WordCounter
from omni_ws.engine.text_pieces import CooperativePieces


class AnswerText:
    """Passes on what the ``max_tokens`` and ``stop`` of ``sampling`` allow, and counts its words."""

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        self._limit = AnswerLimit(sampling)
        self._counter = WordCounter()

    @property
    def words(self) -> int:
        """The words passed on so far."""
        return self._counter.words

    @property
    def reached(self) -> FinishReason | None:
        """Why the answer was cut off; None while it is within its limits."""
        return self._limit.reached

    async def add(self, text: str) -> AsyncGenerator[str, None]:
        """Yield what may be sent now that ``text`` follows."""
        async for piece in CooperativePieces(text):
            if passed := self._counted(self._limit.feed(piece)):
                yield passed
            if self.reached is not None:
                return

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        return self._counted(self._limit.finish())

    def _counted(self, passed: str) -> str:
        self._counter.feed(passed)
        return passed
