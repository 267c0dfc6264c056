"""The names of numbers in English: cardinals, ordinals, years and times of day, and the values of Roman numerals."""

from __future__ import annotations

import re
from typing import Final

#: Longer numbers are read digit by digit, since listeners could not follow their names.
MAX_NAMED_DIGITS: Final = 15

SMALL_NUMBERS: Final = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
TENS: Final = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES: Final = ("", " thousand", " million", " billion", " trillion")
_ORDINALS: Final = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}
_ROMAN: Final = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}
_WELL_FORMED: Final = re.compile(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")


def cardinal(digits: str) -> str:
    """Return a whole number in words: "21" is "twenty-one".

    A long number, or one with leading zeros, is read digit by digit.
    """
    if len(digits) > MAX_NAMED_DIGITS or (len(digits) > 1 and digits[0] == "0"):
        return by_digit(digits)
    number = int(digits)
    if number == 0:
        return "zero"
    groups: list[str] = []
    for scale in _SCALES:
        number, below = divmod(number, 1000)
        if below:
            groups.append(_below_thousand(below) + scale)
    return " ".join(reversed(groups))


def by_digit(digits: str) -> str:
    """Return the digits as words, one by one: "007" is "zero zero seven"."""
    return " ".join(SMALL_NUMBERS[int(digit)] for digit in digits)


def decimal(text: str) -> str:
    """Return a number such as "1,234.50", "0.5" or ".5" in words."""
    whole, point, fraction = text.replace(",", "").partition(".")
    name = cardinal(whole or "0")
    return f"{name} point {by_digit(fraction)}" if point and fraction else name


def ordinal(digits: str) -> str:
    """Return an ordinal number in words: "21" is "twenty-first"."""
    return ordinal_of(cardinal(digits))


def ordinal_of(name: str) -> str:
    """Return the ordinal form of a number's name: "twenty-one" becomes "twenty-first"."""
    cut = max(name.rfind(" "), name.rfind("-")) + 1
    last = name[cut:]
    regular = last[:-1] + "ieth" if last.endswith("y") else last + "th"
    return name[:cut] + _ORDINALS.get(last, regular)


def year(digits: str) -> str:
    """Return a year of four digits as it is said: "1998" is "nineteen ninety-eight", "2005" "two thousand five"."""
    century, rest = int(digits[:2]), int(digits[2:])
    if century % 10 == 0 and rest < 10:
        return cardinal(digits)
    if rest == 0:
        return f"{cardinal(str(century))} hundred"
    return f"{cardinal(str(century))} {_two_digits(rest)}"


def in_pairs(digits: str) -> str:
    """Return three or four digits in words, read in pairs as model numbers are: "747" is "seven forty-seven".

    Numbers that end in "00" or begin with "0", and longer ones, are read as by ``cardinal``.
    """
    front, rest = digits[:-2], digits[-2:]
    if rest == "00" or len(digits) > 4 or digits[0] == "0":
        return cardinal(digits)
    return f"{cardinal(front)} {_two_digits(int(rest))}"


def clock(hours: str, minutes: str) -> str:
    """Return a time of day in words: "3", "05" is "three oh five"; "3", "00" is "three"."""
    name = cardinal(str(int(hours)))
    return name if int(minutes) == 0 else f"{name} {_two_digits(int(minutes))}"


def plural(name: str) -> str:
    """Return the plural of a number's name: "fifty" becomes "fifties", "third" becomes "thirds"."""
    if name.endswith("y"):
        return name[:-1] + "ies"
    return name + "es" if name.endswith("x") else name + "s"


def roman(numeral: str) -> int:
    """Return the value of a Roman numeral; 0 for other texts, such as "IIII" or "VIX"."""
    if not _WELL_FORMED.fullmatch(numeral):
        return 0
    total = previous = 0
    for letter in reversed(numeral):
        value = _ROMAN[letter]
        total += value if value >= previous else -value
        previous = max(previous, value)
    return total


def _two_digits(number: int) -> str:
    return f"oh {SMALL_NUMBERS[number]}" if number < 10 else _below_hundred(number)


def _below_hundred(number: int) -> str:
    if number < len(SMALL_NUMBERS):
        return SMALL_NUMBERS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] + (f"-{SMALL_NUMBERS[ones]}" if ones else "")


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    return f"{SMALL_NUMBERS[hundreds]} hundred" + (f" {_below_hundred(rest)}" if rest else "")
