"""Conversion of units: lengths, weights, volumes, temperatures, times, speeds and data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from omni_ws.engine.llm.arithmetic import in_digits, parse_value
from omni_ws.engine.llm.intents.intent import Asked, Intent, Slots


@dataclass(frozen=True, slots=True)
class _Unit:
    """``size`` is in the first unit of its kind; ``zero`` is where its scale begins, in that unit."""

    kind: str
    one: str
    many: str
    size: Fraction
    zero: Fraction = Fraction(0)


#: A kind, then: singular / plural where that is no mere "s" | size | further names. Volumes are those of the USA.
_TABLE: Final = {
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
    for kind, entries in _TABLE.items():
        for entry in entries.split("; "):
            names, size, others = entry.split("|")
            one, _, many = names.partition("/")
            unit = _Unit(kind, one, many or f"{one}s", Fraction(size))
            units |= dict.fromkeys((unit.one, unit.many, *filter(None, others.split(","))), unit)
    for unit, names in _TEMPERATURES:
        units |= {f"{degrees}{name}": unit for name in names.split(",") for degrees in ("", "degrees ", "degree ")}
    return units


_UNITS: Final = _units()
_NAMES: Final = "|".join(sorted(_UNITS, key=len, reverse=True))


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
    rf"(?P<number>.+?) (?P<from>{_NAMES})"
    rf"(?: (?:and )?(?P<more>(?!and )[a-z0-9.]+(?: [a-z0-9.]+)??)(?: (?P<smaller>{_NAMES}))?)?"
)
_CONVERT: Final = r"(?:what is |what are |how much is |how much are |how many is |convert |change |turn )?"

UNITS = (
    Intent(
        name="units",
        slots=(
            rf"{_CONVERT}{_MEASURE} (?:in|to|into|as|in to) (?P<to>{_NAMES})",
            rf"how (?:tall|long|far|heavy|much|big|high|hot|cold|warm|fast|old) (?:is|are) {_MEASURE} (?:in|as) "
            rf"(?P<to>{_NAMES})",
            rf"how (?:many|much) (?P<to>{_NAMES}) (?:are |is |does |do |go )?(?:there )?(?:in|into|make|makes|"
            rf"has|equal|equals|to|per|fit in) ?{_MEASURE}(?: have| make| equal)?",
            rf"how (?:many|much) (?P<to>{_NAMES}) (?:are|is) {_MEASURE}",
            rf"how (?:many|much) (?P<to>{_NAMES}) (?:does|do) {_MEASURE} (?:have|make|equal)",
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
