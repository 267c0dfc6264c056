"""Numbers as people say and write them, calculations with them ("two plus three times four"), and units."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import cache
from itertools import takewhile
from math import floor, isqrt, log10
from operator import add, mul, sub, truediv
from typing import Final, NamedTuple, TypeAlias

from omni_ws.engine.llm.plain_words import Asked, Slots, Talk, expanded, read
from omni_ws.engine.spoken.english_numbers import SMALL_NUMBERS, TENS

_SUMS: Final = read("sums")

# Numbers and expressions

_UNITS: Final = {word: value for value, word in enumerate(SMALL_NUMBERS)}
_BELOW_HUNDRED: Final = _UNITS | {word: 10 * value for value, word in enumerate(TENS) if word}
_SCALES: Final = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_MULTIPLIERS: Final = frozenset({"hundred", *_SCALES})
_NUMBER_WORDS: Final = frozenset({*_BELOW_HUNDRED, *_MULTIPLIERS})
_FRACTIONS: Final = {"half": 2, "third": 3, "quarter": 4}
#: A number in digits, a word or a sign behind marks that mean nothing, or the end.
_TOKEN: Final = re.compile(r"[\s=?.!]*(?:(\d+(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|[a-z]+|[-+*/^()×÷−])|\Z)")
#: Two words that are one number: "twenty-three" is no subtraction.
_HYPHENED: Final = re.compile(rf"({'|'.join(filter(None, TENS))})-(?=[a-z])")

#: Longer ones are not what anybody says, and would only keep a thread busy.
MAX_CHARACTERS: Final = 1000
MAX_TOKENS: Final = 60
MAX_DIGITS: Final = 15
MAX_RESULT: Final = 10**30
_MAX_EXPONENT: Final = 100

_Token: TypeAlias = Fraction | str


class NotArithmetic(Exception):
    """The text is no arithmetic expression."""


def parse_number(text: str) -> int | None:
    """A whole number in words or digits ("one hundred and five", "20"), or None."""
    value = parse_value(text)
    return int(value) if value is not None and value.denominator == 1 and value >= 0 else None


def parse_value(text: str) -> Fraction | None:
    """Any number in words or digits ("minus two point five", "1,000"), or None."""
    try:
        tokens = _tokens(text.lower())
    except NotArithmetic:
        return None
    match tokens:
        case [Fraction() as value]:
            return value
        case ["-", Fraction() as value]:
            return -value
    return None


def evaluate(text: str) -> Fraction:
    """The value of a calculation.

    Raises NotArithmetic for anything else, ZeroDivisionError if it has no value, OverflowError for too large a power.
    """
    tokens = _tokens(text.lower())
    if len(tokens) < 2:
        raise NotArithmetic
    value = _taken(tokens)
    if tokens or abs(value) > MAX_RESULT or value.denominator > MAX_RESULT:
        raise NotArithmetic
    return value


def in_digits(value: Fraction) -> str:
    """``value`` for reading and for speaking, rounded to six places where it has more."""
    rounded = round(abs(value), 6)
    about = "about " if rounded != abs(value) else ""
    whole, decimals = divmod(int(rounded * 10**6), 10**6)
    point = f".{f'{decimals:06d}'.rstrip('0') or '0'}" if value.denominator != 1 else ""
    return f"{about}{'minus ' if value < 0 else ''}{whole}{point}"


def _taken(tokens: list[_Token], binding: int = 1) -> Fraction:
    """The value of the expression at the front of ``tokens``, which is removed; operators below ``binding`` stay."""
    value = _operand(tokens)
    while tokens and (found := _OPERATIONS.get(str(tokens[0]))) is not None and found[1] >= binding:
        tokens.pop(0)
        value = found[0](value, _taken(tokens, found[2]))
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT:
        raise NotArithmetic
    if max(abs(base.numerator), base.denominator).bit_length() * int(exponent) > MAX_RESULT.bit_length():
        raise OverflowError
    return base ** int(exponent)


#: A sign → what it does, how much more it binds than others, and how much an operator behind it has to bind.
_OPERATIONS: Final = {"+": (add, 1, 2), "-": (sub, 1, 2), "*": (mul, 2, 3), "/": (truediv, 2, 3), "^": (_power, 3, 3)}


def _operand(tokens: list[_Token]) -> Fraction:
    token = tokens.pop(0) if tokens else ""
    if token == "-":
        return -_taken(tokens, 3)
    if token == "(":
        token = _taken(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise NotArithmetic
    if not isinstance(token, Fraction):
        raise NotArithmetic
    return token


def _tokens(text: str) -> list[_Token]:
    words = _words(_HYPHENED.sub(r"\1 ", text))
    tokens: list[_Token] = []
    position = 0
    while position < len(words):
        word = words[position]
        if word[0].isdigit():
            if len(word) > MAX_DIGITS:
                raise NotArithmetic
            fraction, position = _fraction(words, position + 1)
            tokens.append(Fraction(word.replace(",", "")) + fraction)
        elif word in _NUMBER_WORDS or (word in ("a", "an") and words[position + 1 : position + 2] == ["hundred"]):
            value, position = _spoken(words, position)
            fraction, position = _fraction(words, position)
            tokens.append(value + fraction)
        elif word in _SUMS["operators"]:
            tokens.append(_SUMS["operators"][word])
            position += 2 if words[position : position + 2] in (["multiplied", "by"], ["divided", "by"]) else 1
        else:
            raise NotArithmetic
    return tokens


def _words(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic
    words: list[str] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        words += filter(None, found.groups() if found is not None else ())
        if found is None or len(words) > MAX_TOKENS:
            raise NotArithmetic
        position = found.end()
    return words


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
            run = list(takewhile(_BELOW_HUNDRED.__contains__, words[position:]))
            number, is_whole = _run(run)
            position += len(run)
            if is_whole and (total or group or not _MULTIPLIERS.isdisjoint(words[position : position + 1])):
                raise NotArithmetic
            group += number
            continue
        if word in ("a", "an"):
            group += 1
        elif word == "hundred":
            group = max(group, 1) * 100
        elif word in _SCALES:
            total, group = total + max(group, 1) * _SCALES[word], 0
        elif not (word == "and" and group % 100 == 0 and words[position - 1] in _MULTIPLIERS):
            break
        position += 1
    value = Fraction(total + group)
    if words[position : position + 1] == ["point"] and position + 1 < len(words):
        digits = list(takewhile(SMALL_NUMBERS[:10].__contains__, words[position + 1 :]))
        if not 0 < len(digits) <= MAX_DIGITS:
            raise NotArithmetic
        value += Fraction(int("".join(str(_UNITS[digit]) for digit in digits)), 10 ** len(digits))
        position += 1 + len(digits)
    return value, position


def _run(words: list[str]) -> tuple[int, bool]:
    """The number that words below a hundred name, and whether nothing can follow: "nineteen ninety", "one oh one"."""
    parts: list[int] = []
    for before, word in zip(["", *words], words, strict=False):
        value = _BELOW_HUNDRED[word]
        if before in TENS[2:] and 0 < value < 10:
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


# Calculations

_SIGNS: Final = {"$": "dollars", "€": "euros"}
_WRITTEN_MONEY: Final = re.compile(r"([$€])\s?(\d+(?:,\d{3})*(?:\.\d+)?)")
#: Said behind numbers, and once behind the result.
_MONEY: Final = re.compile(r"\s*\b(dollar|euro|buck|cent)s?\b", re.I)
_MISHEARD: Final = re.compile(rf"\b(?:{'|'.join(_SUMS['misheard'])})\b", re.I)
_RESULT: Final = re.compile(r"\bThat (?:makes|is) (?:about )?(?P<value>(?:minus )?\d+(?:\.\d+)?)\b(?!\.\d)")


def calculate(asked: Asked, slots: Slots) -> str | None:
    expression, currency = _without_money(slots["expression"])
    for words in (expression, _MISHEARD.sub(lambda found: _SUMS["misheard"][found[0].lower()], expression)):
        try:
            value = in_digits(evaluate(words))
            unit = f" {currency}{'' if value == '1' else 's'}" if currency else ""
            return f"That is {value} percent." if "percent" in slots else f"That makes {value}{unit}."
        except ZeroDivisionError:
            return slots.get("by_zero", "Nothing can be divided by zero.")
        except OverflowError:
            return "That number is too large for me."
        except NotArithmetic:
            continue
    return None


def calculate_on(asked: Asked, slots: Slots) -> str | None:
    """A calculation that begins with the last result: "and times three"."""
    operation = slots.get("operation") or f"{_SUMS['verbs'][slots['verb'].lower()]} {slots['number']}"
    result = _last_result(asked.talk)
    if result is not None:
        return calculate(asked, {"expression": f"({in_digits(result).removeprefix('about ')}) {operation}"})
    # "Minus three" is a number, too.
    is_calculation = calculate(asked, {"expression": f"0 {operation}"}) and not re.match(r"[-−]|minus", operation, re.I)
    return "I have no number to begin with." if is_calculation else None


def worked_out(asked: Asked, slots: Slots) -> str | None:
    """The result of a formula whose numbers were said: ``slots`` has it, and beside its names what stood for them."""
    words = {name: words for name, words in slots.items() if f"{{{name}}}" in slots["formula"]}
    values = {name: _value(asked, _without_money(said)[0]) for name, said in words.items()}
    if None in values.values():
        return None
    money = _without_money(" ".join(words.values()))[1] if "percent" not in slots else ""
    expression = slots["formula"].format_map({name: f"({value})" for name, value in values.items()})
    return calculate(asked, {**slots, "expression": f"{expression} {money}"})


def root(asked: Asked, slots: Slots) -> str | None:
    value = _value(asked, slots["number"])
    if value is None or value < 0:
        return None if value is None else "Negative numbers have no real square root."
    # To ten places, and exact where the root is.
    exact = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    return f"That makes {in_digits(exact if exact * exact == value else Fraction(isqrt(int(value * 10**20)), 10**10))}."


def _without_money(words: str) -> tuple[str, str]:
    """The words without the one currency that they name, and that currency; empty where they name none, or several."""
    words = _WRITTEN_MONEY.sub(lambda found: f"{found[2]} {_SIGNS[found[1]]}", words)
    named = {found.lower() for found in _MONEY.findall(words)}
    return (_MONEY.sub("", words), named.pop()) if len(named) == 1 else (words, "")


def _last_result(talk: Talk) -> Fraction | None:
    """What the last calculation made."""
    found = (_RESULT.findall(answer) for answer in reversed(talk.answers))
    return next((parse_value(results[-1]) for results in found if results), None)


def _value(asked: Asked, words: str) -> Fraction | None:
    """The number that ``words`` are, or the last result, if they stand for that."""
    if words in _SUMS["words"]["result"].split("|"):
        return _last_result(asked.talk)
    return Fraction(_SUMS["values"][words]) if words in _SUMS["values"] else parse_value(words)


# Units: lengths, weights, volumes, temperatures, times, speeds and data

#: Significant figures of a result, and the largest and smallest one that is told.
_FIGURES: Final = 4
_LARGEST: Final = 10**15
_SMALLEST: Final = Fraction(1, 10**6)
_MOST_PLACES: Final = 6
_ABSOLUTE_ZERO: Final = Fraction("-273.15")


class _Unit(NamedTuple):
    """``size`` is in the first unit of its kind; ``zero`` is where its scale begins, in that unit."""

    kind: str
    one: str
    many: str
    size: Fraction
    zero: Fraction


@cache
def units() -> dict[str, _Unit]:
    """Units by all their names."""
    found: dict[str, _Unit] = {}
    for kind, rows in _SUMS["units"].items():
        for one, (many, names, size, *zero) in rows.items():
            unit = _Unit(kind, one, many, Fraction(size), Fraction(*zero))
            found |= dict.fromkeys((one, many, *expanded(names)), unit)
    return found


def converted(asked: Asked, slots: Slots) -> str | None:
    source, target = units()[slots["from"]], units()[slots["to"]]
    if (value := _value(asked, slots["number"])) is None:
        return None
    measure = _amount(value, source)
    if "more" in slots:
        more, smaller = parse_value(slots["more"]), units()[slots.get("smaller", "inch")]
        if more is None or smaller.kind != source.kind or not ("smaller" in slots or source.one == "foot"):
            return None
        measure = f"{measure} {_amount(more, smaller)}"
        value += more * smaller.size / source.size
    if source.kind == "volume" and target.one == "ounce":
        target = units()["fluid ounce"]
    if source.kind != target.kind:
        return f"I can't turn {source.many} into {target.many}."
    amount = value * source.size + source.zero
    if source.kind == "temperature" and amount < _ABSOLUTE_ZERO:
        return "Nothing is as cold as that."
    result = (amount - target.zero) / target.size
    if value != 0 and (abs(result) > _LARGEST or 0 < abs(result) < _SMALLEST):
        return "That number is beyond me."
    # To four figures; whole numbers as they are.
    places = 0 if result == 0 else min(_MOST_PLACES, max(0, _FIGURES - 1 - floor(log10(abs(result)))))
    rounded = result if result.denominator == 1 else round(result, places)
    verb = "is" if value == 1 else "are"
    told = f"{measure} {verb} {'' if rounded == result else 'about '}{_amount(rounded, target)}."
    return told[:1].upper() + told[1:]


def _amount(value: Fraction, unit: _Unit) -> str:
    return f"{in_digits(value)} {unit.one if value == 1 else unit.many}"
