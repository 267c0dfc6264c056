"""Text that arrives in pieces, cut into clauses that can be spoken while the rest still comes."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Final

from omni_ws.engine.text_pieces import InTurns

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

#: Where a clause may end: at marks with quotes behind them and then white space, or at those that need neither.
_MARK: Final = re.compile(
    r"(?P<sentence>[.!?…])|(?P<clause>[,;:—–])|(?P<sentence_end>[。！？\n])|(?P<clause_end>[，、；：])"
)
_MORE_MARKS: Final = {"sentence": re.compile(r"[.!?…]*"), "clause": re.compile(r"[,;:—–]*")}
_MORE_CLOSERS: Final = re.compile(r"[\"'”’)\]]*")
_SPACE: Final = re.compile(r"\s*")
_CLOSERS: Final = "\"'”’)]"
_SENTENCE_MARKS: Final = ".!?…"
_SENTENCE_ENDS: Final = ("。", "！", "？")


class ClauseSplitter:
    """Cuts only where more text cannot change the cut; ``rest`` says what to do when no more text comes for a while.

    The first clause may have limits of its own, in characters, so that speech begins early: it may end at a comma
    after ``first_comma_after``, and where there is none it ends before the word that makes it longer than
    ``first_longest``. How the text is cut into pieces changes nothing. No character is read more than a few times, and
    no more is kept than the clause under way.
    """

    def __init__(self, *, first_comma_after: int = COMMA_AFTER, first_longest: int = MAX_CLAUSE) -> None:
        #: The clause under way, as far as it has come and up to one character more than it may have.
        self._waiting = ""
        self._comma_after = first_comma_after
        self._longest = first_longest
        #: Up to where ``_waiting`` has been read.
        self._read = 0
        #: The marks that go on at ``_read``: where they begin, and of what kind they are.
        self._marks: tuple[int, str] | None = None
        #: Where the clause ends unless a number follows: white space alone has come behind it.
        self._end_unless_number: int | None = None

    def feed(self, text: str) -> list[str]:
        """The clauses that ``text`` completes, without the white space around them."""
        clauses: list[str] = []
        taken = 0
        while taken < len(text):
            piece = text[taken : taken + self._longest + 1 - len(self._waiting)]
            taken += len(piece)
            self._waiting = self._waiting + piece if self._waiting else piece.lstrip()
            while (end := self._next_end()) is not None:
                clauses.append(self._waiting[:end].strip())
                self._begin(self._waiting[end:].lstrip())
                self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return clauses

    @property
    def looks_complete(self) -> bool:
        """Whether what waits seems to be a whole sentence whose next word has not come yet."""
        text = self._waiting.rstrip()
        if text.endswith(_SENTENCE_ENDS):
            return True
        text = text.rstrip(_CLOSERS)
        end = len(text.rstrip(_SENTENCE_MARKS))
        return end < len(text) and not _is_abbreviation(_word_before(text, end))

    def rest(self) -> str:
        """What waits, complete or not; afterwards nothing waits."""
        waiting = self._waiting.strip()
        self._begin("")
        return waiting

    def _begin(self, waiting: str) -> None:
        self._waiting = waiting
        self._read = 0
        self._marks = self._end_unless_number = None

    def _next_end(self) -> int | None:
        """Length of the clause under way; None while more text could change it."""
        while True:
            end = self._end_unless_number
            if end is None:
                if (ending := self._next_ending()) is None:
                    break
                start, end, kind = ending
                if not self._may_end(start, kind):
                    continue
                if _word_before(self._waiting, start) not in _BEFORE_NUMBERS:
                    return end
                self._end_unless_number = end
            self._read = _end_of(_SPACE, self._waiting, self._read)
            if self._read < len(self._waiting) and self._waiting[self._read].isdigit():
                # The white space before the number may be a line's end.
                self._read, self._end_unless_number = end, None
            elif self._read < len(self._waiting) or self._read > self._longest:
                return end
            else:
                return None
        if len(self._waiting) <= self._longest:
            return None
        space = self._waiting.rfind(" ", 1, self._longest + 1)
        return space if space > 0 else self._longest

    def _may_end(self, marks: int, kind: str) -> bool:
        """Whether marks that begin at ``marks`` are more than those of an abbreviation, a list or a short phrase."""
        if kind.startswith("clause"):
            return marks >= self._comma_after
        if _NUMBERING.fullmatch(self._waiting, 0, marks):
            return False
        return not _is_abbreviation(_word_before(self._waiting, marks))

    def _next_ending(self) -> tuple[int, int, str] | None:
        """The next marks: where they and their quotes begin and end, and their kind. None where there are no more."""
        text = self._waiting
        while True:
            if self._marks is None:
                mark = _MARK.search(text, self._read, self._longest)
                if mark is None:
                    self._read = min(len(text), self._longest)
                    return None
                self._read, kind = mark.end(), mark.lastgroup or ""
                if kind not in _MORE_MARKS:
                    return mark.start(), mark.end(), kind
                self._marks = (mark.start(), kind)
            start, kind = self._marks
            if text[self._read - 1] not in _CLOSERS:
                self._read = _end_of(_MORE_MARKS[kind], text, self._read, self._longest)
            self._read = _end_of(_MORE_CLOSERS, text, self._read, self._longest)
            if self._read == len(text):
                return None
            self._marks = None
            if text[self._read].isspace():
                return start, self._read, kind


def _end_of(pattern: re.Pattern[str], text: str, position: int, limit: int = sys.maxsize) -> int:
    """Where the match of ``pattern``, which may be empty, ends."""
    found = pattern.match(text, position, limit)
    return position if found is None else found.end()


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
            async for piece in InTurns(text):
                for clause in splitter.feed(piece):
                    yield clause
        if rest := splitter.rest():
            yield rest
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _next(source: AsyncIterator[str]) -> str | None:
    return await anext(source, None)


async def clauses_of(text: str) -> AsyncGenerator[str, None]:
    """The clauses of a whole text."""
    splitter = ClauseSplitter()
    async for piece in InTurns(text):
        for clause in splitter.feed(piece):
            yield clause
    if rest := splitter.rest():
        yield rest


def is_speakable(clause: str) -> bool:
    """Whether there is anything to say: a letter or a digit of any script."""
    return any(character.isalnum() for character in clause)


def _word_before(text: str, end: int) -> str:
    """The word before the full stop at ``end``, in small letters; empty where something else ends the sentence."""
    if text[end : end + 1] != ".":
        return ""
    before = text[max(0, end - 20) : end]
    if not before or before[-1].isspace():
        return ""
    return before.split()[-1].lstrip("\"'“‘([").lower()


def _is_abbreviation(word: str) -> bool:
    """Whether ``word`` is one that is written with a full stop."""
    if word in _ABBREVIATIONS or _INITIALS.fullmatch(word):
        return True
    return len(word) == 1 and word.isalpha() and word not in ("i", "a")
