"""Lexicon: how single words and names are said, and LexiconReader, which finds them in a text as it arrives."""

from __future__ import annotations

import asyncio
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple

#: Scripts without white space between words: each of their letters is a word of its own.
UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
_IS_UNSPACED: Final = re.compile(f"[{UNSPACED}]")
_ASCII_UNITS: Final = re.compile(r"\w+|\W", re.ASCII)
_ANY_UNITS: Final = re.compile(rf"[^\W{UNSPACED}]+|.", re.DOTALL)
#: Signs that are written in several ways.
_SAME_SIGNS: Final = str.maketrans("‘’‐‑–", "''---")


class TextWord(NamedTuple):
    """A word with the signs around it, and its place in the text, in characters."""

    text: str
    start: int
    end: int
    #: Whether white space precedes it.
    gap: bool = False


class Reading(NamedTuple):
    """One or more words of the text. ``said`` is how they are said; empty for a word without an entry.

    ``said`` has the parts in order: what an entry says, or (False) signs and parts of words that it does not cover.
    """

    word: TextWord
    said: tuple[tuple[str, bool], ...] = ()


class _Entry:
    """What a lexicon says of some words, in whatever case."""

    __slots__ = ("as_written", "in_any_case", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        #: How the words are said; and how they are said that are only meant with these very capitals.
        self.in_any_case: str | None = None
        self.as_written: dict[str, str] = {}

    def add(self, units: list[str], joined: str, said: str) -> None:
        """Add how the words are said, which are written as ``joined``."""
        if any(len(unit) > 1 and unit[1:] != unit[1:].lower() for unit in units):
            self.as_written[joined] = said
        else:
            self.in_any_case = said


class Lexicon:
    """How words are said: ``entries`` maps a word, or several with spaces, to a text that is read in its place.

    Entries match whole words. They match in any case, except those with a capital inside a word (``iPhone``, ``US``),
    which match as they are written, and before others. Of entries that differ in case only, the last one counts.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        found: dict[str, _Entry] = {}
        for written, said in entries.items():
            units = _units(" ".join(written.split()))
            joined = _joined(units)
            found.setdefault(joined.casefold(), _Entry(len(units))).add(units, joined, " ".join(said.split()))
        self._keys = sorted(found)
        self._entries = [found[key] for key in self._keys]
        #: The first units of all entries; the largest number of units.
        self.firsts = frozenset(key.partition(_UNIT_END)[0] for key in self._keys)
        self._most = max((entry.units for entry in self._entries), default=0)
        #: For each entry the place of the longest one with which it begins; -1 if there is none.
        self._within: list[int] = []
        path: list[int] = []
        for place, key in enumerate(self._keys):
            while path and not key.startswith(self._keys[path[-1]]):
                path.pop()
            self._within.append(path[-1] if path else -1)
            path.append(place)

    def find(self, units: list[_Unit], begin: int, *, final: bool) -> tuple[int, str | None] | None:
        """Return where the longest entry from ``begin`` on ends, and how it is said; None is how one unit is said.

        Returns None while further units may make an entry of them, unless ``final``.
        """
        if units[begin].folded not in self.firsts:
            return begin + 1, None
        window = units[begin : begin + self._most]
        folded = _joined([unit.folded for unit in window])
        place = bisect_right(self._keys, folded)
        goes_on = place < len(self._keys) and self._keys[place].startswith(folded)
        if goes_on and not final and begin + len(window) == len(units):
            return None
        place -= 1
        written, ends = "", list[int]()
        while place >= 0:
            entry = self._entries[place]
            if folded.startswith(self._keys[place]):
                how = entry.in_any_case
                if entry.as_written:
                    if not ends:
                        written = _joined([unit.text for unit in window])
                        ends = list(accumulate(len(unit.text) + 1 for unit in window))
                    how = entry.as_written.get(written[: ends[entry.units - 1]], how)
                if how is not None:
                    return begin + entry.units, how
            place = self._within[place]
        return begin + 1, None


#: Ends each unit of a key, so that no key begins within a unit of another. No word has it.
_UNIT_END: Final = "\n"


def _joined(units: Sequence[str]) -> str:
    return _UNIT_END.join(units) + _UNIT_END


#: More entries than these may take more than 2 ms.
_MANY: Final = 40


@lru_cache(32)
def _lexicon_of(entries: tuple[tuple[str, str], ...]) -> Lexicon:
    return Lexicon(dict(entries))


def lexicon_of(entries: Mapping[str, str]) -> Lexicon:
    """Return the Lexicon of some entries, which is made once for all answers of a session, or of all sessions.

    The longest takes some 20 ms and a megabyte; ``prepare`` it first.
    """
    return _lexicon_of(tuple(entries.items()))


async def prepare(entries: Mapping[str, str]) -> None:
    """Make the Lexicon of some entries, in a thread if there are many."""
    if len(entries) > _MANY:
        await asyncio.to_thread(lexicon_of, entries)


class _Unit(NamedTuple):
    """A run of letters and digits, or another single sign. The ``word`` that it is part of is None for a space."""

    folded: str
    text: str
    word: TextWord | None = None
    #: Whether it ends its word.
    last: bool = False


_SPACE: Final = _Unit(" ", " ")


class LexiconReader:
    """A reader of words in order, which finds the longest entry of ``lexicon`` at each place, from left to right.

    It holds words back while an entry of several words may go on. Time is linear in the length of the text, and does
    not depend on the number of entries.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        #: The units not yet given out.
        self._units: list[_Unit] = []
        #: The words of the reading that is being put together, and its parts.
        self._words: list[TextWord] = []
        self._parts: list[tuple[str, bool]] = []

    @property
    def held(self) -> str:
        """The last word that is held back; empty if none is."""
        word = self._units[-1].word if self._units else None
        return word.text if word is not None else ""

    def feed(self, word: TextWord) -> list[Reading]:
        """Return the readings that ``word`` completes."""
        units = [(unit.casefold(), unit) for unit in _units(word.text)]
        if not self._units and not any(folded in self._lexicon.firsts for folded, _ in units):
            return [Reading(word)]
        if self._units and word.gap:
            self._units.append(_SPACE)
        self._units += [_Unit(folded, text, word) for folded, text in units[:-1]]
        self._units.append(_Unit(*units[-1], word, last=True))
        return list(self._read(final=False))

    def rest(self) -> list[Reading]:
        """Return the readings of the words that are held back, as if the text ended."""
        return list(self._read(final=True))

    def _read(self, *, final: bool) -> Iterator[Reading]:
        units, begin = self._units, 0
        while begin < len(units) and (found := self._lexicon.find(units, begin, final=final)) is not None:
            end, how = found
            if (reading := self._take(units[begin:end], how)) is not None:
                yield reading
            begin = end
        del units[:begin]

    def _take(self, units: list[_Unit], how: str | None) -> Reading | None:
        """Add units, which are said as ``how``, to the reading; return the reading if its last word is complete."""
        for unit in units:
            if unit.word is not None and (not self._words or self._words[-1] is not unit.word):
                self._words.append(unit.word)
        if how is not None:
            self._parts.append((how, True))
        elif units[0].word is not None:
            self._parts.append((units[0].text, False))
        if not units[-1].last:
            return None
        words, parts, self._words, self._parts = self._words, self._parts, [], []
        if not any(by_entry for _, by_entry in parts):
            return Reading(words[0])
        text = "".join(f" {word.text}" if word.gap else word.text for word in words)
        written = TextWord(text.removeprefix(" "), words[0].start, words[-1].end, words[0].gap)
        return Reading(written, tuple(parts))


def _units(text: str) -> list[str]:
    """Return the runs of letters and digits in ``text``, and each other character by itself."""
    if text.isascii():
        return _ASCII_UNITS.findall(text)
    units: list[str] = []
    in_run = False
    for unit in _ANY_UNITS.findall(unicodedata.normalize("NFC", text).translate(_SAME_SIGNS)):
        # Vowel signs, as in Hindi, are no letters to Python.
        runs = unit[0].isalnum() or unit[0] == "_" or unicodedata.category(unit)[0] == "M"
        runs = runs and (len(unit) > 1 or not _IS_UNSPACED.match(unit))
        if runs and in_run:
            units[-1] += unit
        else:
            units.append(unit)
        in_run = runs
    return units
