"""The words of a text with their times, from what espeak-ng tells while it speaks. Standard library only."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from omni_ws.engine.tts.synthesiser import SpokenWord

_TOKEN: Final = re.compile(r"[^\s—…]+")
_OPENING: Final = "\"'`({[“‘«¿¡「『（"
_CLOSING: Final = "\"'`.,:;!?)}]”’»、。，；：！？」』）"


@dataclass(slots=True)
class _OpenWord:
    token_end: int
    first: int
    start_ms: int
    #: Where a pause began with which it may have ended; None while it sounds.
    silent_from_ms: int | None = None


class WordTimes:
    """One text's; each method takes the milliseconds from the start of its audio.

    A word is what stands between white space, without the punctuation around it, or one letter of a script that is
    written without spaces. Where espeak-ng begins a word is only taken as a place in the text: it begins several in a
    number ("21" is two, "3.5" three, all at places inside it), and how long it says they are is often wrong.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        tokens = [match.span() for match in _TOKEN.finditer(text)]
        self._starts = [start for start, _ in tokens]
        self._ends = [end for _, end in tokens]
        self._word: _OpenWord | None = None

    def begins(self, position: int, at_ms: int) -> SpokenWord | None:
        """At the character at ``position`` something begins. Returns the word that ended there."""
        if not self._starts:
            return None
        token = max(0, bisect_right(self._starts, position) - 1)
        if position >= self._ends[token]:
            token = min(token + 1, len(self._starts) - 1)
        start, end = self._starts[token], self._ends[token]
        word = self._word
        first = start
        if word is not None and word.token_end == end:
            if not (word.first < position < end and unicodedata.category(self._text[position]) == "Lo"):
                word.silent_from_ms = None
                return None
            first = position
        ended = self.ends(at_ms, before=first)
        self._word = _OpenWord(end, first, at_ms)
        return ended

    def sounds(self) -> None:
        if self._word is not None:
            self._word.silent_from_ms = None

    def pauses(self, at_ms: int) -> None:
        if self._word is not None and self._word.silent_from_ms is None:
            self._word.silent_from_ms = at_ms

    def ends(self, at_ms: int, *, before: int | None = None) -> SpokenWord | None:
        """The word under way ends here, or where the pause before began. Returns it if any of it was to be heard."""
        word, self._word = self._word, None
        if word is None:
            return None
        end_ms = at_ms if word.silent_from_ms is None else word.silent_from_ms
        if end_ms <= word.start_ms:
            return None
        last = word.token_end if before is None or before <= word.first else min(before, word.token_end)
        text = self._text[word.first : last]
        return SpokenWord(text.lstrip(_OPENING).rstrip(_CLOSING) or text, word.start_ms, end_ms)
