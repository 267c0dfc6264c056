"""Numbers, dates and times in English words, and the tables of english.toml."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from omni_ws.engine.spoken.languages import table_of

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
    """Return the name of a whole number: "21" is "twenty-one". Leading zeros and long numbers are read by digit."""
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
    """Return the digits one by one: "007" is "zero zero seven"."""
    return " ".join(SMALL_NUMBERS[int(digit)] for digit in digits)


def decimal(text: str) -> str:
    """Return the name of a number such as "1,234.50", "0.5" or ".5"."""
    whole, point, fraction = text.replace(",", "").partition(".")
    name = cardinal(whole or "0")
    return f"{name} point {by_digit(fraction)}" if point and fraction else name


def ordinal(digits: str) -> str:
    """Return the name of an ordinal number: "21" is "twenty-first"."""
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
    """Return three or four digits as a model number is read: "747" is "seven forty-seven"."""
    front, rest = digits[:-2], digits[-2:]
    if rest == "00" or len(digits) > 4 or digits[0] == "0":
        return cardinal(digits)
    return f"{cardinal(front)} {_two_digits(int(rest))}"


def clock(hours: str, minutes: str) -> str:
    """Return a time of day: "3", "05" is "three oh five"; the full hour is the hour alone."""
    name = cardinal(str(int(hours)))
    return name if int(minutes) == 0 else f"{name} {_two_digits(int(minutes))}"


def plural(name: str) -> str:
    """Return the plural of a number's name: "fifty" becomes "fifties", "third" becomes "thirds"."""
    if name.endswith("y"):
        return name[:-1] + "ies"
    return name + "es" if name.endswith("x") else name + "s"


def roman(numeral: str) -> int:
    """Return the value of a Roman numeral; 0 for what is none, such as "IIII" or "VIX"."""
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


# The tables: units, currencies, months, abbreviations, and words around numbers

_TABLES: Final = table_of("english")


def _words(name: str) -> frozenset[str]:
    return frozenset(_TABLES[name].split())


def _units() -> dict[str, tuple[str, str]]:
    units = {name: (one, several) for name, (one, several) in _TABLES["units"].items()}
    for name, (one, several, prefixes) in _TABLES["units_with_prefixes"].items():
        units[name] = (one, several)
        for prefix in prefixes.split():
            spoken = _TABLES["prefixes"][prefix]
            units[prefix + name] = (spoken + one, spoken + several)
    # Both the micro sign and the Greek letter mu are in use, and both the ohm sign and the letter omega.
    greek = str.maketrans("\N{MICRO SIGN}\N{GREEK CAPITAL LETTER OMEGA}", "\N{GREEK SMALL LETTER MU}\N{OHM SIGN}")
    return units | {name.translate(greek): unit for name, unit in units.items()}


MONTHS: Final[tuple[str, ...]] = tuple(_TABLES["months"])
#: Full and short names of the months.
MONTH_NAMES: Final[dict[str, str]] = {
    **{name: name for name in MONTHS},
    **{name[:3]: name for name in MONTHS if name != "May"},
    "Sept": "September",
}
WEEKDAYS: Final[dict[str, str]] = _TABLES["weekdays"]

#: Singular and plural of each unit.
UNITS: Final = _units()
#: For each currency the singular and plural, and those of its hundredth part.
CURRENCIES: Final[dict[str, tuple[str, str, str, str]]] = {
    name: (one, several, small, smalls) for name, (one, several, small, smalls) in _TABLES["currencies"].items()
}
PER: Final[dict[str, str]] = _TABLES["per"]
MAGNITUDES: Final[dict[str, str]] = _TABLES["magnitudes"]

ABBREVIATIONS: Final[dict[str, str]] = _TABLES["abbreviations"]
SENTENCE_ENDS: Final[frozenset[str]] = frozenset(_TABLES["sentence_ends"])
SHORT_WORDS: Final[dict[str, str]] = _TABLES["short_words"]
TITLES: Final[dict[str, str]] = _TABLES["titles"]
BEFORE_NUMBERS: Final[dict[str, str]] = _TABLES["before_numbers"]
SIGNS: Final[dict[str, str]] = _TABLES["signs"]
FRACTIONS: Final[dict[str, tuple[int, int]]] = {
    sign: (above, below) for sign, (above, below) in _TABLES["fractions"].items()
}

# Words that occur around numbers, in lower case except for names of models.
NUMBERED: Final = _words("numbered")
CROWNED: Final = _words("crowned")
BEFORE_YEARS: Final = _words("before_years") | {name.lower() for name in MONTH_NAMES.values()}
BEFORE_DATES: Final = _words("before_dates") | {name.lower() for pair in WEEKDAYS.items() for name in pair}
CALLS: Final = _words("calls")
CODES: Final = _words("codes")
OWNERS: Final = _words("owners")
COUNTS: Final = _words("counts")
LOTS: Final = _words("lots")
PARTS_OF_DECADES: Final = _words("parts_of_decades")
OF_DECADES: Final = _words("of_decades")
OF_SECONDS: Final = _words("of_seconds")
COUNTED: Final = _words("counted")
OF_MINUTES: Final = _words("of_minutes")
MODELS: Final = _words("models")


# Dates, times of day, durations and decades
#
# A date in digits alone is read in the order that is usual for its form: a year first is followed by month and day,
# dots mean the day first, slashes and hyphens the American order. A number over 12 is a day wherever it stands.

_MONTH: Final = "|".join(sorted(MONTH_NAMES, key=len, reverse=True))
#: Units of a duration, the longest first: one cannot follow a shorter one.
_DURATIONS: Final = {"w": "week", "d": "day", "h": "hour", "m": "minute", "s": "second"}
_DURATION_UNIT: Final = r"(?:wks?|days?|hours?|hrs?|minutes?|mins?|seconds?|secs?|[wdhms])"


def _iso(match: re.Match[str]) -> str:
    digits, _, month, day, hours, minutes, zone = match.groups()
    said = _named("", int(month), int(day), digits)
    if not said:
        return match[0]
    if hours:
        said += f", {_clock(hours, minutes)}"
        said += " U T C" if zone == "Z" else ""
    return said


def _numeric(match: re.Match[str]) -> str:
    """Read a date with slashes or hyphens: "3/15/2024" has the American order, unless the first number is over 12."""
    first, second = int(match[1]), int(match[2])
    month, day = (second, first) if first > 12 else (first, second)
    return _named(match[0], month, day, match[3])


def _dotted(match: re.Match[str]) -> str:
    """Read a date with dots: "15.03.2024" has the day first, unless there is no such month."""
    first, second = int(match[1]), int(match[2])
    day, month = (second, first) if second > 12 else (first, second)
    return _named(match[0], month, day, match[3])


def _named(text: str, month: int, day: int, digits: str) -> str:
    if not _is_date(month, day):
        return text
    return f"{MONTHS[month - 1]} {ordinal(str(day))}, {_year(digits)}"


def _without_year(match: re.Match[str]) -> str:
    """Read two numbers with a slash: "by 12/25" has a date, "on 3/4 of them" a fraction."""
    words = match.string[: match.start()].lower().split()
    first, second = int(match[1]), int(match[2])
    month, day = (second, first) if first > 12 else (first, second)
    told = (
        bool(words) and words[-1].strip(",.(") in BEFORE_DATES and not re.match(r" of\b", match.string[match.end() :])
    )
    if not _is_date(month, day) or not (told or (match[1] + match[2]).startswith("0") or match[2].startswith("0")):
        return match[0]
    return f"{MONTHS[month - 1]} {ordinal(str(day))}"


def _year_and_month(match: re.Match[str]) -> str:
    """Read a year and two digits: "2024-10" is a month; "2009-10" may be two years, and "2024/25" is a season."""
    first, sign, second = match.groups()
    if 1 <= int(second) <= 12 and (second[0] == "0" or int(second) < int(first[2:])):
        return f"{MONTHS[int(second) - 1]} {year(first)}"
    if int(second) == int(first[2:]) + 1:
        return f"{year(first)}{' to ' if sign != '/' else ' '}{short_year(second)}"
    return match[0]


def _month_first(match: re.Match[str]) -> str:
    month, day, last, digits = match.groups()
    if not 1 <= int(day) <= 31:
        return match[0]
    said = f"{MONTH_NAMES[month]} {ordinal(str(int(day)))}"
    if last:
        said += f" to {ordinal(str(int(last)))}"
    return f"{said}, {year(digits)}" if digits else said


def _day_first(match: re.Match[str]) -> str:
    article, day, last, month, digits = match.groups()
    if not 1 <= int(day) <= 31:
        return match[0]
    days = ordinal(str(int(day))) + (f" to the {ordinal(str(int(last)))}" if last else "")
    said = f"{article or 'the '}{days} of {MONTH_NAMES[month]}"
    return f"{said}, {year(digits)}" if digits else said


def _time(match: re.Match[str]) -> str:
    hours, minutes, seconds, half = match.groups()
    if int(hours) > 24 or int(minutes) > 59:
        return f"{cardinal(str(int(hours)))} to {cardinal(str(int(minutes)))}"
    said = clock(hours, minutes) if half else _clock(hours, minutes)
    if seconds:
        said = f"{clock(hours, minutes)} and {decimal(seconds.lstrip('0') or '0')} seconds"
    return f"{said} {half[0].upper()} M" if half else said


def _clock(hours: str, minutes: str) -> str:
    if int(minutes):
        return clock(hours, minutes)
    if int(hours) % 24 == 0:
        return "midnight"
    name = cardinal(str(int(hours)))
    return f"{name} o'clock" if int(hours) <= 12 else f"{name} hundred"


def _year(digits: str) -> str:
    return year(digits) if len(digits) == 4 else year(("20" if int(digits) < 50 else "19") + digits)


def short_year(digits: str) -> str:
    return f"oh {cardinal(digits[1])}" if digits[0] == "0" else cardinal(digits)


def _is_date(month: int, day: int) -> bool:
    return 1 <= month <= 12 and 1 <= day <= 31


def _era(match: re.Match[str]) -> str:
    return f"{year(match[1]) if len(match[1]) == 4 else in_pairs(match[1])} {' '.join(match[2])}"


def _duration(match: re.Match[str]) -> str:
    """Read a duration: "1h 30m" and "5m 30s" are durations, "5m 30m" is not."""
    parts = re.findall(rf"(\d+(?:\.\d+)?) ?({_DURATION_UNIT}(?![a-z]))?", match[0])
    units = [unit[:1] for _, unit in parts]
    if units[-1] == "":  # 1h30
        units[-1] = "m"
    order = [*_DURATIONS]
    places = [order.index(unit) if unit else -1 for unit in units]
    if -1 in places or places != sorted(set(places)):
        return match[0]
    single = is_adjective(match)
    return " ".join(
        f"{decimal(amount)} {_DURATIONS[unit]}{'' if amount == '1' or single else 's'}"
        for (amount, _), unit in zip(parts, units, strict=True)
    )


def is_adjective(match: re.Match[str]) -> bool:
    """Whether an amount is used as an adjective, so that its unit is singular: "a $5 bill", "a 10 km run"."""
    return re.search(r"\b[Aa]n? $", match.string[: match.start()]) is not None


def _several(match: re.Match[str]) -> str:
    """Read a number with "s" by its context: "20s" is an age, a decade or seconds, "747s" are airplanes or seconds."""
    mark, digits, behind = match.groups()
    if mark or _is_several(match.string, match.start(), match.end(), digits=digits, apostrophe=behind):
        return plural_of(digits.replace(",", ""))
    if not behind and _following(match.string, match.end()) in OF_SECONDS:
        return f"{cardinal(digits)} second"
    return match[0]


def _following(text: str, end: int) -> str:
    """Return the word after ``end``, in lower case."""
    found = re.match(r" ([\w-]+)", text[end : end + 40])
    return found[1].lower() if found else ""


_LIKEWISE: Final = re.compile(
    r"(?:^|[\s(-])[(\"'’]*(?:(?:mid|early|late)-)?['’]?(\d[\d,]*)['’]?s,? ?(?:and|or|to|–|-|,)$"
)


def _is_several(text: str, start: int, end: int, *, digits: str, apostrophe: str | None) -> bool:
    before, following = text[:start].rstrip(" -"), _following(text, end)
    words = [word.strip("\"'(,.“”‘’") for word in before.split()[-2:]]
    last = words[-1] if words else ""
    round_number = digits.endswith("0")
    if apostrophe:  # "the 747's wings" are of one
        return round_number and (len(digits) == 4 or last.lower() in OWNERS | PARTS_OF_DECADES)
    if (len(digits) == 4 and round_number) or len(digits) > 4:
        return True
    if re.fullmatch(r"10{1,2}", digits) and following == "of":
        return True
    if last.lower() in OWNERS:
        return following not in OF_SECONDS
    if last.lower() in COUNTS | PARTS_OF_DECADES or last.isdecimal() or (last == "of" and words[0].lower() in LOTS):
        return True
    if (last.isupper() and len(last) > 1) or (following in OF_DECADES and len(digits) == 2 and round_number):
        return True
    if len(digits) == 3 and not round_number and (last.istitle() or digits[0] == digits[2] == "7"):
        return True
    # "In their 20s and 30s": as the one before.
    if (likewise := _LIKEWISE.search(before)) is not None:
        at = likewise.start(1)
        return _is_several(before, at, likewise.end(1) + 1, digits=likewise[1], apostrophe=None)
    return False


def plural_of(digits: str) -> str:
    if re.fullmatch(r"10+", digits) and len(digits) <= 7:
        name = ("tens", "hundreds", "thousands", "tens of thousands", "hundreds of thousands", "millions")
        return name[len(digits) - 2]
    if len(digits) == 4:
        return plural(year(digits))
    return plural(in_pairs(digits) if len(digits) == 3 else cardinal(digits))


#: The rules, in the order in which they are applied.
RULES: Final[tuple[tuple[str, Callable[[re.Match[str]], str]], ...]] = (
    (rf"\b({'|'.join(WEEKDAYS)})\b\.?(?=,? (?:{_MONTH})\b|,? \d)", lambda match: WEEKDAYS[match[1]]),
    (
        r"(?<![\w/.-])([12]\d{3})([-/.])(\d{1,2})\2(\d{1,2})"
        r"(?:[T ](\d\d):(\d\d)(?::\d\d(?:\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?(?![\w/-]|[.,]\d)",
        _iso,
    ),
    (r"(?<![\w/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\w/])", _numeric),
    (r"(?<![\w/-])(\d{1,2})-(\d{1,2})-(\d{4})(?![\w/-])", _numeric),
    (r"(?<![\w.])(\d{1,2})\.(\d{1,2})\.(\d{4})(?![\w])", _dotted),
    (r"(?<![\w/.-])((?:19|20)\d\d)([-/])(\d\d)(?![\w/-]|[.,]\d)", _year_and_month),
    (r"(?<![\w/.,-])(?<!\d )(\d{1,2})/(\d{1,2})(?![\w/%]|[.,]\d)", _without_year),
    (
        rf"\b({_MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?(?:[-–](\d{{1,2}}))?(?![\d:%])(?:,? (\d{{4}})\b)?",
        _month_first,
    ),
    (
        r"(?<!\d[-–])\b(the )?(\d{1,2})(?:st|nd|rd|th)?(?: ?[-–] ?(\d{1,2})(?:st|nd|rd|th)?)? (?:of )?"
        rf"({_MONTH})\b\.?(?:,? (\d{{4}})\b)?",
        _day_first,
    ),
    (rf"\b({_MONTH})(?:\.(?= ?\d)|(?=,? \d{{4}}\b))", lambda match: MONTH_NAMES[match[1]]),
    (r"(?<![\w.,])(\d{3,4}) (BCE?|CE|AD)\b", _era),
    (
        r"(?<![\w:.])(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?(?:\s?([AaPp])\.?[Mm]\b(?:\.(?! [A-Z]|$))?)?(?![\d:])",
        _time,
    ),
    (r"(?<![\w:.])(\d{1,3}):(\d{1,5})(?![\w:])(?!\.\d)", lambda match: f"{cardinal(match[1])} to {cardinal(match[2])}"),
    (r"(?<![\w:.,])(1[3-9]|2[0-3])h([0-5]\d)(?!\w)", lambda match: _clock(match[1], match[2])),
    (
        rf"(?<![\w.,:/-])\d+(?:\.\d+)? ?{_DURATION_UNIT}"
        rf"(?:,? (?:and )?\d+ ?{_DURATION_UNIT}|(?<=[dhm])\d+ ?{_DURATION_UNIT}|(?<=h)\d\d(?!\w))+"
        r"(?![\w/°²³])",
        _duration,
    ),
    (r"(?<=\ds)[-–](?=['’]?\d+s\b)", lambda match: " to "),
    (
        r"(?:(?<![\w.,:/$€£-])|(?<=[A-Za-z]-))(['’‘])?"
        r"(\d{1,3}(?:,\d{3})+|\d{1,7})(['’])?s(?![\w/])",
        _several,
    ),
)
