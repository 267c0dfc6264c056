"""Text that arrives in pieces, cut into clauses that can be spoken while the rest still comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

#: Text that seems to be a whole sentence is spoken when no more has come for so many seconds.
SENTENCE_GRACE = 0.15

#: A clause this long may also end at a comma, colon or semicolon.
COMMA_AFTER = 60

#: No clause is longer, in characters: about 20 s of speech, which bounds what is held for one.
MAX_CLAUSE = 300

_ABBREVIATIONS: Final = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "rev", "hon", "gen", "col", "capt", "sgt", "lt"),
        *("st", "mt", "jr", "sr", "ph.d", "inc", "ltd", "co", "corp", "dept", "vs", "etc", "approx"),
    )
)
#: Abbreviations only in front of a number: "No. 5" is one, "No. I did not." are two sentences.
_BEFORE_NUMBERS: Final = frozenset(("no", "vol", "fig", "pp", "ch", "sec", "eq"))
_INITIALS: Final = re.compile(r"(?:[a-z]\.)+[a-z]")
_NUMBERING: Final = re.compile(r"\d{1,3}")

_END: Final = re.compile(
    r"(?P<sentence>[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]|\n)|(?P<clause>[,;:—–]+[\"'”’)\]]*(?=\s)|[，、；：])"
)
_WHOLE_SENTENCE: Final = re.compile(r"[.!?…]+[\"'”’)\]]*\s*$|[。！？]\s*$")
_LAST_WORD: Final = re.compile(r"(\S+)$")


class ClauseSplitter:
    """Cuts only where more text cannot change the cut; ``rest`` says what to do when no more text comes for a while.

    The first clause may have limits of its own, in characters, so that speech begins early: it may end at a comma
    after ``first_comma_after``, and where there is none it ends before the word that makes it longer than
    ``first_longest``. How the text is cut into pieces changes nothing.
    """

    def __init__(self, *, first_comma_after: int = COMMA_AFTER, first_longest: int = MAX_CLAUSE) -> None:
        self._waiting = ""
        self._comma_after = first_comma_after
        self._longest = first_longest

    def feed(self, text: str) -> list[str]:
        """The clauses that ``text`` completes, without the white space around them."""
        self._waiting = (self._waiting + text).lstrip()
        clauses: list[str] = []
        while (end := self._next_end()) is not None:
            clauses.append(self._waiting[:end].strip())
            self._waiting = self._waiting[end:].lstrip()
            self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return clauses

    @property
    def looks_complete(self) -> bool:
        """Whether what waits seems to be a whole sentence whose next word has not come yet."""
        ending = _WHOLE_SENTENCE.search(self._waiting)
        return ending is not None and not _is_abbreviation(_word_before(self._waiting, ending.start()))

    def rest(self) -> str:
        """What waits, complete or not; afterwards nothing waits."""
        waiting, self._waiting = self._waiting, ""
        return waiting.strip()

    def _next_end(self) -> int | None:
        for ending in _END.finditer(self._waiting):
            if ending.end() > self._longest:
                break
            if ending["clause"] is not None:
                if ending.start() >= self._comma_after:
                    return ending.end()
                continue
            word = _word_before(self._waiting, ending.start())
            if _is_abbreviation(word) or _NUMBERING.fullmatch(self._waiting, 0, ending.start()):
                continue
            if word in _BEFORE_NUMBERS:
                following = self._waiting[ending.end() :].lstrip()
                if not following:
                    return None
                if following[0].isdigit():
                    continue
            return ending.end()
        if len(self._waiting) > self._longest:
            space = self._waiting.rfind(" ", 1, self._longest + 1)
            return space if space > 0 else self._longest
        return None


async def clauses_as_they_come(
    source: AsyncIterator[str], splitter: ClauseSplitter, *, grace_sec: float = SENTENCE_GRACE
) -> AsyncGenerator[str, None]:
    """The clauses of a text whose pieces ``source`` yields, the last one at its end. Close it when leaving early.

    What seems to be a whole sentence does not wait for the next word longer than ``grace_sec``.
    """
    reading: asyncio.Task[str | None] | None = None
    try:
        while True:
            if reading is None:
                reading = asyncio.create_task(_next(source), name="reading text")
            await asyncio.wait([reading], timeout=grace_sec if splitter.looks_complete else None)
            if not reading.done():
                yield splitter.rest()
                continue
            text, reading = reading.result(), None
            if text is None:
                break
            for clause in splitter.feed(text):
                yield clause
        if rest := splitter.rest():
            yield rest
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _next(source: AsyncIterator[str]) -> str | None:
    return await anext(source, None)


def split_clauses(text: str) -> list[str]:
    """The clauses of a whole text."""
    splitter = ClauseSplitter()
    clauses = splitter.feed(text)
    rest = splitter.rest()
    return [*clauses, rest] if rest else clauses


def is_speakable(clause: str) -> bool:
    """Whether there is anything to say: a letter or a digit of any script."""
    return any(character.isalnum() for character in clause)


def _word_before(text: str, end: int) -> str:
    """The word before the full stop at ``end``, in small letters; empty where something else ends the sentence."""
    if text[end : end + 1] != ".":
        return ""
    word = _LAST_WORD.search(text, max(0, end - 20), end)
    return "" if word is None else word[1].lstrip("\"'“‘([").lower()


def _is_abbreviation(word: str) -> bool:
    """Whether ``word`` is one that is written with a full stop."""
    if word in _ABBREVIATIONS or _INITIALS.fullmatch(word):
        return True
    return len(word) == 1 and word.isalpha() and word not in ("i", "a")
