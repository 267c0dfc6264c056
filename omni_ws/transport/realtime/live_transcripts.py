"""The transcripts of a Live session: text that is never taken back, with times on the session's line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from omni_ws.core.chunks import Word
from omni_ws.core.history import UNSPACED
from omni_ws.core.ledger_entry import Clause, LedgerEntry, end_of_clauses, end_of_words, read_all

#: A word with the blanks before it; in scripts without blanks, a character.
_WORD: Final = re.compile(rf"\s*(?:[{UNSPACED}]|[^\s{UNSPACED}]+)")
#: The most text that is looked through for a word or a clause.
_WINDOW: Final = 4096


class Delta(NamedTuple):
    """New text of a transcript, and its interval in milliseconds."""

    text: str
    start_ms: float
    end_ms: float


class TranscriptLine:
    """The order of one direction's deltas: their times never go back, and none is in the future."""

    def __init__(self) -> None:
        self._begun = False
        self._start_ms = 0
        self._end_ms = 0

    def place(self, text: str, start_ms: float, end_ms: float, *, now_ms: int, joins: bool) -> Delta:
        """Return the delta of ``text``; ``joins``: it continues the text before, so no blank is put between."""
        if self._begun and not joins and not text[:1].isspace():
            text = f" {text}"
        self._begun = True
        self._start_ms = min(max(round(start_ms), self._start_ms), now_ms)
        self._end_ms = min(max(round(end_ms), self._start_ms, self._end_ms), now_ms)
        return Delta(text, self._start_ms, self._end_ms)

    @property
    def end_ms(self) -> int:
        """The end of the latest delta."""
        return self._end_ms


class HeardText:
    """The words of one request's speech: of interim texts, which the next one replaces, those that two agree on.

    What was told is never taken back: if the settled text corrects it, only the words behind it are told.
    """

    def __init__(self) -> None:
        #: Whether anything of the request was told.
        self.begun = False
        self._told = 0
        self._last: list[str] = []

    def hear(self, text: str, *, interim: bool) -> str:
        """Take a transcript of what follows the settled ones. Return the text to tell now; it may be empty."""
        words = _WORD.findall(text)
        stable = len(words)
        if interim:
            agreed = 0
            for word, before in zip(words, self._last, strict=False):
                if word.strip() != before.strip():
                    break
                agreed += 1
            stable = max(0, agreed - 1)  # the last one may not be spoken to its end
        new = "".join(words[self._told : stable])
        self._told, self._last = (max(self._told, stable), words) if interim else (0, [])
        self.begun = self.begun or bool(new)
        return new


class SpokenText:
    """The text of one answer, told as far as its sound was heard: by words, or by the place in a clause."""

    def __init__(self) -> None:
        self.begun = False
        #: Text that was not told yet, except what ``_window`` has.
        self._pieces: deque[str] = deque()
        #: The text from ``_start`` on, as far as it was needed; and where in the text telling has come to.
        self._window = ""
        self._start = 0
        self._told = 0
        self._words: deque[Word] = deque()
        self._timed = False
        #: Up to where in the answer its sound was heard, and up to where its words were told, in milliseconds.
        self._heard_ms = 0.0
        self._told_ms = 0.0

    def write(self, text: str) -> None:
        """Add text of the answer."""
        self._pieces.append(text)

    def pronounce(self, words: Sequence[Word]) -> None:
        """Add words of its sound. Those that were told are left out: the answer was held, and is sent again."""
        self._timed = self._timed or bool(words)
        last_ms = self._words[-1].end_ms if self._words else self._heard_ms
        self._words.extend(word for word in words if word.end_ms > last_ms)

    def heard(self, position_ms: float, entry: LedgerEntry | None) -> Delta | None:
        """Return the text that was heard up to this position and not told yet, with times in the answer."""
        self._heard_ms = max(self._heard_ms, position_ms)
        return self._words_until(position_ms) if self._timed else self._clauses_until(position_ms, entry)

    def rest(self) -> str:
        """Return all text that was not told, which is told then: the answer was heard to its end."""
        rest = self._window[self._told - self._start :] + "".join(self._pieces)
        self._pieces.clear()
        self._window, self._start, self._told = "", self._told + len(rest), self._told + len(rest)
        return rest

    def _words_until(self, position_ms: float) -> Delta | None:
        words = []
        while self._words and self._words[0].end_ms <= position_ms:
            words.append(self._words.popleft())
        if not words:
            return None
        self._see(max((word.text_end or 0 for word in words), default=0), self._told)
        rebased = [
            word if word.text_end is None else replace(word, text_end=max(0, word.text_end - self._start))
            for word in words
        ]
        end = self._start + end_of_words(self._window, rebased, begin=self._told - self._start)
        return self._tell(end, words[0].start_ms, words[-1].end_ms)

    def _clauses_until(self, position_ms: float, entry: LedgerEntry | None) -> Delta | None:
        clauses = entry.clauses if entry is not None else []
        first = len(clauses)
        while first and clauses[first - 1].end > self._told:
            first -= 1
        end = self._told
        for index, clause in enumerate(clauses[first:], first):
            if clause.start_ms >= position_ms:
                break
            complete = index + 1 < len(clauses) or (entry is not None and entry.finished)
            self._see(clause.end, clause.start)
            text = self._window[max(0, clause.start - self._start) : clause.end - self._start]
            part = Clause(clause.start_ms, clause.end_ms, 0, len(text))
            spoken = end_of_clauses(text, [part], position_ms, whole=complete, pace=None, read=read_all)
            end = max(end, clause.start + spoken)
        return self._tell(end, self._told_ms, position_ms)

    def _see(self, end: int, start: int) -> None:
        """Let the window reach from ``start``, or where telling has come to, to ``end`` and somewhat further."""
        start = min(start, self._told)
        self._window = self._window[max(0, start - self._start) :]
        self._start = max(self._start, start)
        while self._pieces and self._start + len(self._window) < max(end, self._told + _WINDOW):
            self._window += self._pieces.popleft()

    def _tell(self, end: int, start_ms: float, end_ms: float) -> Delta | None:
        text = self._window[self._told - self._start : end - self._start].rstrip()  # blanks are told with what follows
        self._told += len(text)
        if not text:
            return None
        self._told_ms = end_ms
        return Delta(text, start_ms, end_ms)
