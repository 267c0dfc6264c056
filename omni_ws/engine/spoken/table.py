"""SpokenTable: reads the rows of a table so that a listener knows which column a value is in."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from omni_ws.engine.spoken.inline_markup import InlineMarkup

#: A longer line, in characters, is read as text: a row is read at once, in up to 20 ms.
MAX_ROW: Final = 1000

_DELIMITERS: Final = re.compile(r"\|[\s|:-]*-[\s|:-]*")
_CELL: Final = re.compile(r"(?:[^|\\]|\\.)*")
_YES: Final = frozenset(("✅", "✔", "✔️", "✓", "☑", "☑️"))
_NO: Final = frozenset(("❌", "✗", "✘", "✖", "✖️"))


class TableWord(NamedTuple):
    """A word of a row with its place. Labels and pauses are not written there: they begin where they end."""

    text: str
    start: int
    end: int


class SpokenTable:
    """Takes the lines of a table and returns what is said of them: "Alice: Age 30, City Paris." for a row.

    The first line is held back until the next one tells whether it holds the names of the columns. These are said with
    each value but the first, which names the row.
    """

    def __init__(self, *, english: bool) -> None:
        self._english = english
        self._held: tuple[str, int] | None = None
        self._names: list[list[str]] = []
        self._begun = False

    def feed(self, line: str, at: int) -> list[TableWord]:
        """Return the words of the rows that ``line``, at position ``at`` of the text, completes."""
        line = line.rstrip()
        if _DELIMITERS.fullmatch(line):
            if self._held is not None:
                self._names = [_plain(cell) for cell, _ in _cells(self._held[0])]
                self._held, self._begun = None, True
            return []
        if not self._begun and self._held is None:
            self._held = (line, at)
            return []
        rows = self._row(*self._held) if self._held is not None else []
        self._held, self._begun = None, True
        return rows + self._row(line, at)

    def end(self) -> list[TableWord]:
        """The table is over. Return the row that was held back."""
        rows = self._row(*self._held) if self._held is not None else []
        self._held, self._names, self._begun = None, [], False
        return rows

    def _row(self, line: str, at: int) -> list[TableWord]:
        words: list[TableWord] = []
        for column, (cell, place) in enumerate(_cells(line)):
            start = at + place
            said = [
                TableWord(match[0].replace("\\|", " "), start + match.start(), start + match.end())
                for match in re.finditer(r"\S+", cell)
            ]
            if not said:
                continue
            if len(said) == 1 and self._english:
                said[0] = said[0]._replace(text=_yes_or_no(said[0].text))
            if words:
                words.append(TableWord(":" if column == 1 and self._names else ",", start, start))
            if 0 < column < len(self._names):
                words += [TableWord(name, start, start) for name in self._names[column]]
            words += said
        if words:
            end = words[-1].end
            words += [TableWord(".", end, end), TableWord("\n", end, end)]
        return words


def _cells(line: str) -> list[tuple[str, int]]:
    """Return the cells of a line that begins with "|", each with its place."""
    cells: list[tuple[str, int]] = []
    at = 1
    while at < len(line):
        found = _CELL.match(line, at)
        end = found.end() if found else at
        cells.append((line[at:end], at))
        at = end + 1
    return cells


def _plain(cell: str) -> list[str]:
    markup = InlineMarkup(picture="")
    return " ".join(markup.clean(word) for word in cell.split()).split()


def _yes_or_no(text: str) -> str:
    return "yes" if text in _YES else "no" if text in _NO else text
