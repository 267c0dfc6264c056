"""ThoughtFilter: separates what a reasoning model thinks, written into the text of its answer, from what it answers."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

_OPEN: Final = "<think>"
_CLOSE: Final = "</think>"
#: White space before the first word, in characters, that is held back because a thought may follow it.
_MOST_HELD: Final = 64


class _Place(Enum):
    """``BEGINNING`` → ``THOUGHT`` → ``GAP`` → ``ANSWER``; without a thought ``BEGINNING`` → ``ANSWER``."""

    BEGINNING = auto()
    THOUGHT = auto()
    #: Between the thought and the first word of the answer.
    GAP = auto()
    ANSWER = auto()


class ThoughtFilter:
    """Takes ``<think>…</think>`` at the beginning of a text that arrives in pieces, cut anywhere.

    Later in the text the same words are part of the answer. The white space around the thought goes with it. Takes time
    linear in the length of the text; holds back less than a tag, or ``_MOST_HELD``.
    """

    def __init__(self) -> None:
        self._place = _Place.BEGINNING
        self._held = ""

    def feed(self, text: str) -> tuple[str, str]:
        """Return what the next piece adds to the thought and to the answer."""
        if self._place is _Place.ANSWER:
            return "", text
        text, self._held = self._held + text, ""
        thought = ""
        if self._place is _Place.BEGINNING:
            text = self._begin(text)
        if self._place is _Place.THOUGHT:
            thought, text = self._think(text)
        if self._place is _Place.GAP:
            text = text.lstrip()
            if text:
                self._place = _Place.ANSWER
        return thought, text

    def finish(self) -> tuple[str, str]:
        """Return the rest of the thought and of the answer, at the end of the text."""
        held, self._held = self._held, ""
        return (held, "") if self._place is _Place.THOUGHT else ("", held)

    def _begin(self, text: str) -> str:
        bare = text.lstrip()
        if len(text) - len(bare) <= _MOST_HELD:
            if bare.startswith(_OPEN):
                self._place = _Place.THOUGHT
                return bare[len(_OPEN) :]
            if _OPEN.startswith(bare):
                self._held = text
                return ""
        self._place = _Place.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        end = text.find(_CLOSE)
        if end >= 0:
            self._place = _Place.GAP
            return text[:end], text[end + len(_CLOSE) :]
        kept = next(size for size in range(len(_CLOSE) - 1, -1, -1) if text.endswith(_CLOSE[:size]))
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], ""
