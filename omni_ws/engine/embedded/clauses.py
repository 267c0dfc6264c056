"""Text that arrives in pieces, cut into clauses that can be spoken while the rest still comes."""

from __future__ import annotations

import re

#: A clause this long may also end at a comma, colon or semicolon.
COMMA_AFTER = 60

#: No clause is longer, in characters: about 20 s of speech, which bounds what is held for one.
MAX_CLAUSE = 300

_ABBREVIATIONS = frozenset(
    [
        "mr",
        "mrs",
        "ms",
        "dr",
        "prof",
        "st",
        "jr",
        "sr",
        "vs",
        "etc",
        "no",
        "vol",
        "fig",
        "dept",
        "approx",
        "e.g",
        "i.e",
        "a.m",
        "p.m",
        "u.s",
        "inc",
        "ltd",
        "co",
        "corp",
        "gen",
        "col",
        "capt",
    ]
)
_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]|\n")
_CLAUSE_END = re.compile(r"[,;:—–]+[\"'”’)\]]*(?=\s)|[，、；：]")
_WHOLE_SENTENCE = re.compile(r"[.!?…]+[\"'”’)\]]*\s*$|[。！？]\s*$")
_LAST_WORD = re.compile(r"(\S+)$")


class ClauseSplitter:
    """Cuts only where more text cannot change the cut; ``rest`` says what to do when no more text comes for a while."""

    def __init__(self) -> None:
        self._waiting = ""

    def feed(self, text: str) -> list[str]:
        """The clauses that ``text`` completes, without the white space around them."""
        self._waiting += text
        clauses: list[str] = []
        while (end := self._next_end()) is not None:
            clauses.append(self._waiting[:end].strip())
            self._waiting = self._waiting[end:].lstrip()
        return [clause for clause in clauses if clause]

    @property
    def looks_complete(self) -> bool:
        """Whether what waits seems to be a whole sentence whose next word has not come yet."""
        ending = _WHOLE_SENTENCE.search(self._waiting)
        return ending is not None and not _is_abbreviation(self._waiting, ending.start())

    def rest(self) -> str:
        """What waits, complete or not; afterwards nothing waits."""
        waiting, self._waiting = self._waiting, ""
        return waiting.strip()

    def _next_end(self) -> int | None:
        for ending in _SENTENCE_END.finditer(self._waiting):
            if ending.end() > MAX_CLAUSE:
                break
            if not _is_abbreviation(self._waiting, ending.start()):
                return ending.end()
        for ending in _CLAUSE_END.finditer(self._waiting, COMMA_AFTER):
            if ending.end() <= MAX_CLAUSE:
                return ending.end()
        if len(self._waiting) > MAX_CLAUSE:
            space = self._waiting.rfind(" ", 1, MAX_CLAUSE)
            return space if space > 0 else MAX_CLAUSE
        return None


def split_clauses(text: str) -> list[str]:
    """The clauses of a whole text."""
    splitter = ClauseSplitter()
    clauses = splitter.feed(text)
    rest = splitter.rest()
    return [*clauses, rest] if rest else clauses


def _is_abbreviation(text: str, end: int) -> bool:
    """Whether the word before the full stop at ``end`` is one that is written with it."""
    if text[end : end + 1] != ".":
        return False
    word = _LAST_WORD.search(text, max(0, end - 20), end)
    if word is None:
        return False
    letters = word[1].lstrip("\"'“‘([").lower()
    return letters in _ABBREVIATIONS or (len(letters) == 1 and letters.isalpha() and letters not in ("i", "a"))
