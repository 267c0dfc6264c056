"""Arithmetic as people say and write it: "two plus three times four", "12 / (3 + 1)"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import TypeAlias

_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_UNITS = {word: value for value, word in enumerate(_SMALL)}
_TENS = {
    word: 10 * (place + 2)
    for place, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])
}
_BELOW_HUNDRED = _UNITS | _TENS
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLIERS = frozenset({"hundred", *_SCALES})
_FRACTIONS = {"half": 2, "third": 3, "quarter": 4}
_NUMBER_WORDS = frozenset({*_BELOW_HUNDRED, *_MULTIPLIERS})

_OPERATORS = {
    "+": "+", "plus": "+", "and": "+",
    "-": "-", "−": "-", "minus": "-", "less": "-", "negative": "-",
    "*": "*", "×": "*", "x": "*", "times": "*", "multiplied": "*",
    "/": "/", "÷": "/", "divided": "/", "over": "/",
    "(": "(", ")": ")",
}  # fmt: skip
_TOKEN = re.compile(r"\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|[a-z]+|[-+*/()×÷−]")
_BLANK = re.compile(r"[\s=?.!]*")

#: Longer ones are not what anybody says, and would only keep a thread busy.
MAX_CHARACTERS = 1000
MAX_TOKENS = 60
MAX_DIGITS = 15
MAX_RESULT = 10**30

_Token: TypeAlias = Fraction | str


class NotArithmetic(Exception):
    """The text is no arithmetic expression."""


def parse_number(text: str) -> int | None:
    """A whole number in words or digits ("one hundred and five", "20"), or None."""
    try:
        tokens = _tokens(text.lower())
    except NotArithmetic:
        return None
    if len(tokens) == 1 and isinstance(tokens[0], Fraction) and tokens[0].denominator == 1:
        return int(tokens[0])
    return None


def parse_value(text: str) -> Fraction | None:
    """Any number in words or digits ("minus two point five", "1,000"), or None."""
    try:
        tokens = _tokens(text.lower())
    except NotArithmetic:
        return None
    if len(tokens) == 2 and tokens[0] == "-" and isinstance(tokens[1], Fraction):
        return -tokens[1]
    return tokens[0] if len(tokens) == 1 and isinstance(tokens[0], Fraction) else None


def evaluate(text: str) -> Fraction:
    """The value. Raises NotArithmetic for what is no calculation, ZeroDivisionError where there is no value."""
    tokens = _tokens(text.lower())
    if len(tokens) < 2:
        raise NotArithmetic
    parser = _Parser(tokens)
    value = parser.sum()
    if parser.position != len(tokens):
        raise NotArithmetic
    if abs(value) > MAX_RESULT or value.denominator > MAX_RESULT:
        raise NotArithmetic
    return value


def in_digits(value: Fraction) -> str:
    """``value`` for reading and for speaking, rounded to six places where it has more."""
    sign = "minus " if value < 0 else ""
    value = abs(value)
    if value.denominator == 1:
        return f"{sign}{value.numerator}"
    rounded = round(value, 6)
    about = "about " if rounded != value else ""
    whole, decimals = divmod(int(rounded * 10**6), 10**6)
    return f"{about}{sign}{whole}.{f'{decimals:06d}'.rstrip('0') or '0'}"


def _tokens(text: str) -> list[_Token]:
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic
    words = _words(text.replace("-", " - ") if not any(ten + "-" in text for ten in _TENS) else _unhyphenated(text))
    tokens: list[_Token] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word[0].isdigit():
            fraction, position = _fraction(words, position + 1)
            tokens.append(_written(word) + fraction)
        elif word in _NUMBER_WORDS or (word in ("a", "an") and words[position + 1 : position + 2] == ["hundred"]):
            value, position = _spoken(words, position)
            fraction, position = _fraction(words, position)
            tokens.append(value + fraction)
        elif word in _OPERATORS:
            tokens.append(_OPERATORS[word])
            position += 2 if words[position : position + 2] in (["multiplied", "by"], ["divided", "by"]) else 1
        else:
            raise NotArithmetic
    return tokens


def _unhyphenated(text: str) -> str:
    """ "twenty-three" is one number, not a subtraction."""
    return re.sub(rf"({'|'.join(_TENS)})-(?=[a-z])", r"\1 ", text)


def _words(text: str) -> list[str]:
    words: list[str] = []
    position = _BLANK.match(text).end()  # type: ignore[union-attr]
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None or len(words) >= MAX_TOKENS:
            raise NotArithmetic
        words.append(token[0])
        position = _BLANK.match(text, token.end()).end()  # type: ignore[union-attr]
    return words


def _written(digits: str) -> Fraction:
    if len(digits) > MAX_DIGITS:
        raise NotArithmetic
    return Fraction(digits.replace(",", ""))


def _fraction(words: list[str], position: int) -> tuple[Fraction, int]:
    """The fraction at ``position``, behind a number ("and a half"), 0 for none; and the position behind it."""
    match words[position : position + 3]:
        case ["and", "a", name] if name in _FRACTIONS:
            return Fraction(1, _FRACTIONS[name]), position + 3
    return Fraction(0), position


def _spoken(words: list[str], position: int) -> tuple[Fraction, int]:
    """The number in words that starts at ``position``, and where it ends."""
    total, group = 0, 0
    while position < len(words):
        word = words[position]
        if word in _BELOW_HUNDRED:
            end = position + 1
            while end < len(words) and words[end] in _BELOW_HUNDRED:
                end += 1
            number, is_whole = _run(words[position:end])
            if is_whole and (total or group or not _MULTIPLIERS.isdisjoint(words[end : end + 1])):
                raise NotArithmetic
            group += number
            position = end
            continue
        if word in ("a", "an"):
            group += 1
        elif word == "hundred":
            group = max(group, 1) * 100
        elif word in _SCALES:
            total, group = total + max(group, 1) * _SCALES[word], 0
        elif not (word == "and" and group % 100 == 0 and words[position - 1] in ("hundred", *_SCALES)):
            break
        position += 1
    value = Fraction(total + group)
    if position < len(words) - 1 and words[position] == "point":
        decimals = []
        while position + 1 < len(words) and _UNITS.get(words[position + 1], 10) < 10:
            decimals.append(str(_UNITS[words[position + 1]]))
            position += 1
        if not decimals or len(decimals) > MAX_DIGITS:
            raise NotArithmetic
        value += Fraction(int("".join(decimals)), 10 ** len(decimals))
        position += 1
    return value, position


def _run(words: list[str]) -> tuple[int, bool]:
    """The number that words below a hundred name, and whether it is more than a part: a year, or digit by digit."""
    parts: list[int] = []
    for before, word in zip(["", *words], words, strict=False):
        value = _BELOW_HUNDRED[word]
        if before in _TENS and 0 < value < 10:
            parts[-1] += value
        else:
            parts.append(value)
    if len(parts) == 1:
        return parts[0], False
    if len(parts) == 2 and min(parts) >= 10:
        return 100 * parts[0] + parts[1], True
    if max(parts) < 10 and len(parts) <= MAX_DIGITS:
        return int("".join(map(str, parts))), True
    raise NotArithmetic


class _Parser:
    """Recursive descent: sum → product → signed value."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.position = 0
        self._tokens = tokens

    def sum(self) -> Fraction:
        value = self._product()
        while (operator := self._take("+", "-")) is not None:
            right = self._product()
            value = value + right if operator == "+" else value - right
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while (operator := self._take("*", "/")) is not None:
            right = self._signed()
            value = value * right if operator == "*" else value / right
        return value

    def _signed(self) -> Fraction:
        if self._take("-") is not None:
            return -self._signed()
        if self._take("(") is not None:
            value = self.sum()
            if self._take(")") is None:
                raise NotArithmetic
            return value
        token = self._tokens[self.position] if self.position < len(self._tokens) else None
        if not isinstance(token, Fraction):
            raise NotArithmetic
        self.position += 1
        return token

    def _take(self, *operators: str) -> str | None:
        token = self._tokens[self.position] if self.position < len(self._tokens) else None
        if isinstance(token, str) and token in operators:
            self.position += 1
            return token
        return None
