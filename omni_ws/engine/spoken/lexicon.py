"""Lexicon: how single words and names are said, and LexiconReader, which finds them in a text as it arrives."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

#: Scripts without white space between words: each of their letters is a word of its own.
UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
_IS_UNSPACED: Final = re.compile(f"[{UNSPACED}]")
_ASCII_UNITS: Final = re.compile(r"\w+|\W", re.ASCII)
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


class _Node:
    """A place in the tree of entries, reached by the units of their words."""

    __slots__ = ("as_written", "in_any_case", "next")

    def __init__(self) -> None:
        self.next: dict[str, _Node] = {}
        #: How the word is said that ends here; and words that are only meant with these very capitals.
        self.in_any_case: str | None = None
        self.as_written: dict[str, str] = {}


class Lexicon:
    """How words are said: ``entries`` maps a word, or several with spaces, to a text that is read in its place.

    Entries match whole words. They match in any case, except those with a capital inside a word (``iPhone``, ``US``),
    which match as they are written, and before others. Of entries that differ in case only, the last one counts.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self.root = _Node()
        for written, said in entries.items():
            node, exact = self.root, False
            word = " ".join(written.split())
            for unit in _units(word):
                node = node.next.setdefault(unit.casefold(), _Node())
                exact = exact or unit[1:] != unit[1:].lower()
            how = " ".join(said.split())
            if exact:
                node.as_written["".join(_units(word))] = how
            else:
                node.in_any_case = how


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
        self._root = self._node = lexicon.root
        #: The units not yet given out; where the walk from the first of them has come to; the longest entry that the
        #: walk has found: where it ends, and how it is said.
        self._units: list[_Unit] = []
        self._at = 0
        self._found: tuple[int, str] | None = None
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
        if not self._units and not any(folded in self._root.next for folded, _ in units):
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
        while begin < len(units):
            while self._at < len(units) and (node := self._node.next.get(units[self._at].folded)) is not None:
                self._at += 1
                self._node = node
                how = node.in_any_case
                if node.as_written:
                    how = node.as_written.get("".join(unit.text for unit in units[begin : self._at]), how)
                if how is not None:
                    self._found = self._at, how
            if self._at == len(units) and self._node.next and not final:
                break
            end, how = self._found or (begin + 1, None)
            if (reading := self._take(units[begin:end], how)) is not None:
                yield reading
            begin = self._at = end
            self._node, self._found = self._root, None
        del units[:begin]
        self._at -= begin
        if self._found is not None:
            self._found = self._found[0] - begin, self._found[1]

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
    for character in unicodedata.normalize("NFC", text).translate(_SAME_SIGNS):
        # Vowel signs, as in Hindi, are no letters to Python.
        runs = character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"
        runs = runs and not _IS_UNSPACED.match(character)
        if runs and in_run:
            units[-1] += character
        else:
            units.append(character)
        in_run = runs
    return units
