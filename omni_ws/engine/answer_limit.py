"""Limits on answers: ``max_tokens`` and ``stop`` of engines without tokens, and the length of spoken answers."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

from omni_ws.core.chunks import FinishReason
from omni_ws.core.history import Message
from omni_ws.engine.clauses import CooperativePieces

_WORDS: Final = re.compile(r"\S+")
#: The limit on white space held back after the last word, in characters; further white space is dropped.
MAX_HELD_SPACE: Final = 4096
#: The end of a sentence: marks, closing quotes and white space; or line breaks; or East Asian marks.
_SENTENCE_END: Final = re.compile(r"[.!?…]+[\"'”’)\]]*\s+|\n+|[。！？]+[」』”’）]*")
_CLAUSE_END: Final = re.compile(r"[,;:—–]\s+|[，、；：]")
#: Characters of scripts without spaces, each of which is about a token. In English a token has about 4 characters.
_WIDE: Final = "\u1100-\u11ff\u2e80-\ud7ff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff"
_CHARACTERS_PER_TOKEN: Final = 4
#: A word, or a character of these scripts, with the white space before it.
_UNIT: Final = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)|\s+")


def count_words(text: str) -> int:
    """Return the number of whitespace-separated words, the usage that engines without tokens report."""
    return len(text.split())


def count_history(history: Sequence[Message]) -> int:
    """Return the number of words in the messages of a conversation; see ``count_words``."""
    return sum(count_words(message.text) for message in history)


class WordCounter:
    """A counter of the words in a text that arrives in pieces, which may be cut within words."""

    def __init__(self) -> None:
        self.words = 0
        self._inside_word = False

    def feed(self, text: str) -> None:
        """Count the words in the next piece of the text."""
        if text:
            continues = self._inside_word and not text[0].isspace()
            self.words += count_words(text) - continues
            self._inside_word = not text[-1].isspace()


class AnswerText:
    """A filter of an answer's text, in pieces, that cuts it at ``max_tokens`` or a stop string, and counts its words.

    ``max_tokens`` counts whitespace-separated words. Stop strings are removed, even across pieces: text that may be the
    beginning of a stop string is held back until the next piece. White space after the last word allowed is held back
    too, because it belongs to the answer only if no further word follows.

    ``sampling`` are the sampling parameters of the request; only ``max_tokens`` and ``stop`` have an effect.
    """

    def __init__(self, sampling: Mapping[str, Any]) -> None:
        stop = sampling.get("stop") or []
        self._stops: list[str] = [text for text in ([stop] if isinstance(stop, str) else stop) if text]
        self._words_left: int | None = sampling.get("max_tokens")
        self._held = ""
        self._space = ""
        self._inside_word = False
        self._passed = WordCounter()
        #: Why the answer was cut off; None while it is within its limits.
        self.reached: FinishReason | None = None

    @property
    def words(self) -> int:
        """The number of words passed on so far."""
        return self._passed.words

    async def add(self, text: str) -> AsyncGenerator[str, None]:
        """Add ``text``, and yield what may be sent now; other tasks run between the pieces of a long text."""
        async for piece in CooperativePieces(text):
            if passed := self.feed(piece):
                yield passed
            if self.reached is not None:
                return

    def feed(self, text: str) -> str:
        """Add ``text``; return the text that may be sent now."""
        passed = self._fed(text)
        self._passed.feed(passed)
        return passed

    def finish(self) -> str:
        """End the answer, and return the text that was held back."""
        if self.reached is not None:
            return ""
        held, self._held = self._held, ""
        passed = self._within_length(held)
        passed = passed if self.reached is not None else passed + self._space
        self._passed.feed(passed)
        return passed

    def _fed(self, text: str) -> str:
        if self.reached is not None:
            return ""
        text = self._held + text
        self._held = ""
        # The stop string that ends first wins, so that the result does not depend on the pieces.
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

    def _within_length(self, text: str) -> str:
        """Return the beginning of ``text`` that the limit on words allows."""
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


class SpokenLimit:
    """A limit of about ``tokens`` on a spoken answer that arrives in pieces: it ends the answer after a whole sentence.

    Tokens are estimated, at least one for each word. After half of the limit, text is passed on in whole sentences,
    because only the end of a sentence shows whether the sentence fits. The listener does not notice this delay: by then
    the text is far ahead of the voice.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = 0
        #: Whether the answer was cut off.
        self.reached = False
        self._most = tokens
        self._held = ""

    def passes(self, text: str) -> bool:
        """Whether this piece may be passed on unchanged, and needs only ``count``, which is cheaper than ``feed``."""
        return self.tokens + len(text) < self._most // 2 and not self._held

    def count(self, text: str) -> None:
        """Count a piece that is passed on unchanged."""
        for unit in _UNIT.finditer(text):
            self.tokens += _tokens(unit[0])

    def feed(self, text: str) -> str:
        """Count a piece, and return the text that may be spoken now."""
        passed: list[str] = []
        for unit in _UNIT.finditer(text):
            if self.reached:
                break
            free = self.tokens < self._most // 2 and not self._held
            self.tokens += _tokens(unit[0])
            if self.tokens > self._most:
                self.reached = True
                passed.append(self.finish(cut=True))
            elif free:
                passed.append(unit[0])
            else:
                self._held += unit[0]
        end = _last_end(_SENTENCE_END, self._held)
        passed.append(self._held[:end])
        self._held = self._held[end:]
        return "".join(passed)

    def finish(self, *, cut: bool) -> str:
        """Return the text held back, at the end of the answer; if that was ``cut`` off, up to the last sentence end."""
        held, self._held = self._held, ""
        if not cut:
            return held
        # A sentence that is longer than half of the limit is cut at the end of a clause, or at the last word.
        ends = (_last_end(kind, f"{held} ") for kind in (_SENTENCE_END, _CLAUSE_END))
        return held[: next(filter(None, ends), len(held))].rstrip()


def _tokens(unit: str) -> int:
    length = len(unit.lstrip())
    return max(1, length // _CHARACTERS_PER_TOKEN) if length else 0


def _last_end(kind: re.Pattern[str], text: str) -> int:
    """Return the end of the last match of ``kind``; 0 if there is none."""
    return max((found.end() for found in kind.finditer(text)), default=0)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of ``text`` that is a proper prefix of ``stop``."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0
