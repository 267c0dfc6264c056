"""Long texts cut into pieces, and text that arrives in pieces cut into clauses."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from typing import Final, NamedTuple, Self

from omni_ws.engine.base import InputSource
from omni_ws.engine.channel import Channel
from omni_ws.engine.continued_input import own_part

# Pieces: work on one does not block the event loop.

#: The length of a piece; to cut it into clauses, or to look for stop strings, takes a few milliseconds at most.
PIECE_CHARACTERS: Final = 4096


def pieces_of(text: str, length: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Yield ``text`` in pieces of ``length``, in characters; nothing for an empty text."""
    for start in range(0, len(text), length):
        yield text[start : start + length]


class CooperativePieces:
    """Iterates over the pieces of a text, and lets other tasks run before each but the first."""

    # Not a generator: the event loop would close an abandoned one in a task without owner.

    def __init__(self, text: str) -> None:
        self._pieces = pieces_of(text)
        self._begun = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        piece = next(self._pieces, None)
        if piece is None:
            raise StopAsyncIteration
        if self._begun:
            await asyncio.sleep(0)
        self._begun = True
        return piece


# Clauses: they are synthesised while the rest of the text is still being generated.

#: How long, in seconds, text that looks like a complete sentence waits for more.
SENTENCE_GRACE = 0.15

#: How long, in seconds, the beginning of a text that is being written waits for more before its words are spoken.
BEGIN_AFTER: Final = 0.4

#: From this length on, in characters, a clause may also end at a comma, colon, semicolon or dash.
COMMA_AFTER = 60

#: The maximum length of a clause, in characters: about 20 s of speech, which bounds the memory for its audio.
MAX_CLAUSE = 300

#: Words whose full stop does not end a sentence, in lower case.
_ABBREVIATIONS: Final = frozenset(
    (
        *("mr", "mrs", "ms", "dr", "prof", "rev", "hon", "gen", "col", "capt", "sgt", "lt"),
        *("st", "mt", "jr", "sr", "ph.d", "inc", "ltd", "co", "corp", "dept", "vs", "etc", "approx"),
    )
)
#: Abbreviations only before a number: "No. 5" has one, "No. I did not." is two sentences.
_BEFORE_NUMBERS: Final = frozenset(("no", "vol", "fig", "pp", "ch", "sec", "eq"))
_INITIALS: Final = re.compile(r"(?:[a-z]\.)+[a-z]")
_NUMBERING: Final = re.compile(r"\d{1,3}")

#: Where a clause may end. The marks of the first two groups have to be followed by closing quotes or brackets, if
#: any, and white space; those of the others need no white space.
_MARK: Final = re.compile(
    r"(?P<sentence>[.!?…])|(?P<clause>[,;:—–])|(?P<sentence_end>[。！？\n])|(?P<clause_end>[，、；：])"
)
_MORE_MARKS: Final = {"sentence": re.compile(r"[.!?…]*"), "clause": re.compile(r"[,;:—–]*")}
_MORE_CLOSERS: Final = re.compile(r"[\"'”’)\]]*")
_SPACE: Final = re.compile(r"\s*")
_BORDER: Final = re.compile(r"(?<=\S)\s")
_CLOSERS: Final = "\"'”’)]"
_SENTENCE_MARKS: Final = ".!?…"
_SENTENCE_ENDS: Final = ("。", "！", "？")


class TextClause(NamedTuple):
    """A clause, stripped; and where it ends in the text that is split, without the white space that follows."""

    text: str
    end: int


class ClauseSplitter:
    """Splits text into clauses, at positions that further text cannot change.

    When no more text arrives for a while, ``looks_complete`` says whether to speak what there is, and ``rest`` returns
    it.

    To start speech early, the first clause may have limits of its own, in characters: from ``first_comma_after`` on it
    may end at a comma, and without one it ends before the word that would exceed ``first_longest``.

    The clauses do not depend on how the text is cut into pieces. Time is linear in the length of the text; memory is
    limited to the clause in progress.
    """

    def __init__(self, *, first_comma_after: int = COMMA_AFTER, first_longest: int = MAX_CLAUSE) -> None:
        #: The clause in progress; at most one character longer than a clause may be.
        self._waiting = ""
        #: The length of the text so far.
        self._fed = 0
        self._comma_after = first_comma_after
        self._longest = first_longest
        #: The position up to which ``_waiting`` has been examined.
        self._read = 0
        #: A run of marks that may continue at ``_read``: its start and its kind.
        self._marks: tuple[int, str] | None = None
        #: The end of the clause unless a number follows; only white space has arrived after it.
        self._end_unless_number: int | None = None

    def feed(self, text: str) -> list[TextClause]:
        """Return the clauses that ``text`` completes."""
        clauses: list[TextClause] = []
        taken = 0
        while taken < len(text):
            piece = text[taken : taken + self._longest + 1 - len(self._waiting)]
            taken += len(piece)
            self._fed += len(piece)
            self._waiting = self._waiting + piece if self._waiting else piece.lstrip()
            while (end := self._next_end()) is not None:
                clauses.append(self._clause(self._waiting[:end], self._fed - len(self._waiting)))
                self._begin(self._waiting[end:].lstrip())
                self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return clauses

    @property
    def looks_complete(self) -> bool:
        """Whether the text in progress looks like a whole sentence that is not yet followed by another word."""
        text = self._waiting.rstrip()
        if text.endswith(_SENTENCE_ENDS):
            return True
        text = text.rstrip(_CLOSERS)
        end = len(text.rstrip(_SENTENCE_MARKS))
        return end < len(text) and not _is_abbreviation(_word_before(text, end))

    def rest(self) -> TextClause:
        """Remove and return the text in progress, which is a clause of its own, and may be empty."""
        rest = self._clause(self._waiting, self._fed - len(self._waiting))
        self._begin("")
        if rest.text:
            self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return rest

    def words(self) -> TextClause:
        """Remove and return the words in progress without the last, which may go on; there may be none."""
        end = last_border(self._waiting)
        words = self._clause(self._waiting[:end], self._fed - len(self._waiting))
        if words.text:
            self._begin(self._waiting[end:].lstrip())
            self._comma_after, self._longest = COMMA_AFTER, MAX_CLAUSE
        return words

    @staticmethod
    def _clause(text: str, start: int) -> TextClause:
        stripped = text.rstrip()
        return TextClause(stripped, start + len(stripped))

    def _begin(self, waiting: str) -> None:
        self._waiting = waiting
        self._read = 0
        self._marks = self._end_unless_number = None

    def _next_end(self) -> int | None:
        """Return the length of the clause in progress; None while more text could change it."""
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
                # It was an abbreviation. The white space before the number may contain a newline, which ends a clause.
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
        """Whether marks at ``marks`` end a clause, and do not belong to an abbreviation or a list number."""
        if kind.startswith("clause"):
            return marks >= self._comma_after
        if _NUMBERING.fullmatch(self._waiting, 0, marks):
            return False
        return not _is_abbreviation(_word_before(self._waiting, marks))

    def _next_ending(self) -> tuple[int, int, str] | None:
        """Return the start, the end (after closing quotes) and the kind of the next run of marks, or None."""
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
    """Return the end of the match of ``pattern`` at ``position``."""
    found = pattern.match(text, position, limit)
    return position if found is None else found.end()


def is_being_written(source: InputSource) -> bool:
    """Whether this input is a client's, and has not ended: speech begins early, which cuts what is read more often."""
    own = own_part(source)
    return isinstance(own, Channel) and not own.closed


async def clauses_as_they_come(
    source: AsyncIterator[str],
    splitter: ClauseSplitter,
    *,
    grace_sec: float = SENTENCE_GRACE,
    begin_after_sec: float | None = None,
) -> AsyncGenerator[TextClause, None]:
    """Yield the clauses of a text whose pieces ``source`` yields; the last one at the end of ``source``.

    Text that looks like a complete sentence is yielded when no more arrives for ``grace_sec`` seconds. So are, before
    the first clause, the words that arrived, after ``begin_after_sec``. A caller that stops early has to close the
    generator.
    """
    begun = begin_after_sec is None

    def patience() -> float | None:
        return grace_sec if splitter.looks_complete else None if begun else begin_after_sec

    async with aclosing(with_pauses(source, patience)) as pieces:
        async for text in pieces:
            if text is None:
                clause = splitter.rest() if splitter.looks_complete else splitter.words()
                if clause.text:
                    yield clause
                    begun = begun or is_speakable(clause.text)
                continue
            async for piece in CooperativePieces(text):
                for clause in splitter.feed(piece):
                    yield clause
                    begun = begun or is_speakable(clause.text)
    if (rest := splitter.rest()).text:
        yield rest


def first_clause_of(source: InputSource) -> tuple[int, float | None]:
    """Where a comma may end the first clause of text from this input, and when its words do; None for never."""
    return (0, BEGIN_AFTER) if is_being_written(source) else (COMMA_AFTER, None)


async def with_pauses(
    source: AsyncIterator[str], patience: Callable[[], float | None]
) -> AsyncGenerator[str | None, None]:
    """Yield the pieces of a text, and None, once until the next, where none arrives within ``patience``, in seconds."""
    reading: asyncio.Task[str | None] | None = None
    paused = False
    try:
        while True:
            if reading is None:
                reading = asyncio.create_task(_next(source), name="reading text")
            await asyncio.wait([reading], timeout=None if paused else patience())
            paused = not reading.done()
            if paused:
                yield None
                continue
            text, reading = reading.result(), None
            if text is None:
                return
            yield text
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


async def _next(source: AsyncIterator[str]) -> str | None:
    return await anext(source, None)


def last_border(text: str) -> int:
    """Where the last word of ``text`` that cannot go on ends, before white space; 0 where there is none."""
    last = 0
    for found in _BORDER.finditer(text):
        last = found.start()
    return last


def is_speakable(clause: str) -> bool:
    """Whether the clause contains a letter or digit of any script."""
    return any(character.isalnum() for character in clause)


def _word_before(text: str, end: int) -> str:
    """Return the word before the full stop at ``end``, in lower case; "" for any other mark."""
    if text[end : end + 1] != ".":
        return ""
    before = text[max(0, end - 20) : end]
    if not before or before[-1].isspace():
        return ""
    return before.split()[-1].lstrip("\"'“‘([").lower()


def _is_abbreviation(word: str) -> bool:
    """Whether ``word`` is usually written with a full stop."""
    if word in _ABBREVIATIONS or _INITIALS.fullmatch(word):
        return True
    return len(word) == 1 and word.isalpha() and word not in ("i", "a")
