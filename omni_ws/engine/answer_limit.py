"""AnswerLimit: applies ``max_tokens`` and ``stop`` for engines without a tokenizer, which count words as tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from omni_ws.core.chunks import FinishReason

_WORDS: Final = re.compile(r"\S+")
#: The limit on white space held back after the last word, in characters; the rest is dropped.
MAX_HELD_SPACE: Final = 4096


def count_words(text: str) -> int:
    """Return the number of whitespace-separated words, the usage that engines without tokens report."""
    return len(text.split())


class WordCounter:
    """Counts the words of a text that arrives in pieces, which may be cut within words."""

    def __init__(self) -> None:
        self.words = 0
        self._inside_word = False

    def feed(self, text: str) -> None:
        """Count the next piece."""
        if text:
            continues = self._inside_word and not text[0].isspace()
            self.words += count_words(text) - continues
            self._inside_word = not text[-1].isspace()


class AnswerLimit:
    """Cuts an answer, which is fed in pieces, at ``max_tokens`` or at a stop string.

    ``max_tokens`` counts whitespace-separated words. Stop strings are removed, even when they span pieces: text that
    may be the beginning of one is held back until the next piece decides. White space after the last word allowed is
    held back too, because it is only part of the answer if that ends there by itself.

    ``sampling`` are the parameters of the request, of which ``max_tokens`` and ``stop`` are used.
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        stop = sampling.get("stop") or []
        self._stops: list[str] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self._words_left: int | None = sampling.get("max_tokens")
        self._held = ""
        self._space = ""
        self._inside_word = False
        #: Why the answer was cut off; None while it is within its limits.
        self.reached: FinishReason | None = None

    def feed(self, text: str) -> str:
        """Return the text that may be sent now."""
        if self.reached is not None:
            return ""
        text = self._held + text
        self._held = ""
        # The stop string that is completed first wins, so that the result does not depend on the pieces.
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
        """End the answer; returns the text that was held back."""
        if self.reached is not None:
            return ""
        held, self._held = self._held, ""
        passed = self._within_length(held)
        return passed if self.reached is not None else passed + self._space

    def _within_length(self, text: str) -> str:
        """Return as much of ``text`` as the limit on words allows."""
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
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
