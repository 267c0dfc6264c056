"""Arithmetic: calculations, percentages, roots and powers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from math import isqrt
from typing import Final

from omni_ws.engine.llm.arithmetic import NotArithmetic, evaluate, in_digits, parse_value
from omni_ws.engine.llm.intents.intent import Asked, Intent, Slots
from omni_ws.engine.llm.talk import Talk

_MAX_EXPONENT: Final = 100
_MAX_POWER: Final = 10**30
_ASKS: Final = r"(?:what is|what does|how much is|how much|how many is|calculate|compute|work out|what|the)? ?(?:the )?"
#: What a recogniser hears instead of numbers. Only where the rest is a calculation.
_MISHEARD: Final = {
    "for": "four",
    "to": "two",
    "too": "two",
    "won": "one",
    "ate": "eight",
    "tree": "three",
    "free": "three",
    "sex": "six",
    "tin": "ten",
}
_SIGNS: Final = {"$": "dollars", "€": "euros"}
_WRITTEN_MONEY: Final = re.compile(r"([$€])\s?(\d+(?:,\d{3})*(?:\.\d+)?)")
#: Said behind numbers, and once behind the result.
_MONEY: Final = re.compile(r"\s*\b(dollar|euro|buck|cent)s?\b", re.I)
_MISHEARD_WORD: Final = re.compile(rf"\b(?:{'|'.join(_MISHEARD)})\b", re.I)
_PARTS: Final = {
    "half": 2,
    "one half": 2,
    "a half": 2,
    "a third": 3,
    "one third": 3,
    "a quarter": 4,
    "one quarter": 4,
    "a tenth": 10,
    "one tenth": 10,
    "a fifth": 5,
    "one fifth": 5,
}
#: Words that stand for the last result.
_THAT: Final = "that|it|this|the result|the answer|that number"
_RESULT: Final = re.compile(r"\bThat (?:makes|is) (?:about )?(?P<value>(?:minus )?\d+(?:\.\d+)?)\b(?!\.\d)")
_VERBS: Final = {"add": "+", "subtract": "-", "take away": "-", "multiply": "*", "divide": "/"}
_TIMES: Final = {"double": 2, "twice": 2, "triple": 3, "three times": 3, "quadruple": 4}


def _that_makes(value: Fraction, currency: str = "") -> Iterator[str]:
    unit = f" {currency}{'' if value == 1 else 's'}" if currency else ""
    return iter((f"That makes {in_digits(value)}{unit}.",))


def _without_money(words: str) -> tuple[str, str]:
    """The words without the one currency that they name, and that currency; empty where they name none, or several."""
    words = _WRITTEN_MONEY.sub(lambda found: f"{found[2]} {_SIGNS[found[1]]}", words)
    named = {found.lower() for found in _MONEY.findall(words)}
    if len(named) != 1:
        return words, ""
    return _MONEY.sub("", words), named.pop()


def _last_result(talk: Talk) -> Fraction | None:
    """What the last calculation made."""
    for answer in reversed(talk.answers):
        if found := _RESULT.findall(answer):
            return parse_value(found[-1])
    return None


def _value(asked: Asked, words: str) -> Fraction | None:
    """The number that ``words`` are, or the last result, if they stand for that."""
    return _last_result(asked.talk) if words in _THAT.split("|") else parse_value(words)


def _calculate_on(asked: Asked, slots: Slots) -> Iterator[str] | None:
    """A calculation that begins with the last result: "and times three"."""
    operation = slots.get("operation") or f"{_VERBS[slots['verb'].lower()]} {slots['number']}"
    result = _last_result(asked.talk)
    if result is not None:
        return _calculate(asked, {"expression": f"({in_digits(result).removeprefix('about ')}) {operation}"})
    try:
        evaluate(f"0 {operation}")
    except (NotArithmetic, ZeroDivisionError):
        return None
    # "Minus three" is a number, too.
    return None if re.match(r"[-−]|minus", operation, re.I) else iter(("I have no number to begin with.",))


def _calculate(asked: Asked, slots: Slots) -> Iterator[str] | None:
    expression, currency = _without_money(slots["expression"])
    for words in dict.fromkeys((expression, _MISHEARD_WORD.sub(lambda found: _MISHEARD[found[0].lower()], expression))):
        try:
            return _that_makes(evaluate(words), currency)
        except ZeroDivisionError:
            return iter(("Nothing can be divided by zero.",))
        except NotArithmetic:
            continue
    return None


def _calculate_two(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first, second = _value(asked, slots["first"]), _value(asked, slots["second"])
    if first is None or second is None:
        return None
    return _calculate(asked, {"expression": f"({in_digits(first)}) {_VERBS[slots['verb']]} ({in_digits(second)})"})


def _percent(asked: Asked, slots: Slots) -> Iterator[str] | None:
    words, currency = _without_money(slots["base"])
    rate, base = parse_value(slots["rate"]), _value(asked, words)
    if rate is None or base is None:
        return None
    part = base * rate / 100
    return _that_makes(
        {"less": base - part, "more": base + part}.get(next(iter({*slots} & {"less", "more"}), ""), part), currency
    )


def _share(asked: Asked, slots: Slots) -> Iterator[str] | None:
    """What percentage one number is of another."""
    part, base = parse_value(slots["part"]), _value(asked, slots["base"])
    if part is None or base is None:
        return None
    if base == 0:
        return iter(("Nothing is a percentage of zero.",))
    return iter((f"That is {in_digits(part / base * 100)} percent.",))


def _root(asked: Asked, slots: Slots) -> Iterator[str] | None:
    value = _value(asked, slots["number"])
    if value is None:
        return None
    if value < 0:
        return iter(("Negative numbers have no real square root.",))
    # To ten places, and exact where the root is.
    scale = 10**10
    root = Fraction(isqrt(value.numerator), isqrt(value.denominator))
    return _that_makes(root if root * root == value else Fraction(isqrt(int(value * scale**2)), scale))


def _power(asked: Asked, slots: Slots) -> Iterator[str] | None:
    base = _value(asked, slots["base"])
    exponent = {"squared": Fraction(2), "cubed": Fraction(3)}.get(slots["exponent"]) or parse_value(
        slots["exponent"].removesuffix(" th")
    )
    if base is None or exponent is None or exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT:
        return None
    if max(abs(base.numerator), base.denominator).bit_length() * int(exponent) > _MAX_POWER.bit_length():
        return iter(("That number is too large for me.",))
    return _that_makes(base ** int(exponent))


def _part(asked: Asked, slots: Slots) -> Iterator[str] | None:
    words, currency = _without_money(slots["number"])
    value = _value(asked, words)
    return None if value is None else _that_makes(value / _PARTS[slots["part"]], currency)


def _times(asked: Asked, slots: Slots) -> Iterator[str] | None:
    value = _value(asked, slots["number"])
    return None if value is None else _that_makes(value * _TIMES[slots["times"]])


NUMBERS = (
    Intent(
        name="percentage",
        slots=(
            rf"{_ASKS}(?P<rate>.+?) (?:percent|per cent) (?:of|from) (?P<base>.+)",
            rf"{_ASKS}(?P<rate>.+?) (?:percent|per cent) (?P<less>off|less than) (?P<base>.+)",
            rf"{_ASKS}(?P<rate>.+?) (?:percent|per cent) (?P<more>more than) (?P<base>.+)",
            rf"{_ASKS}(?P<base>.+?) (?P<less>minus|less) (?P<rate>.+?) (?:percent|per cent)",
            rf"{_ASKS}(?P<base>.+?) (?P<more>plus) (?P<rate>.+?) (?:percent|per cent)",
            rf"{_ASKS}(?:an? )?(?P<rate>.+?) (?:percent|per cent) tip (?:on|for|of) (?P<base>.+)",
        ),
        reply=_percent,
    ),
    Intent(
        name="share",
        slots=(
            r"(?:what|how many) (?:percent|percentage|per cent) (?:of )?(?P<base>.+?) is (?P<part>.+)",
            r"(?P<part>.+?) is (?:what|how many) (?:percent|percentage|per cent) of (?P<base>.+)",
            r"(?:what|how many) (?:percent|percentage|per cent) is (?P<part>.+?) of (?P<base>.+)",
        ),
        reply=_share,
    ),
    Intent(name="square root", slots=(rf"{_ASKS}(?:a )?(?:square )?root of (?P<number>.+)",), reply=_root),
    Intent(
        name="power",
        slots=(
            rf"{_ASKS}(?P<base>.+?) (?P<exponent>squared|cubed)",
            rf"{_ASKS}(?P<base>.+?) to the (?:power of )?(?P<exponent>.+?)(?: power)?",
        ),
        reply=_power,
    ),
    Intent(name="part", slots=(rf"{_ASKS}(?P<part>{'|'.join(_PARTS)}) of (?P<number>.+)",), reply=_part),
    Intent(name="times", slots=(rf"{_ASKS}(?P<times>{'|'.join(_TIMES)}) (?P<number>.+)",), reply=_times),
    Intent(
        name="two numbers",
        slots=(
            r"(?P<verb>add) (?P<first>.+?) (?:and|to|plus) (?P<second>.+)",
            r"(?P<verb>subtract|take away) (?P<second>.+?) from (?P<first>.+)",
            r"(?P<verb>multiply) (?P<first>.+?) (?:by|and|with|times) (?P<second>.+)",
            r"(?P<verb>divide) (?P<first>.+?) by (?P<second>.+)",
        ),
        reply=_calculate_two,
    ),
    Intent(
        name="calculation goes on",
        written=(
            rf"(?:(?:what(?:['’]?s| is)|how about|what about|then|and|so) )*(?:(?:{_THAT}) )?"
            r"(?P<operation>(?:(?:plus|minus|times|divided by|multiplied by) |[-−+*/×÷]).+?)",
            rf"(?:(?:then|and|now) )*(?P<verb>{'|'.join(_VERBS)})(?: (?:{_THAT}))?(?: by| with)? (?P<number>.+?)"
            rf"(?: (?:to|from) (?:{_THAT}))?",
        ),
        reply=_calculate_on,
    ),
    Intent(
        name="calculation",
        written=(
            r"(?:what does|what(?:['’]?s| is)?|how much is|how much|calculate|compute|work out|how many is|"
            r"and)?\s*(?P<expression>.+?)"
            r"(?: make| equal| equals| make together| is| is what)?",
        ),
        reply=_calculate,
    ),
    Intent(
        name="can you calculate",
        phrases=(
            "(can you calculate|can you do math|can you count|do you know math|can you add|are you good at math|do "
            "math|let us do some math|do you like math|can you do arithmetic|math|can you multiply|can you do "
            "mathematics|calculate|calculate something)",
        ),
        says=("Yes. Ask me, for example: what is seven times eight?", "I can. Try: what is twenty percent of eighty?"),
    ),
    Intent(
        name="pi",
        phrases=("(what is|what is the value of|how much is|tell me|do you know) [the number] (pi|pie)",),
        says=("Pi is about 3.14159.", "About 3.14159, and it never ends."),
    ),
)
