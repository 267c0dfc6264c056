"""The functions with which rules compute answers: sums, units, letters, chance, times, days, and facts from the user.

The tables in ``intents/`` name these functions. Such a function gets the sentence of the user and the slots of the
intent (the words that a pattern's named groups matched), and returns the answer, or None if the intent does not fit.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, timedelta
from fractions import Fraction
from functools import cache
from itertools import chain, islice, takewhile
from math import floor, isqrt, log10
from operator import add, mul, sub, truediv
from typing import Any, Final, NamedTuple, TypeAlias

from omni_ws.engine.llm.questions import (
    Asked,
    Slots,
    Talk,
    expanded,
    inserted,
    plain_words,
    read,
    requests,
)
from omni_ws.engine.spoken.english_numbers import (
    SMALL_NUMBERS,
    TENS,
    ordinal,
)

# Numbers as people say and write them, calculations with them ("two plus three times four"), and units.


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
    """Raised for a text that is not an arithmetic expression."""


def parse_number(text: str) -> int | None:
    """Return the whole number, 0 or above, that ``text`` is ("one hundred and five", "20"); else None."""
    value = parse_value(text)
    return int(value) if value is not None and value.denominator == 1 and value >= 0 else None


def parse_value(text: str) -> Fraction | None:
    """Return the number that ``text`` is, in words or digits ("minus two point five", "1,000"), or None."""
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
    """Return the value of a calculation, in words or signs ("two times 3").

    Raises NotArithmetic for other texts, a single number among them, and for a result beyond MAX_RESULT;
    ZeroDivisionError for a division by zero; OverflowError for too large a power.
    """
    tokens = _tokens(text.lower())
    if len(tokens) < 2:
        raise NotArithmetic
    value = _taken(tokens)
    if tokens or abs(value) > MAX_RESULT or value.denominator > MAX_RESULT:
        raise NotArithmetic
    return value


def in_digits(value: Fraction) -> str:
    """Return ``value`` as text to read or speak, such as "minus 2.5".

    It is rounded to six places; if this changes it, the text begins with "about".
    """
    rounded = round(abs(value), 6)
    about = "about " if rounded != abs(value) else ""
    whole, decimals = divmod(int(rounded * 10**6), 10**6)
    point = f".{f'{decimals:06d}'.rstrip('0') or '0'}" if value.denominator != 1 else ""
    return f"{about}{'minus ' if value < 0 else ''}{whole}{point}"


def _taken(tokens: list[_Token], binding: int = 1) -> Fraction:
    """Remove the expression at the front of ``tokens``, up to an operator weaker than ``binding``; return its value."""
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
    """Return the fraction at ``position``, which follows a number ("and a half"), or 0; and the position after it."""
    match words[position : position + 3]:
        case ["and", "a", name] if name in _FRACTIONS:
            return Fraction(1, _FRACTIONS[name]), position + 3
    return Fraction(0), position


def _spoken(words: list[str], position: int) -> tuple[Fraction, int]:
    """Return the number in words that starts at ``position``, and the position after its last word."""
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
    """Return the number that words below a hundred name, and whether it is complete, so that no "hundred" may follow.

    Examples of complete numbers: "nineteen ninety", "one oh one".
    """
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
    """Return the answer to a calculation that begins with the last result: "and times three"."""
    operation = slots.get("operation") or f"{_SUMS['verbs'][slots['verb'].lower()]} {slots['number']}"
    result = _last_result(asked.talk)
    if result is not None:
        return calculate(asked, {"expression": f"({in_digits(result).removeprefix('about ')}) {operation}"})
    # "Minus three" is a number, too.
    is_calculation = calculate(asked, {"expression": f"0 {operation}"}) and not re.match(r"[-−]|minus", operation, re.I)
    return "I have no number to begin with." if is_calculation else None


def worked_out(asked: Asked, slots: Slots) -> str | None:
    """Return the answer to a calculation by formula.

    ``slots["formula"]`` contains names in braces; the slots of these names have the numbers that the user said.
    """
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
    """Return ``words`` without the currency that they name, and this currency; "" if they name none or several."""
    words = _WRITTEN_MONEY.sub(lambda found: f"{found[2]} {_SIGNS[found[1]]}", words)
    named = {found.lower() for found in _MONEY.findall(words)}
    return (_MONEY.sub("", words), named.pop()) if len(named) == 1 else (words, "")


def _last_result(talk: Talk) -> Fraction | None:
    """Return the result of the last calculation in the conversation; None if there was none."""
    found = (_RESULT.findall(answer) for answer in reversed(talk.answers))
    return next((parse_value(results[-1]) for results in found if results), None)


def _value(asked: Asked, words: str) -> Fraction | None:
    """Return the number that ``words`` name, or the last result if they mean it ("that"); None for other words."""
    if words in _SUMS["words"]["result"].split("|"):
        return _last_result(asked.talk)
    return Fraction(_SUMS["values"][words]) if words in _SUMS["values"] else parse_value(words)


# Units: lengths, weights, volumes, temperatures, times, speeds and data

#: The significant figures of a result, and the largest and the smallest result that is spoken.
_FIGURES: Final = 4
_LARGEST: Final = 10**15
_SMALLEST: Final = Fraction(1, 10**6)
_MOST_PLACES: Final = 6
_ABSOLUTE_ZERO: Final = Fraction("-273.15")


class _Unit(NamedTuple):
    """A unit of measurement, with its names in singular (``one``) and plural (``many``).

    ``size`` is the unit in terms of the first unit of its ``kind``; ``zero`` is the zero point of its scale, in the
    same first unit.
    """

    kind: str
    one: str
    many: str
    size: Fraction
    zero: Fraction


@cache
def units() -> dict[str, _Unit]:
    """Return the units by each of their names."""
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


# Spelling, repeating and counting, and what chance decides: coins, dice and choices.


MAX_COUNT: Final = 1000
NUMBERS_PER_SENTENCE: Final = 10
MAX_SPELLED_LETTERS: Final = 200
MAX_DICE: Final = 20
MAX_SIDES: Final = 1000
_MAX_NUMBER: Final = 10**12

_WORDS: Final[dict[str, str]] = read("letters")["words"]
REPEAT: Final = re.compile(inserted(_WORDS["repeat"], {}), re.I)
SPELL: Final = re.compile(_WORDS["spell"], re.I)
#: "Say yes or no: is the earth flat?" wants one of the words, not all.
_CHOICE: Final = re.compile(inserted(_WORDS["one_of_these"], {}), re.I)
_SPELLED: Final = re.compile(rf"\b{SPELL.pattern}(?!(?:{_WORDS['last_word']})\b)(.{{1,60}})", re.I)


def repeated(words: str) -> str | None:
    """Return the ``words`` to repeat, as a sentence; None if there are none, or if they are a choice ("yes or no")."""
    words = words.strip(' ,:"“”')
    if _CHOICE.match(words) is not None or not any(map(str.isalnum, words)):
        return None
    return words if words[-1] in ".!?…" else f"{words}."


def spelled(words: str) -> str | None:
    """Return the letters of ``words``, separated by commas, or a refusal of too many; None if there are none."""
    letters = list(islice(filter(str.isalnum, words), MAX_SPELLED_LETTERS + 1))
    if len(letters) > MAX_SPELLED_LETTERS:
        return f"I spell up to {MAX_SPELLED_LETTERS} letters."
    return ", ".join(letter.upper() for letter in letters) + "." if letters else None


def repeat(asked: Asked, slots: Slots) -> str | None:
    return repeated(slots["words"])


def spell(asked: Asked, slots: Slots) -> str | None:
    return spelled(slots["words"])


def backwards(asked: Asked, slots: Slots) -> str | None:
    words = slots["words"]
    if words.lower() in _WORDS["last_word"].split("|"):
        words = next((found[1] for heard in reversed(asked.talk.heard) if (found := _SPELLED.search(heard))), words)
    return spelled(words[::-1])


def how_many_letters(asked: Asked, slots: Slots) -> str | None:
    word, letter = "".join(filter(str.isalnum, slots["word"])), slots.get("letter", "")
    if not word:
        return None
    if letter:
        number = word.casefold().count(letter.casefold())
        times = {0: "is not", 1: "is once"}.get(number, f"is {number} times")
        return f"The letter {letter.upper()} {times} in {slots['word'].strip()}."
    return f"{slots['word'].strip().capitalize()} has {len(word)} letter{'s' if len(word) != 1 else ''}."


def count(asked: Asked, slots: Slots) -> str | Iterator[str] | None:
    """Return the numbers from the slot ``first`` (default 1) to the slot ``last`` (default 0), in sentences."""
    first, last = parse_number(slots.get("first", "1")), parse_number(slots.get("last", "0"))
    if first is None or last is None:
        return None
    if max(first, last) > MAX_COUNT:
        return f"I count {'to' if 'last' in slots else 'from'} {MAX_COUNT} at most."
    numbers = range(first, last + 1) if last >= first else range(first, last - 1, -1)
    parts = range(0, len(numbers), NUMBERS_PER_SENTENCE)
    return (", ".join(map(str, numbers[part : part + NUMBERS_PER_SENTENCE])) + "." for part in parts)


def coins(asked: Asked, slots: Slots) -> str | None:
    number = parse_number(slots["number"])
    if number is None or number < 1:
        return None
    heads = sum(asked.chance.choice((0, 1)) for _ in range(min(number, MAX_DICE)))
    return f"{heads} heads, and {number - heads} tails." if number <= MAX_DICE else f"I toss {MAX_DICE} coins at most."


def dice(asked: Asked, slots: Slots) -> str | None:
    number, sides = parse_number(slots.get("number", "one")), parse_number(slots.get("sides", "six"))
    if slots.get("number") in ("a", "an", "the", "some"):
        number = 1
    if number is None or sides is None or number < 1 or sides < 2:
        return None
    if number > MAX_DICE or sides > MAX_SIDES:
        return f"I roll {MAX_DICE} dice at most, with {MAX_SIDES} sides."
    *others, last = [asked.chance.randint(1, sides) for _ in range(number)]
    if not others:
        return f"It's {'an' if str(last)[0] == '8' or last in (11, 18) else 'a'} {last}."
    return f"{', '.join(map(str, others))} and {last}. That makes {sum(others) + last}."


def card(asked: Asked, slots: Slots) -> str:
    rank = asked.chance.choice(("ace", *SMALL_NUMBERS[2:11], "jack", "queen", "king"))
    return f"The {rank} of {asked.chance.choice(('clubs', 'diamonds', 'hearts', 'spades'))}."


def number(asked: Asked, slots: Slots) -> str | None:
    first, last = parse_number(slots.get("first", "1")), parse_number(slots.get("last", "100"))
    if first is None or last is None or max(first, last) > _MAX_NUMBER:
        return None
    return f"{asked.chance.randint(min(first, last), max(first, last))}."


def choice(asked: Asked, slots: Slots) -> str | None:
    parts = re.split(r",\s*(?:or\s+|and\s+)?|\s+(?:or|and)\s+", slots["things"])
    things = [thing for part in parts if (thing := part.strip(" ,?.!"))]
    if not 2 <= len(things) <= 20 or max(map(len, things)) > 60 or things[-1].lower() == "not":
        return None  # "or not" asks for advice
    chosen = asked.chance.choice(things)
    return f"{chosen[:1].upper()}{chosen[1:]}."


def hand(asked: Asked, slots: Slots) -> str:
    """Return the answer to a round of rock, paper, scissors; the slot ``hand`` is the user's choice."""
    beats = {"rock": "scissors", "scissors": "paper", "paper": "rock"}
    mine, yours = asked.chance.choice(tuple(beats)), slots.get("hand")
    if yours is None:
        return f"I take {mine}."
    return (
        f"I take {mine}{', too. Nobody wins' if mine == yours else '. I win' if beats[mine] == yours else '. You win'}."
    )


# The time of day, and days of the calendar as people name them: tomorrow, next Friday, July 4th, in ten days.


_CLOCK: Final = read("clock")
#: Of minutes or hours.
_MOST_LATER: Final = 1000
_MOST_DAYS: Final = 1_000_000
_MONTHS: Final = {name.lower(): number for number, name in enumerate(calendar.month_name) if name}
_SHORT_MONTHS: Final = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS: Final = {name.lower(): number for number, name in enumerate(calendar.day_name)}
_NEAR: Final[dict[str, int]] = _CLOCK["near"]
_ORDINALS: Final = {ordinal(str(number)): number for number in (*range(1, 21), 30)}
_MONTH: Final = rf"(?P<month>{'|'.join((*_MONTHS, *_SHORT_MONTHS, 'sept'))})"
_DATES: Final = tuple(
    re.compile(form.replace("{month}", _MONTH).replace("{day}", "(?P<day>[a-z0-9]+(?: [a-z]+)?)"))
    for form in _CLOCK["dates"]
)
_AHEAD: Final = re.compile(r"(?:in )?(?P<number>.+) (?P<unit>days?|weeks?)(?: (?P<way>from now|from today|ago|later))?")


def time_later(asked: Asked, slots: Slots) -> str | None:
    number = _value(asked, slots["number"])
    if number is None or not 0 < number <= _MOST_LATER:
        return None
    return _clock(asked.now + timedelta(**{f"{slots['unit']}s": float(number)}))


def which_day(asked: Asked, slots: Slots) -> str | None:
    """Return the answer to a question for the weekday of a date ("July 4th") or the date of a day ("next Friday")."""
    today = asked.now.date()
    if (found := day_named(slots["day"], today, way=_way(slots))) is None:
        return None
    name, day = found
    is_past = "was" if day < today else "is"
    return f"{name} {is_past} {in_full(day)}." if name else f"{in_full(day, weekday=False)} {is_past} a {day:%A}."


def days_until(asked: Asked, slots: Slots) -> str | None:
    today = asked.now.date()
    if (found := day_named(slots["day"], today, way=_way(slots))) is None:
        return None
    name, day = found[0] or in_full(found[1], weekday=False), found[1]
    days = (day - today).days
    many = _counted(abs(days), "day")
    if days <= 0:
        return f"{name} was {many} ago." if days else f"{name} is today."
    if slots.get("unit") == "weeks" and days >= 7:
        weeks, rest = divmod(days, 7)
        many = _counted(weeks, "week") + (f" and {_counted(rest, 'day')}" if rest else "")
    return f"There {'is' if days == 1 else 'are'} {many} until {name}."


def leap_year(asked: Asked, slots: Slots) -> str | None:
    year = parse_number(slots["year"]) if "year" in slots else asked.now.year
    if year is None or not 0 < year <= 9999:
        return None
    return f"{year} is {'' if calendar.isleap(year) else 'not '}a leap year."


def in_full(day: date, *, weekday: bool = True) -> str:
    """Return a date as it is spoken and written, such as "Tuesday, March 4, 2031"."""
    return f"{f'{day:%A}, ' if weekday else ''}{day:%B} {day.day}, {day.year}"


def _way(slots: Slots) -> int:
    """Return the ``way`` for ``day_named`` of a question: "when was Easter" asks for the last one."""
    return 0 if "this_year" in slots else -1 if "past" in slots else 1


def day_named(words: str, today: date, *, way: int = 1) -> tuple[str, date] | None:
    """Return the name of the day that ``words`` mean, such as "Tomorrow" or "Easter", and its date.

    The name is "" for a bare date. Of feasts, weekdays and dates without a year, the next one is meant (``way`` 1), the
    last one (-1), or that of this year (0). Returns None if the words mean no day.
    """
    shorter = re.sub(r"^(?:on|the next|until) |(?: this year| day)$", "", words)
    try:
        for name in (words, shorter):
            if name in _NEAR:
                return name[:1].upper() + name[1:], today + timedelta(_NEAR[name])
            if (feast := _feast(name, today, way)) is not None:
                return feast
        return _weekday_named(shorter, today, way) or _ahead(shorter, today) or _date_named(shorter, today, way)
    except (ValueError, OverflowError):
        return None


def _clock(now: datetime) -> str:
    return f"{now.hour % 12 or 12}:{now.minute:02d} {'AM' if now.hour < 12 else 'PM'}"


def _counted(number: int, unit: str) -> str:
    return f"one {unit}" if number == 1 else f"{number} {unit}s"


def _years(today: date, way: int) -> Iterable[int]:
    """Return the years in which a date may be, see ``day_named``; February 29 may be some years away."""
    return range(today.year, today.year + 9 * way, way) if way else (today.year,)


def _feast(words: str, today: date, way: int) -> tuple[str, date] | None:
    """Return the name and the date of the feast that ``words`` name, see ``day_named``; None if they name none."""
    for name, (month, day, names) in _CLOCK["feasts"].items():
        if words in expanded(names):
            for year in _years(today, way):
                found = _easter(year) if name == "Easter" else date(year, month, day)
                if name == "Thanksgiving":  # the fourth Thursday
                    found += timedelta((3 - found.weekday()) % 7)
                if (found - today).days * way >= 0:
                    return name, found
    return None


def _weekday_named(words: str, today: date, way: int) -> tuple[str, date] | None:
    which, _, name = words.rpartition(" ")
    if name not in _WEEKDAYS or which not in ("", "next", "this", "last", "the coming"):
        return None
    days = (_WEEKDAYS[name] - today.weekday() - 1) % 7 + 1
    if which == "last" or (not which and way < 0):
        return f"{which.capitalize()} {name.capitalize()}".strip(), today + timedelta(days - 7 - 7 * (days == 7))
    return f"{'Next ' if which == 'next' else ''}{name.capitalize()}", today + timedelta(days)


def _ahead(words: str, today: date) -> tuple[str, date] | None:
    match = _AHEAD.fullmatch(words)
    if match is None or not (words.startswith("in ") or match["way"]):
        return None
    number = 1 if match["number"] in ("a", "one") else parse_number(match["number"])
    if number is None or number > _MOST_DAYS:
        return None
    days = number * (7 if match["unit"].startswith("week") else 1)
    return words[:1].upper() + words[1:], today + timedelta(-days if match["way"] == "ago" else days)


def _date_named(words: str, today: date, way: int) -> tuple[str, date] | None:
    match = next(filter(None, (form.fullmatch(words) for form in _DATES)), None)
    day = None if match is None else _day_of_month(match["day"])
    if match is None or day is None:
        return None
    named = match["month"]
    month = int(named) if named.isdigit() else _MONTHS.get(named) or _SHORT_MONTHS[named[:3]]
    if match["year"]:
        return "", date(int(match["year"]), month, day)
    years = (year for year in _years(today, way) if day <= calendar.monthrange(year, month)[1])
    return next((("", on) for year in years if ((on := date(year, month, day)) - today).days * way >= 0), None)


def _day_of_month(words: str) -> int | None:
    if (digits := re.fullmatch(r"(\d{1,2})(?: ?(?:st|nd|rd|th))?", words)) is not None:
        return int(digits[1])
    tens, _, last = words.rpartition(" ")
    number = _ORDINALS.get(last) or parse_number(last)
    return None if number is None else number + {"": 0, "twenty": 20, "thirty": 30}.get(tens, 100)


def _easter(year: int) -> date:
    """Return Easter Sunday of the Gregorian calendar, by the anonymous algorithm of 1876."""
    century, rest = divmod(year, 100)
    golden = year % 19
    moon = (19 * golden + century - century // 4 - (century - (century + 8) // 25 + 1) // 3 + 15) % 30
    weekday = (32 + 2 * (century % 4) + 2 * (rest // 4) - moon - rest % 4) % 7
    shift = (golden + 11 * moon + 22 * weekday) // 451
    month, day = divmod(moon + weekday - 7 * shift + 114, 31)
    return date(year, month, day + 1)


TIMES: Final[dict[str, Callable[[Asked, Slots], str | None]]] = {
    "time": lambda asked, slots: _clock(asked.now),
    "date": lambda asked, slots: in_full(asked.now.date()),
    "day": lambda asked, slots: f"{asked.now:%A}",
    "month": lambda asked, slots: f"{asked.now:%B}",
    "year": lambda asked, slots: str(asked.now.year),
    "week": lambda asked, slots: str(asked.now.isocalendar().week),
    "on_weekend": lambda asked, slots: "Yes" if asked.now.weekday() >= 5 else "No",
    "on_weekday": lambda asked, slots: "Yes" if asked.now.weekday() < 5 else "No",
    "on_day": lambda asked, slots: "Yes" if f"{asked.now:%A}".lower() == slots["weekday"] else "No",
    "time_later": time_later,
    "day_named": which_day,
    "days_until": days_until,
    "leap_year": leap_year,
}


# What the conversation so far tells: names and favorites, earlier words, and riddles that are under way.


Value: TypeAlias = Callable[[Asked, Slots], str | None]

_TELLING: Final = read("told")
#: Words with which a name ends, and with which none begins.
_NO_NAME: Final = frozenset(_TELLING["no_names"].split())
_DAY_NAMES: Final = frozenset(_TELLING["weekdays"].split())
#: Written with a capital, too, and no names of people.
_NOBODY: Final = _NO_NAME | _DAY_NAMES | frozenset(_TELLING["nations"].split())
_MOST_NAMES: Final = 3
_MOST_LETTERS: Final = 40
_MOST_VALUE_WORDS: Final = 8
_NAMED: Final = re.compile(rf"\b{_TELLING['words']['named']}")
_WRITTEN_NAME: Final = re.compile(inserted(_TELLING["words"]["written_name"], {}))
#: What is told → its form.
_FACTS: Final = {name: re.compile(inserted(form, _TELLING["words"])) for name, form in _TELLING["facts"].items()}
_OLDEST: Final = 130
#: Where a sentence goes on with another fact, as in "I'm Ann and my dog is called Rex".
_NEXT_FACT: Final = re.compile(r" and (?=(?:my|i (?:live|am)) )")
_MOST_FACTS: Final = 8


# Names and facts


def name_told(talk: Talk) -> str | None:
    """Return the name that the user gave last ("call me Ann"); None if there is none."""
    return next((name for heard in reversed(talk.heard) if (name := _own_name(heard)) is not None), None)


def age(asked: Asked, slots: Slots) -> str | None:
    number = parse_number(slots["age"])
    return asked.talk.fresh(_TELLING["ages"]) if number is not None and 0 < number <= _OLDEST else None


def _own_name(text: str) -> str | None:
    if (found := _NAMED.search(plain_words(text))) is not None:
        if found[0].startswith("call me") and found["name"].split()[0] in _DAY_NAMES:
            return None  # it is when to call
        return _name(found["name"], text)
    written = _WRITTEN_NAME.fullmatch(text.strip())
    return None if written is None or written["name"].split()[0].lower() in _NOBODY else written["name"]


def _name(words: str, text: str) -> str | None:
    """Return the name with which the plain ``words`` begin, with its capitals in ``text``, or else capitalised."""
    name: list[str] = []
    for word in words.split()[:_MOST_NAMES]:
        if word in _NO_NAME or not word[0].isalpha() or len(word) > _MOST_LETTERS:
            break
        written = re.search(rf"\b{re.escape(word)}\b", text, re.I)
        name.append(word.capitalize() if written is None or written[0] == word else written[0])
    return " ".join(name) or None


def _facts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the facts that the user states in ``text``, such as ("favorite color", "blue"), with values as written."""
    clauses = _NEXT_FACT.split(plain_words(text), maxsplit=_MOST_FACTS)
    for words in chain.from_iterable(reversed([*requests(clause)]) for clause in clauses):
        for name, form in _FACTS.items():
            if (found := form.fullmatch(words)) is not None and found["value"].count(" ") < _MOST_VALUE_WORDS:
                what, value = _what(found.groupdict()) or name, found["value"]
                if what.endswith(" name"):
                    value = _name(value, text) or ""
                elif (written := re.search(r"\W*".join(map(re.escape, value.split())), text, re.I)) is not None:
                    value = written[0]
                if value:
                    yield what, value


def _what(slots: Slots) -> str:
    return slots.get("what") or (f"{slots['pet']}'s name" if slots.get("pet") else "")


def _noted(asked: Asked, slots: Slots) -> str | None:
    return next((f"{what} is {value}" for what, value in _facts(asked.text)), None)


def _told(asked: Asked, slots: Slots) -> str | None:
    """Return the value, as the user last stated it, of the fact asked for ("What is my name?"); None if not stated."""
    facts = (fact for heard in reversed(asked.talk.heard) for fact in _facts(heard))
    return next((value for what, value in facts if what == (_what(slots) or slots["fact"])), None)


# What was said

_ASKING: Final = frozenset(_TELLING["asking"].split())
_DOING: Final = frozenset(_TELLING["doing"].split())
UNKNOWN: Final[dict[str, list[str]]] = _TELLING["unknown"]


def sorry(asked: Asked, slots: Slots) -> str:
    """Return the last answer again for "Sorry?", and a reply to the apology for "Sorry"."""
    again = asked.text.endswith("?") and asked.talk.last_answer
    return again or asked.talk.fresh(_TELLING["excused"])


def _which_heard(asked: Asked, slots: Slots) -> str | None:
    """Return the answer to "What was the first thing I said?"; the slot ``place`` has the ordinal.

    If the user asks for a question ("What did I ask first?"), only questions count, if there are any.
    """
    said = asked.talk.all_heard
    if "ask" in slots:
        said = [words for words in said if is_question(words)] or said
    place = _TELLING["places"][slots["place"]]
    if place < len(said):
        return _quoted(said[place])
    return "I haven't heard that many from you." if said else None


def is_question(text: str) -> bool:
    """Whether ``text`` is a question, by its mark or its first word; speech recognition may leave the mark out."""
    return text.rstrip().endswith("?") or _first_word(text) in _ASKING


def kind_of(text: str) -> str:
    """Return the kind of a text that no rule fits, which is a key of ``UNKNOWN``, such as "question" or "foreign"."""
    letters = [letter for letter in text[:200] if letter.isalpha()]
    if not any(map(str.isalnum, text)):
        return "wordless"
    if sum(letter.isascii() for letter in letters) < len(letters) / 2:
        return "foreign"
    if is_question(text):
        return "question"
    return "command" if _first_word(text) in _DOING else "statement"


def _first_word(text: str) -> str:
    """Return the first plain word of ``text`` after courtesies such as "please"."""
    *_, request = requests(plain_words(text))
    return request.split(" ", 1)[0]


def _quoted(heard: str) -> str | None:
    if not heard:
        return None
    return f"You asked: {heard.rstrip('.!?')}?" if is_question(heard) else f"I heard: {heard.rstrip('.!')}."


# Riddles and jokes that are under way

SAYINGS: Final[dict[str, Any]] = _TELLING["sayings"]
RIDDLES: Final[dict[str, list[str]]] = SAYINGS["riddle"]


def solution(asked: Asked, slots: Slots) -> str | None:
    """Return the solution of the riddle in the last answer; None if there was no riddle."""
    return next((words[0] for riddle, words in RIDDLES.items() if asked.talk.last_answer.endswith(riddle)), None)


def solved(asked: Asked) -> str | None:
    """Return the reply to a guess at the riddle in the last answer; None if the sentence is no such guess."""
    right = next((words for riddle, (_, *words) in RIDDLES.items() if asked.talk.last_answer.endswith(riddle)), ())
    if any(f" {word} " in f" {asked.words} " for word in right):
        return "Right! Well done."
    if right and asked.words in _TELLING["given_up"]:
        return f"It is {solution(asked, {})}."
    is_guess = asked.words.count(" ") < 3 and asked.words.split(" ")[0] in ("a", "an", "the", "is", "your", "it")
    return f"A good try. It is {solution(asked, {})}." if right and is_guess else None


def _saying(wordings: Iterable[str]) -> Value:
    return lambda asked, slots: asked.talk.fresh(tuple(wordings))


TELLINGS: Final[dict[str, Value]] = {
    "name": lambda asked, slots: name_told(asked.talk),
    "new_name": lambda asked, slots: _own_name(asked.text),
    "known_name": lambda asked, slots: name if (name := _own_name(asked.text)) == name_told(asked.talk) else None,
    "noted": _noted,
    "told": _told,
    "what": lambda asked, slots: _what(slots),
    "solution": solution,
    "last_answer": lambda asked, slots: asked.talk.last_answer or None,
    "all_said": lambda asked, slots: "That's all that I had to say." if asked.talk.last_answer else None,
    "last_heard": lambda asked, slots: _quoted(asked.talk.last_heard),
    "which_heard": _which_heard,
    **{name: _saying(wordings) for name, wordings in SAYINGS.items()},
}
