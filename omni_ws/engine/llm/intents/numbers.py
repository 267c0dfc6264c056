"""What rules work out exactly: calculations, units, counting and spelling, and what chance decides."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from math import isqrt
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.plain_words import NotArithmetic, Talk, evaluate, in_digits, listed, parse_number, parse_value

# Calculations, percentages, roots and powers

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
_LAST_RESULT: Final = "that|it|this|the result|the answer|that number"
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
    return _last_result(asked.talk) if words in _LAST_RESULT.split("|") else parse_value(words)


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
            rf"(?:(?:what(?:['’]?s| is)|how about|what about|then|and|so) )*(?:(?:{_LAST_RESULT}) )?"
            r"(?P<operation>(?:(?:plus|minus|times|divided by|multiplied by) |[-−+*/×÷]).+?)",
            rf"(?:(?:then|and|now) )*(?P<verb>{'|'.join(_VERBS)})(?: (?:{_LAST_RESULT}))?(?: by| with)? (?P<number>.+?)"
            rf"(?: (?:to|from) (?:{_LAST_RESULT}))?",
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


# Units: lengths, weights, volumes, temperatures, times, speeds and data


@dataclass(frozen=True, slots=True)
class _Unit:
    """``size`` is in the first unit of its kind; ``zero`` is where its scale begins, in that unit."""

    kind: str
    one: str
    many: str
    size: Fraction
    zero: Fraction = Fraction(0)


#: A kind, then: singular / plural where that is no mere "s" | size | further names. Volumes are those of the USA.
_UNIT_TABLE: Final = {
    "length": "meter|1|m; millimeter|0.001|mm; centimeter|0.01|cm; kilometer|1000|km; inch/inches|0.0254|; "
    "foot/feet|0.3048|ft; yard|0.9144|; mile|1609.344|",
    "weight": "gram|1|g; milligram|0.001|mg; kilogram|1000|kg,kilo,kilos; metric ton|1000000|tonne,tonnes,ton,tons; "
    "ounce|28.349523125|oz; pound|453.59237|lb,lbs; stone/stone|6350.29318|stones",
    "volume": "liter|1|l; milliliter|0.001|ml; teaspoon|0.00492892159375|; tablespoon|0.01478676478125|; "
    "cup|0.2365882365|; pint|0.473176473|; quart|0.946352946|; gallon|3.785411784|; fluid ounce|0.0295735295625|",
    "time": "second|1|sec; millisecond|0.001|ms; minute|60|min; hour|3600|; day|86400|; week|604800|; year|31536000|",
    "speed": "kilometer per hour/kilometers per hour|1|kmh,kph,km h,kilometers an hour; mile per hour/miles "
    "per hour|1.609344|mph,miles an hour; meter per second/meters per second|3.6|; knot|1.852|",
    "data": "byte|1|; bit|0.125|; kilobyte|1000|kb; megabyte|1000000|mb; gigabyte|1000000000|gb; terabyte|"
    "1000000000000|tb",
}
_TEMPERATURES: Final = (
    (_Unit("temperature", "degree Celsius", "degrees Celsius", Fraction(1)), "celsius,centigrade,c"),
    (
        _Unit("temperature", "degree Fahrenheit", "degrees Fahrenheit", Fraction(5, 9), Fraction(-160, 9)),
        "fahrenheit,f",
    ),
    (_Unit("temperature", "kelvin", "kelvins", Fraction(1), Fraction("-273.15")), "kelvin,kelvins,k"),
)
_ABSOLUTE_ZERO: Final = Fraction("-273.15")
#: Significant figures of a result, and the largest and smallest one that is told.
_FIGURES: Final = 4
_LARGEST: Final = 10**15
_SMALLEST: Final = Fraction(1, 10**6)
_MOST_PLACES: Final = 6


def _units() -> dict[str, _Unit]:
    units: dict[str, _Unit] = {}
    for kind, entries in _UNIT_TABLE.items():
        for entry in entries.split("; "):
            names, size, others = entry.split("|")
            one, _, many = names.partition("/")
            unit = _Unit(kind, one, many or f"{one}s", Fraction(size))
            units |= dict.fromkeys((unit.one, unit.many, *filter(None, others.split(","))), unit)
    for unit, names in _TEMPERATURES:
        units |= {f"{degrees}{name}": unit for name in names.split(",") for degrees in ("", "degrees ", "degree ")}
    return units


_UNITS: Final = _units()
_UNIT_NAMES: Final = "|".join(sorted(_UNITS, key=len, reverse=True))


def _converted(asked: Asked, slots: Slots) -> Iterator[str] | None:
    source, target = _UNITS[slots["from"]], _UNITS[slots["to"]]
    value = _SMALL_NUMBERS.get(slots["number"]) or parse_value(slots["number"])
    if value is None:
        return None
    measure = _amount(value, source)
    if "more" in slots:
        more, smaller = parse_value(slots["more"]), _UNITS[slots.get("smaller", "inch")]
        if more is None or smaller.kind != source.kind or not ("smaller" in slots or source is _UNITS["foot"]):
            return None
        measure = f"{measure} {_amount(more, smaller)}"
        value += more * smaller.size / source.size
    if source.kind == "volume" and target is _UNITS["ounce"]:
        target = _UNITS["fluid ounce"]
    if source.kind != target.kind:
        return iter((f"I can't turn {source.many} into {target.many}.",))
    amount = value * source.size + source.zero
    if source.kind == "temperature" and amount < _ABSOLUTE_ZERO:
        return iter(("Nothing is as cold as that.",))
    result = (amount - target.zero) / target.size
    rounded, is_exact = _rounded(result)
    if value != 0 and (abs(result) > _LARGEST or 0 < abs(result) < _SMALLEST):
        return iter(("That number is beyond me.",))
    about = "" if is_exact else "about "
    verb = "is" if value == 1 else "are"
    amounts = f"{measure} {verb} {about}{_amount(rounded, target)}."
    return iter((amounts[:1].upper() + amounts[1:],))


def _amount(value: Fraction, unit: _Unit) -> str:
    return f"{in_digits(value)} {unit.one if value == 1 else unit.many}"


def _rounded(value: Fraction) -> tuple[Fraction, bool]:
    """``value`` to four figures, whole numbers as they are; and whether nothing was lost."""
    if value.denominator == 1 or value == 0:
        return value, True
    places = _FIGURES - len(str(abs(int(value)))) if abs(value) >= 1 else _FIGURES
    while abs(value) * 10**places < 10 ** (_FIGURES - 1) and places < _MOST_PLACES:
        places += 1
    rounded = round(value, max(places, 0))
    return Fraction(rounded), rounded == value


#: Numbers that only stand before a unit.
_SMALL_NUMBERS: Final = {
    "a": Fraction(1), "an": Fraction(1), "half a": Fraction(1, 2), "half an": Fraction(1, 2), "half": Fraction(1, 2)
}  # fmt: skip
#: "Five kilometers", "five feet ten", "six pounds and two ounces".
_MEASURE: Final = (
    rf"(?P<number>.+?) (?P<from>{_UNIT_NAMES})"
    rf"(?: (?:and )?(?P<more>(?!and )[a-z0-9.]+(?: [a-z0-9.]+)??)(?: (?P<smaller>{_UNIT_NAMES}))?)?"
)
_CONVERT: Final = r"(?:what is |what are |how much is |how much are |how many is |convert |change |turn )?"

UNITS = (
    Intent(
        name="units",
        slots=(
            rf"{_CONVERT}{_MEASURE} (?:in|to|into|as|in to) (?P<to>{_UNIT_NAMES})",
            rf"how (?:tall|long|far|heavy|much|big|high|hot|cold|warm|fast|old) (?:is|are) {_MEASURE} (?:in|as) "
            rf"(?P<to>{_UNIT_NAMES})",
            rf"how (?:many|much) (?P<to>{_UNIT_NAMES}) (?:are |is |does |do |go )?(?:there )?(?:in|into|make|makes|"
            rf"has|equal|equals|to|per|fit in) ?{_MEASURE}(?: have| make| equal)?",
            rf"how (?:many|much) (?P<to>{_UNIT_NAMES}) (?:are|is) {_MEASURE}",
            rf"how (?:many|much) (?P<to>{_UNIT_NAMES}) (?:does|do) {_MEASURE} (?:have|make|equal)",
        ),
        reply=_converted,
    ),
    Intent(
        name="constants",
        slots=(
            r"(?:how hot|how cold|at what temperature|when|at which temperature) (?:does|is|will) water "
            r"(?:boil|boils|boiling|freeze|freezes|freezing)",
            r"how (?:hot|cold|warm) is (?:boiling water|freezing water|ice)",
            r"what is the (?:boiling|freezing|melting) point of (?:water|ice)",
        ),
        says=("Water freezes at 0 degrees Celsius and boils at 100, at sea level.",),
    ),
)


# Counting, spelling and repeating

MAX_COUNT: Final = 1000
NUMBERS_PER_SENTENCE: Final = 10
MAX_SPELLED_LETTERS: Final = 200

REPEAT: Final = re.compile(
    r"(?:repeat after me|repeat|say after me|say)[\s,:]+(?!(?:that|it|this|again|the (?:question|"
    r"answer|last|joke|riddle))\b)",
    re.I,
)
SPELL: Final = re.compile(r"(?:how do (?:you|i) )?spell(?: the word| out)?[\s,:]+", re.I)
#: "Say yes or no: is the earth flat?" wants one of the words, not all.
_CHOICE: Final = re.compile(
    r"(?:(?:only|just|either|simply) )?(?:(?:yes or no|no or yes|true or false|right or wrong)\W+\w|"
    r"[\w'’-]{1,20}(?:,? [\w'’-]{1,20}){0,3},? or [\w'’-]{1,20}\s?[:;,.?!]\s?\w)",
    re.I,
)
#: Words that stand for the word that was spelled last.
_LAST_WORD: Final = "it|that|this|that word|the word"
_SPELLED: Final = re.compile(rf"\b{SPELL.pattern}(?!(?:{_LAST_WORD})\b)(.{{1,60}})", re.I)


def repeated(words: str) -> Iterator[str] | None:
    """The words once more, as a sentence; None where there are none."""
    words = words.strip(' ,:"“”')
    if _CHOICE.match(words) is not None:
        return None
    if not any(map(str.isalnum, words)):
        return None
    return iter((words if words[-1] in ".!?…" else f"{words}.",))


def spelled(words: str) -> Iterator[str] | None:
    """The letters one by one; None where there are none."""
    letters = list(islice(filter(str.isalnum, words), MAX_SPELLED_LETTERS + 1))
    if not letters:
        return None
    if len(letters) > MAX_SPELLED_LETTERS:
        return iter((f"I spell up to {MAX_SPELLED_LETTERS} letters.",))
    return iter((", ".join(letter.upper() for letter in letters) + ".",))


def _count(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first = parse_number(slots["first"]) if "first" in slots else 1
    last = parse_number(slots["last"])
    if first is None or last is None:
        return None
    if max(first, last) > MAX_COUNT:
        return iter((f"I count to {MAX_COUNT} at most.",))
    return _counted(first, last)


def _count_down(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first = parse_number(slots["first"])
    if first is None:
        return None
    return _counted(first, 0) if first <= MAX_COUNT else iter((f"I count from {MAX_COUNT} at most.",))


def _counted(first: int, last: int) -> Iterator[str]:
    step = 1 if last >= first else -1
    numbers = range(first, last + step, step)
    for start in range(0, len(numbers), NUMBERS_PER_SENTENCE):
        yield ", ".join(map(str, numbers[start : start + NUMBERS_PER_SENTENCE])) + "."


def _backwards(asked: Asked, slots: Slots) -> Iterator[str] | None:
    words = slots["words"]
    if words.lower() in _LAST_WORD.split("|"):
        words = next((found[1] for heard in reversed(asked.talk.heard) if (found := _SPELLED.search(heard))), words)
    return spelled(words[::-1])


def _how_many_letters(asked: Asked, slots: Slots) -> Iterator[str] | None:
    word = "".join(letter for letter in slots["word"] if letter.isalnum())
    letter = slots.get("letter", "").casefold()
    number = word.casefold().count(letter) if letter else len(word)
    if not word:
        return None
    if letter:
        times = {0: "is not", 1: "is once"}.get(number, f"is {number} times")
        return iter((f"The letter {letter.upper()} {times} in {slots['word'].strip()}.",))
    return iter((f"{slots['word'].strip().capitalize()} has {number} letter{'s' if number != 1 else ''}.",))


def _greeted(asked: Asked, slots: Slots) -> Iterator[str]:
    """The greeting that somebody wants to be said to somebody."""
    whom = re.sub(r"^my\b", "your", slots["whom"])
    return iter((f"{slots['greeting'][:1].upper()}{slots['greeting'][1:]} to {whom}.",))


LETTERS = (
    Intent(
        name="greet somebody",
        slots=(
            r"(?:say )(?P<greeting>hello|hi|hey|good morning|good evening|good night) to "
            r"(?P<whom>(?:my|the|our) [a-z]+(?: [a-z]+)?|every(?:one|body)|all of us|us)",
        ),
        reply=_greeted,
    ),
    Intent(
        name="alphabet",
        phrases=(
            "(say|recite|tell me|spell|give me|do you know|what is|repeat|sing) the (alphabet|abc)",
            "(the alphabet|alphabet|abc|a b c|say the a b c)",
        ),
        says=("A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z.",),
    ),
    Intent(
        name="alphabet backwards",
        phrases=("[(say|recite|tell me|do you know)] the (alphabet|abc) (backwards|backward|in reverse)",),
        says=("Z, Y, X, W, V, U, T, S, R, Q, P, O, N, M, L, K, J, I, H, G, F, E, D, C, B, A.",),
    ),
    Intent(
        name="spell my name",
        phrases=(
            "(spell my name|how do you spell my name|can you spell|can you spell words|spell|spell something|spell "
            "a word|how do you spell it|how do you spell that|spell it|spell that)",
        ),
        says=("Tell me which word. For example: spell rhythm.", "Which word? Say: spell, and then the word."),
    ),
    Intent(
        name="count",
        phrases=("(count|count for me|can you count for me|count something)",),
        reply=lambda asked, slots: _counted(1, 10),
    ),
    Intent(
        name="count to",
        slots=(
            r"count (?:(?:up |down )?from (?P<first>.+?) )?(?:up |down )?to (?P<last>.+)",
            r"(?:count|counter) (?P<last>.+)",
        ),
        reply=_count,
    ),
    Intent(
        name="count down",
        slots=(r"count (?:down |backwards )?(?:down |backwards )from (?P<first>.+?)(?: to zero| to 0)?",),
        reply=_count_down,
    ),
    Intent(
        name="backwards", written=(r"(?:spell|say) (?P<words>.{1,60}) (?:backwards?|in reverse)",), reply=_backwards
    ),
    Intent(
        name="how many letters",
        written=(
            r"how many letters (?:are (?:there )?in|does|has|in|are) (?:the word )?(?P<word>\w{1,60}?)(?: have| got)?",
            r"how many (?:times is (?:the letter )?)?(?P<letter>\w)['’]?s? (?:are (?:there )?|is (?:there "
            r")?)?in (?:the word )?(?P<word>\w{2,60})",
        ),
        reply=_how_many_letters,
    ),
    Intent(
        name="spell", written=(rf"{SPELL.pattern}(?P<words>.+)",), reply=lambda asked, slots: spelled(slots["words"])
    ),
    Intent(
        name="repeat after me",
        phrases=("(repeat after me|say after me|say|repeat what i say|can you repeat what i say|repeat my words)",),
        says=("Tell me what to say.", "Go on. Say: repeat after me, and then the words."),
    ),
    Intent(
        name="repeat words",
        written=(rf"{REPEAT.pattern}(?P<words>.+)",),
        reply=lambda asked, slots: repeated(slots["words"]),
    ),
)


# Coins, dice and choices, drawn from the chance of the request

MAX_DICE: Final = 20
MAX_SIDES: Final = 1000
_MAX_NUMBER: Final = 10**12
_SUITS: Final = ("clubs", "diamonds", "hearts", "spades")
_HANDS: Final = {"rock": "scissors", "scissors": "paper", "paper": "rock"}


def _coin(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((asked.chance.choice(("Heads.", "Tails.")),))


def _coins(asked: Asked, slots: Slots) -> Iterator[str] | None:
    number = parse_number(slots["number"])
    if number is None or number < 1:
        return None
    if number > MAX_DICE:
        return iter((f"I toss {MAX_DICE} coins at most.",))
    heads = sum(asked.chance.choice((0, 1)) for _ in range(number))
    return iter((f"{heads} heads, and {number - heads} tails.",))


def _dice(asked: Asked, slots: Slots) -> Iterator[str] | None:
    number, sides = parse_number(slots.get("number", "one")), parse_number(slots.get("sides", "six"))
    if slots.get("number") in ("a", "an", "the", "some"):
        number = 1
    if number is None or sides is None or number < 1 or sides < 2:
        return None
    if number > MAX_DICE or sides > MAX_SIDES:
        return iter((f"I roll {MAX_DICE} dice at most, with {MAX_SIDES} sides.",))
    rolled = [asked.chance.randint(1, sides) for _ in range(number)]
    if number == 1:
        return iter((f"It's {_article(rolled[0])} {rolled[0]}.",))
    listed = ", ".join(map(str, rolled[:-1]))
    return iter((f"{listed} and {rolled[-1]}. That makes {sum(rolled)}.",))


def _article(number: int) -> str:
    """That of a number up to 1000: a 7, an 8, an 18."""
    return "an" if str(number)[0] == "8" or number in (11, 18) else "a"


def _card(asked: Asked, slots: Slots) -> Iterator[str]:
    ranks = ("ace", *listed("two three four five six seven eight nine ten jack queen king"))
    return iter((f"The {asked.chance.choice(ranks)} of {asked.chance.choice(_SUITS)}.",))


def _number(asked: Asked, slots: Slots) -> Iterator[str] | None:
    first, last = (parse_number(slots.get(name, default)) for name, default in (("first", "1"), ("last", "100")))
    if first is None or last is None or max(first, last) > _MAX_NUMBER:
        return None
    return iter((f"{asked.chance.randint(min(first, last), max(first, last))}.",))


def _choice(asked: Asked, slots: Slots) -> Iterator[str] | None:
    parts = [part.strip(" ,?.!") for part in re.split(r",\s*(?:or\s+|and\s+)?|\s+(?:or|and)\s+", slots["things"])]
    things = [part for part in parts if part]
    if not 2 <= len(things) <= 20 or max(map(len, things)) > 60:
        return None
    chosen = asked.chance.choice(things)
    return iter((f"{chosen[:1].upper()}{chosen[1:]}.",))


def _hand(asked: Asked, slots: Slots) -> Iterator[str]:
    mine, yours = asked.chance.choice(tuple(_HANDS)), slots.get("hand")
    if yours is None:
        return iter((f"I take {mine}.",))
    if mine == yours:
        return iter((f"I take {mine}, too. Nobody wins.",))
    return iter((f"I take {mine}. {'I win.' if _HANDS[mine] == yours else 'You win.'}",))


_DIE: Final = r"(?:die|dice|dices|dies)"

CHANCE = (
    Intent(
        name="coin",
        phrases=(
            "(flip|toss|throw|spin) (a|the|one|your) coin [for me]",
            "(flip|toss) it",
            "(heads or tails|head or tail|coin toss|coin flip|flip coin|toss coin|coin|let us flip a coin|can you "
            "flip coins)",
        ),
        reply=_coin,
        renews=True,
    ),
    Intent(name="coins", slots=(r"(?:flip|toss|throw) (?P<number>[a-z0-9 -]{1,20}) coins",), reply=_coins, renews=True),
    Intent(
        name="dice",
        phrases=(
            "(roll|throw) (a|the|one|some|your) (die|dice)",
            "(roll it|dice|roll the dice for me|roll dice|let us roll dice|can you roll dice|roll)",
        ),
        slots=(
            rf"(?:roll|throw) (?P<number>[a-z0-9 ]{{1,20}}?) (?P<sides>[a-z0-9]{{1,12}})(?: |-)sided {_DIE}",
            rf"(?:roll|throw) (?P<number>[a-z0-9 ]{{1,20}}?) {_DIE}(?: with (?P<sides>[a-z0-9 ]{{1,20}}) sides)?",
            r"(?:roll|throw) (?P<number>a|an|one) d (?P<sides>\d{1,4})",
        ),
        reply=_dice,
        renews=True,
    ),
    Intent(
        name="card",
        phrases=("(pick|draw|choose|take) (a|any|one) card [(any card|for me)]",),
        reply=_card,
        renews=True,
    ),
    Intent(
        name="number",
        phrases=(
            "(pick|choose|say|give me|tell me|think of) (a|any|a random|some) number",
            "(random number|a number|number|a random number)",
            "(give me|pick|generate|i need) a random number",
        ),
        slots=(
            r"(?:pick |choose |say |think of |generate )?(?:a |any )?(?:random )?number (?:between|from) "
            r"(?P<first>[a-z0-9 ,]{1,40}?) (?:and|to) (?P<last>[a-z0-9 ,]{1,40})",
        ),
        reply=_number,
        renews=True,
    ),
    Intent(
        name="choice",
        written=(
            r"(?:choose|pick|decide|select)(?: one)?(?: of| from| between)?:? (?P<things>.{3,200})",
            r"(?:should|shall) i (?:have|take|eat|drink|wear|choose|pick|get|buy|watch|read|play) "
            r"(?P<things>.{1,100} or .{1,100})",
        ),
        reply=_choice,
        renews=True,
    ),
    Intent(
        name="yes or no",
        phrases=("(yes or no|say yes or no)",),
        reply=lambda asked, slots: iter((asked.chance.choice(("Yes.", "No.")),)),
        renews=True,
    ),
    Intent(
        name="rock paper scissors",
        phrases=("[let us play] rock paper scissors", "(rock paper scissors shoot|play rock paper scissors [with me])"),
        slots=(r"(?:i take |i choose )?(?P<hand>rock|paper|scissors)",),
        reply=_hand,
        renews=True,
    ),
)
