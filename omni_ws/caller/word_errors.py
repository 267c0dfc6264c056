"""Word errors: what was said against what was heard, different spellings of the same words made equal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from omni_ws.engine.spoken.speakable_text import spoken_form

#: Spellings of one word.
_EQUAL: Final = {
    "mr": "mister",
    "mrs": "missus",
    "missis": "missus",
    "dr": "doctor",
    "st": "saint",
    "ok": "okay",
    "miz": "miss",
    "metre": "meter",
    "metres": "meters",
    "colour": "color",
    "favour": "favor",
    "honour": "honor",
    "grey": "gray",
    "o": "zero",
    "oh": "zero",
    "ooh": "zero",
    "cheque": "check",
    "programme": "program",
    "til": "till",
}
#: Words written as one or apart: "voice mail", "P.B.X.". So many at most.
_MOST_JOINED: Final = 4
#: Shorter ones are not read digit by digit.
_NUMBERS: Final = re.compile(r"\d{3,}")
_NOT_SPOKEN: Final = re.compile(r"[^a-z' ]+")
#: "one hundred and five" is "hundred five".
_AND: Final = re.compile(r"\b(hundred|thousand|million) and (?=[a-z])")
_ONE: Final = re.compile(r"\b(?:one|a) (?=(?:hundred|thousand|million)(?:th)?\b)")


@dataclass(frozen=True, slots=True)
class WordErrors:
    """``wrong`` of ``words`` that were said, and each difference: "clubs → clothes", "+you" or "-the"."""

    wrong: int
    words: int
    differences: tuple[str, ...] = ()

    @property
    def rate(self) -> float:
        return self.wrong / self.words if self.words else float(self.wrong > 0)


def total(errors: Iterable[WordErrors]) -> WordErrors:
    wrong = words = 0
    differences: tuple[str, ...] = ()
    for each in errors:
        wrong, words, differences = wrong + each.wrong, words + each.words, differences + each.differences
    return WordErrors(wrong, words, differences)


def word_errors(said: str, heard: str, *, language: str = "en") -> WordErrors:
    """Substitutions, insertions and deletions, the fewest that turn one into the other.

    Numbers are compared as they are read aloud; digits that were heard count as right if they are so read as a number,
    as a year or one by one. Case and punctuation count for nothing, and neither does whether words are joined.
    """
    if language != "en":
        wanted = _words_of(said, language)
        return min((compared(wanted, words) for words in _readings_of(heard, language)), key=lambda found: found.wrong)
    wanted = spoken_words(said)
    return min((compared(wanted, words) for words in _readings(heard)), key=lambda errors: errors.wrong)


def spoken_words(text: str) -> list[str]:
    """The words of a text as they are read aloud: small letters, numbers in words, no punctuation."""
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z]\b)", " ", text.replace("’", "'"))  # P.B.X.
    read = "".join(piece.text for piece in spoken_form(text))
    words = _ONE.sub("", _AND.sub(r"\1 ", " ".join(_NOT_SPOKEN.sub(" ", read.lower()).split()))).split()
    stripped = (word.strip("'") for word in words)
    return [_EQUAL.get(word, word) for word in stripped if word]


def _readings(heard: str) -> Iterator[list[str]]:
    yield spoken_words(heard)
    # A time of day, as "3:30".
    yield spoken_words(re.sub(r"\b(\d{1,2})\.(\d\d)(?!\d)", r"\1:\2", heard))
    if _NUMBERS.search(heard):
        yield spoken_words(_NUMBERS.sub(lambda number: " ".join(number[0]), heard))
        # Not a year: "1905" may have been "one thousand nine hundred five"; and years as two numbers.
        yield spoken_words(re.sub(r"\b(\d{1,3})(\d{3})\b", r"\1,\2", heard))
        yield spoken_words(re.sub(r"\b(\d\d)(\d\d)\b", r"\1 \2", heard))


def _words_of(text: str, language: str) -> list[str]:
    """The words of a text in another language than English, as they are read aloud."""
    read = "".join(piece.text for piece in spoken_form(text.replace("’", "'"), language))
    return re.sub(r"[^\w']+|_", " ", read.lower().replace("-", " ")).split()


#: A recogniser writes amounts with the name of the currency, and times in other ways.
_NAMED_MONEY: Final = re.compile(r"(\d+,\d\d) (?:euros?|Euro)\b")
_NAMED_TIME: Final = re.compile(r"\b(\d{1,2})\.(\d\d)\b")


def _readings_of(heard: str, language: str) -> Iterator[list[str]]:
    yield _words_of(heard, language)
    yield _words_of(_NAMED_MONEY.sub(r"\1 €", heard), language)
    yield _words_of(_NAMED_TIME.sub(r"\1:\2", heard), language)


def compared(said: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """The fewest errors between two texts: the classic table of costs, with words that are joined on one side."""
    rows, columns = len(said) + 1, len(heard) + 1
    cost = [[0] * columns for _ in range(rows)]
    step: list[list[tuple[int, int]]] = [[(0, 0)] * columns for _ in range(rows)]
    for row in range(rows):
        for column in range(columns):
            if row or column:
                cost[row][column], step[row][column] = min(
                    (cost[row - down][column - right] + price, (down, right))
                    for down, right, price in _steps(said, heard, row, column)
                )
    return WordErrors(cost[-1][-1], len(said), tuple(_differences(said, heard, step)))


def _steps(said: Sequence[str], heard: Sequence[str], row: int, column: int) -> Iterator[tuple[int, int, int]]:
    """Each as words of both sides and its price."""
    if row and column:
        yield 1, 1, int(said[row - 1] != heard[column - 1])
        for count in range(2, _MOST_JOINED + 1):
            if count <= row and "".join(said[row - count : row]) == heard[column - 1]:
                yield count, 1, 0
            if count <= column and "".join(heard[column - count : column]) == said[row - 1]:
                yield 1, count, 0
    if row:
        yield 1, 0, 1
    if column:
        yield 0, 1, 1


def _differences(said: Sequence[str], heard: Sequence[str], step: Sequence[Sequence[tuple[int, int]]]) -> list[str]:
    found: list[str] = []
    row, column = len(said), len(heard)
    while row or column:
        down, right = step[row][column]
        wanted, got = said[row - down : row], heard[column - right : column]
        if not got:
            found.append(f"-{wanted[0]}")
        elif not wanted:
            found.append(f"+{got[0]}")
        elif "".join(wanted) != "".join(got):
            found.append(f"{wanted[0]} → {got[0]}")
        row, column = row - down, column - right
    return found[::-1]
