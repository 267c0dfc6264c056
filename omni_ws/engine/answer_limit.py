"""``max_tokens`` and ``stop`` for engines that write their answers without a tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from omni_ws.core.chunks import FinishReason

_WORDS: Final = re.compile(r"\S+")
#: Space behind the last word that there may be; what is longer is cut.
MAX_HELD_SPACE: Final = 4096


def count_words(text: str) -> int:
    """Whitespace-separated words: what engines without tokens report as usage."""
    return len(text.split())


class WordCounter:
    """Counts whitespace-separated words in a text that comes in pieces, wherever those are cut."""

    def __init__(self) -> None:
        self.words = 0
        self._inside_word = False

    def feed(self, text: str) -> None:
        if text:
            continues = self._inside_word and not text[0].isspace()
            self.words += count_words(text) - continues
            self._inside_word = not text[-1].isspace()


class AnswerLimit:
    """Passes an answer on, piece by piece, up to its limit.

    ``max_tokens`` counts whitespace-separated words. A stop string is not passed on, wherever the pieces are cut:
    what might be the beginning of one is held back until the next piece decides, and so is the space behind the last
    word that there may be.
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        stop = sampling.get("stop") or []
        self._stops: list[str] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self._words_left: int | None = sampling.get("max_tokens")
        self._held = ""
        self._space = ""
        self._inside_word = False
        #: Set once nothing more may be passed on.
        self.reached: FinishReason | None = None

    def feed(self, text: str) -> str:
        """What may be passed on now."""
        if self.reached is not None:
            return ""
        text = self._held + text
        self._held = ""
        # The stop string that is complete first counts: the pieces that follow could not undo it.
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            passed = self._within_length(text[: min(found)[1]])
            if self.reached is None:
                passed += self._space
                self.reached = FinishReason.STOP
            return passed
        if self._stops:
            keep = max(_overlap(text, stop) for stop in self._stops)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return self._within_length(text)

    def finish(self) -> str:
        """The end of the answer: what was held back was no stop string."""
        if self.reached is not None:
            return ""
        held, self._held = self._held, ""
        passed = self._within_length(held)
        return passed if self.reached is not None else passed + self._space

    def _within_length(self, text: str) -> str:
        if self._words_left is None or not text:
            return text
        position = 0
        for word in _WORDS.finditer(text):
            if word.start() > 0 or not self._inside_word:
                if self._words_left == 0:
                    self.reached = FinishReason.LENGTH
                    return text[:position]
                self._words_left -= 1
            position = word.end()
        self._inside_word = not text[-1].isspace()
        if self._words_left == 0:
            self._space = (self._space + text[position:])[:MAX_HELD_SPACE]
            text = text[:position]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``, which is not whole in it."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
