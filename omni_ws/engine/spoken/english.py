"""The conversion of English text to words as a person reads it: numbers, dates, money, units, abbreviations and signs.

The tables are in english.toml.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Final

from omni_ws.engine.spoken.english_numbers import (
    by_digit,
    cardinal,
    clock,
    decimal,
    in_pairs,
    ordinal,
    plural,
    roman,
    year,
)
from omni_ws.engine.spoken.languages import one_of, table_of

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
    """Put a date with slashes or hyphens into words: the month is first ("3/15/2024"), unless it would be over 12."""
    first, second = int(match[1]), int(match[2])
    month, day = (second, first) if first > 12 else (first, second)
    return _named(match[0], month, day, match[3])


def _dotted(match: re.Match[str]) -> str:
    """Put a date with dots into words: the day is first ("15.03.2024"), unless the second number is over 12."""
    first, second = int(match[1]), int(match[2])
    day, month = (second, first) if second > 12 else (first, second)
    return _named(match[0], month, day, match[3])


def _named(text: str, month: int, day: int, digits: str) -> str:
    if not _is_date(month, day):
        return text
    return f"{MONTHS[month - 1]} {ordinal(str(day))}, {_year(digits)}"


def _without_year(match: re.Match[str]) -> str:
    """Put two numbers with a slash into words if they are a date: those in "by 12/25" are, not in "on 3/4 of them"."""
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
    """Put a year and two digits into words: "2024-10" is a month, "2009-10" may be two years, "2024/25" a season."""
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
    """Put a duration into words: "1h 30m" and "5m 30s" are durations, "5m 30m" is not."""
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
    """Put a number with "s" into words, by its context: "20s" is an age, a decade or seconds, "747s" are airplanes."""
    mark, digits, behind = match.groups()
    if mark or _is_several(match.string, match.start(), match.end(), digits=digits, apostrophe=behind):
        return plural_of(digits.replace(",", ""))
    if not behind and _following(match.string, match.end()) in OF_SECONDS:
        return f"{cardinal(digits)} second"
    return match[0]


def _following(text: str, end: int) -> str:
    """Return the word after index ``end``, in lower case."""
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


#: Capitals behind a full stop that begin no sentence: "5 p.m. EST", "Apple Inc. CEO".
_TIMED: Final = one_of(("Eastern", "Central", "Mountain", "Pacific", *WEEKDAYS.values()))
GOING_ON: Final = rf" (?:[A-Z]{{2,}}\b|(?:{_TIMED})\b|(?ai:{one_of(ABBREVIATIONS)}))"
_GOES_ON: Final = re.compile(GOING_ON)
#: Words with a capital that are no part of a name: behind initials, they begin a sentence.
_BEGINS_SENTENCE: Final = re.compile(r" (?:I|He|She|It|We|You|They|The|This|That|These|Those|There|But)\b")

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
        rf"({_MONTH})\b(?:\.(?=,| [^A-Z]))?(?:,? (\d{{4}})\b)?",
        _day_first,
    ),
    (rf"\b({_MONTH})(?:\.(?= ?\d)|(?=,? \d{{4}}\b))", lambda match: MONTH_NAMES[match[1]]),
    (r"(?<![\w.,])(\d{3,4}) (BCE?|CE|AD)\b", _era),
    (
        rf"(?<![\w:.])(\d{{1,2}}):(\d\d)(?::(\d\d(?:\.\d+)?))?"
        rf"(?:\s?([AaPp])\.?[Mm]\b(?:\.(?:(?! [A-Z]|$)|(?={GOING_ON})))?)?(?![\d:])",
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


# Converts English text to words as a person reads them: numbers, dates, money, units, abbreviations and signs.


#: A number, with separators as in "1,234,567" or, in India, "12,34,567".
_NUMBER: Final = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+"

_SYMBOLS: Final = one_of([name for name in CURRENCIES if not name.isalpha()])
_SIGNS_OF_MONEY: Final = "".join(re.escape(name) for name in CURRENCIES if len(name) == 1)
_CODES: Final = one_of([name for name in CURRENCIES if name.isalpha()])
_UNITS: Final = one_of(UNITS)
_MAGNITUDES: Final = one_of(MAGNITUDES)

#: Words that may be read differently depending on the next word: a number before its unit, a month before its day, a
#: title, an operator.
_WAITS: Final = re.compile(
    rf"(?:\d(?:x|[hdmskKMB]|hrs?|mins?|ft|st|nd|rd|th)|[\d%½⅓⅔¼¾⅛⅕²³°)]|\d['’′″]|[a-z]\.[a-z]\.|[A-Z]\.[A-Z]\."
    rf"|^(?:--?-?|\(*[-−][a-z]|\*\*?|[+=×÷±~≈<>#/–—−]|[-−+]?(?:{_SYMBOLS})[-−]?)"
    rf"|^(?:Mon|Tues?|Wed|Thu(?:rs)?|Fri|Sat|Sun)[.,]{{1,2}}|\b(?:{one_of(MONTH_NAMES)}|{one_of(TITLES)})\.)$"
)
_UNITS_WITH_STOP: Final = frozenset((*UNITS, "in"))
_SHORT_UNIT: Final = re.compile(rf"\d(?:{_UNITS})\.$")
_WAITING_WORDS: Final = frozenset(
    (*MONTH_NAMES, *WEEKDAYS, *TITLES, *(name for name in CURRENCIES if name.isalpha()), "v", "et")
)
#: Words of the same kind if they follow a number.
_WAITING_UNITS: Final = frozenset(("x", "d", "h", "hr", "hrs", "m", "min", "mins", "sq", "cu", "fl", "ft"))
_ORDINARY: Final = re.compile(r"[\"'“‘(]*([^\W\d_]+(?:[’'-][^\W\d_]+)*)([.,;:!?…]*)[\"'”’)]*")
#: Letters, by Python's definition, that people read as signs or numbers.
_SPECIAL: Final = frozenset((*"⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉ⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩⅪⅫ", *FRACTIONS, *SIGNS))
_BEFORE_ROMAN: Final = NUMBERED | CROWNED
_DOTTED: Final = frozenset((*ABBREVIATIONS, *(f"{name}." for name in BEFORE_NUMBERS), "a.m.", "p.m.", "al."))
_ORDINAL: Final = re.compile(r"\d+(?:st|nd|rd|th)")
_DAY: Final = re.compile(r"\d{1,2}(?:st|nd|rd|th)?,")
#: Possible Roman numerals, and castling in chess.
_ROMAN_NUMERAL: Final = re.compile(r"[IVXLCDM]{2,}(?:th|st|nd|rd)?|O-O(?:-O)?")

_SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
#: From so many digits on, groups of digits are an identifier, not amounts.
_MANY_DIGITS: Final = 7
#: The word before a text changes how the text is read if it is one of these, …
_CONTEXT: Final = (
    BEFORE_YEARS | BEFORE_DATES | CALLS | CODES | _BEFORE_ROMAN | OWNERS | COUNTS | PARTS_OF_DECADES | {"a", "an"}
)
#: … or if the text begins with an operator. The three words before matter if it begins with a plural number ("20s") or
#: three digits that may be a code.
_NEEDS_ONE: Final = re.compile(r"[-−+×*/^]{1,2} ")
_NEEDS_MORE: Final = re.compile(r"[(\"'“‘’]*(?:\w{3,5}-)?\d[\d,]*['’]?s\b")
_DIGIT: Final = re.compile(r"\d")
_MAYBE_CODE: Final = re.compile(r"#?\d{3}")


class EnglishRules:
    """The rules that put English text into words; ``languages.LanguageRules`` has those of other languages."""

    phrases: Mapping[str, str] = table_of("english")["phrases"]

    def waits(self, token: str, before: str) -> bool:
        """Whether the spoken form of ``token``, which follows the word ``before``, may depend on the next token."""
        if token.isalpha():
            if token in _WAITING_WORDS or _ROMAN_NUMERAL.fullmatch(token):
                return True
            return token in _WAITING_UNITS and before[-1:].isdigit()
        stop, name = token[-1:] == ".", token[:-1]
        if stop and ((name in _UNITS_WITH_STOP and before[-1:].isdigit()) or _SHORT_UNIT.search(token)):
            return True
        if _WAITS.search(token) or token.lower().lstrip("(\"'“") in _DOTTED:
            return True
        return before.rpartition(" ")[2].rstrip(".") in MONTH_NAMES and _DAY.fullmatch(token) is not None

    def is_read_as_written(self, word: str, before: str) -> bool:
        """Whether ``word``, which follows ``before``, is certainly read as written; False also if this is not known."""
        found = _ORDINARY.fullmatch(word)
        if found is None or not (word.isascii() or _SPECIAL.isdisjoint(word)) or found[1].lower() in SHORT_WORDS:
            return False
        if found[2].startswith(".") and (found[1] in TITLES or f"{found[1].lower()}." in _DOTTED):
            return False
        if _ROMAN_NUMERAL.fullmatch(found[1]) or ("-" in found[1] and _HYPHENED.fullmatch(found[1])):
            return False
        return not found[1].isupper() or before.rpartition(" ")[2].lower() not in _BEFORE_ROMAN

    def in_words(self, text: str, before: str) -> str:
        """Return ``text``, a few words, with numbers and signs in words; ``before`` are up to three words before it.

        In the worst case the time is quadratic in the length of ``text``, so the caller must limit this length.
        """
        if needed := _needed_before(text, before):
            read, begins = _read(f"{needed} {text}"), f"{_read(needed)} "
            if read.startswith(begins):
                return read[len(begins) :]
        return _read(text)


def _read(text: str) -> str:
    text = text.translate(_SUBSCRIPTS)
    signs = _signs(text)
    for pattern, read, needed in _RULES:
        if needed and needed.isdisjoint(signs):
            continue
        replaced = pattern.sub(read, text)
        if replaced != text:
            text, signs = replaced, _signs(replaced)
    return " ".join(text.split())


def _signs(text: str) -> set[str]:
    signs = set(text)
    if _DIGIT.search(text):
        signs.add("0")
    return signs


def _needed_before(text: str, before: str) -> str:
    """Return the words at the end of ``before`` that may change how ``text`` is read; "" if there are none."""
    if _NEEDS_MORE.match(text) or (_MAYBE_CODE.match(text) and not CODES.isdisjoint(before.lower().split())):
        return before
    last = before.rpartition(" ")[2]
    if last.endswith(","):
        return last if last[:-1].lower() in BEFORE_DATES else ""
    if not last.isalpha():
        return last if _ORDINAL.fullmatch(last) or (last and _NEEDS_ONE.match(text)) else ""
    needed = last.lower() in _CONTEXT or last.istitle() or last.isupper() or _NEEDS_ONE.match(text) is not None
    return last if needed else ""


# Rules: functions that return the replacement of a match, in the order of _RULES.


def _email(match: re.Match[str]) -> str:
    name = match[1].replace(".", " dot ").replace("_", " underscore ").replace("-", " dash ").replace("+", " plus ")
    return f"{name} at {match[2].replace('.', ' dot ')}"


def _spelled(text: str) -> str:
    """Return each letter and each digit by itself: "A1" is "A one"."""
    return " ".join(by_digit(sign) if sign.isdecimal() else sign.upper() for sign in text)


def _hexadecimal(match: re.Match[str]) -> str:
    return f"{'binary' if match[1] in 'bB' else 'octal' if match[1] in 'oO' else 'hex'} {_spelled(match[2])}"


def _color(match: re.Match[str]) -> str:
    digits = match[1]
    if digits.isdecimal() or (digits.isalpha() and digits.islower()):
        return match[0]
    return f"hex {_spelled(digits)}"


def _hardware_address(match: re.Match[str]) -> str:
    """Put a MAC address or a UUID into words, in pairs of digits."""
    return ", ".join(_spelled(pair) for pair in re.split("[:-]", match[0]))


def _ip_address(match: re.Match[str]) -> str:
    parts, port, length = match[1].split("."), match[2], match[3]
    if any(int(part) > 255 for part in parts):
        return match[0]
    said = " dot ".join(cardinal(part) for part in parts)
    return said + (f" port {by_digit(port)}" if port else "") + (f" slash {cardinal(length)}" if length else "")


def _long_address(match: re.Match[str]) -> str:
    """Put an IPv6 address, which has "::" or all eight parts, into words, digit by digit."""
    if ("::" not in match[0] and match[0].count(":") != 7) or not re.search(r"\d", match[0]):
        return match[0]
    return " ".join("colon" if part == ":" else _spelled(part) for part in re.findall(r":|\w+", match[0]))


def _exponent(match: re.Match[str]) -> str:
    sign = "-" if match[2] in "-−" and match[2] else ""
    return f"{match[1]} × 10^{sign}{match[3].lstrip('0') or '0'}"  # a unit may follow


def _port(match: re.Match[str]) -> str:
    return f"{match[1]} port {by_digit(match[2])}"


def _postcode(match: re.Match[str]) -> str:
    return ", ".join(by_digit(digits) for digits in match.groups() if digits)


def _continental(match: re.Match[str]) -> str:
    """Convert the separators of a number to the English form: "1.234,56" and "1 234,56" become "1,234.56"."""
    whole, _, fraction = match[0].partition(",")
    grouped = f"{int(re.sub('[^0-9]', '', whole)):,}"
    return f"{grouped}.{fraction}" if fraction else grouped


def _list(match: re.Match[str]) -> str:
    return match[0] if re.fullmatch(_NUMBER, match[0]) else match[0].replace(",", ", ")


def _grouped(match: re.Match[str]) -> str:
    return re.sub(r"[ '’]", ",", match[0])


def _phone(match: re.Match[str]) -> str:
    plus = "plus " if match[0].lstrip().startswith("+") else ""
    return plus + ", ".join(by_digit(group) for group in re.findall(r"\d+", match[0]))


def _digit_groups(match: re.Match[str]) -> str:
    """Put groups of many digits, as of a credit card or an ISBN, into words digit by digit; "1-2-3" stays numbers."""
    groups = re.split(r"[ -]", match[0])
    if sum(map(len, groups)) < _MANY_DIGITS:
        return ", ".join(groups)
    return ", ".join(by_digit(group) if group.isdigit() else group for group in groups)


def _code(match: re.Match[str]) -> str:
    return f"{match[1]}{by_digit(match[2])}"


def _money_range(match: re.Match[str]) -> str:
    symbol, first, of_first, last, magnitude = match.groups()
    begin = f"{decimal(first)} {MAGNITUDES[of_first]}" if of_first else decimal(first)
    return f"{begin} to {_money(symbol, last, magnitude)}"


def _money_before(match: re.Match[str]) -> str:
    symbol, sign, amount, magnitude, code, per = match.groups()
    said = _money(code or symbol, amount, magnitude, adjective=is_adjective(match))
    minus = "minus " if sign and sign in "-−" else "plus " if sign else ""
    return minus + said + (f" per {PER.get(per, per)}" if per else "")


def _money_behind(match: re.Match[str]) -> str:
    first, last, currency, per = match.groups()
    said = (f"{decimal(first)} to " if first else "") + _money(currency, last, None, adjective=is_adjective(match))
    return said + (f" per {PER.get(per, per)}" if per else "")


def _much_money(match: re.Match[str]) -> str:
    """Put an amount in the plural, such as "$100s", into words."""
    return f"{plural_of(match[2].replace(',', ''))} of {CURRENCIES[match[1]][1]}"


def _money(currency: str, amount: str, magnitude: str | None, *, adjective: bool = False) -> str:
    one, several, small, smalls = CURRENCIES[currency.strip()]
    if adjective:
        several, smalls = one, small
    if magnitude:
        return f"{decimal(amount)} {MAGNITUDES[magnitude]} {several}"
    whole, _, part = amount.replace(",", "").partition(".")
    if len(part) != 2 or not small:
        return f"{decimal(amount)} {one if amount == '1' else several}"
    named = f"{cardinal(whole or '0')} {one if whole == '1' else several}"
    cents = f"{cardinal(str(int(part)))} {small if int(part) == 1 else smalls}"
    if int(part) == 0:
        return named
    return cents if not int(whole or "0") else f"{named} and {cents}"


def _unit(match: re.Match[str]) -> str:
    amount, joint, unit, per = match.groups()
    one, several = UNITS[unit]
    # "a 5-km run" has the unit as an adjective.
    single = amount == "1" or joint == "-" or (is_adjective(match) and not unit.startswith("°"))
    return f"{decimal(amount)} {one if single else several}" + (
        f" per {UNITS[per][0] if per in UNITS else PER.get(per, per)}" if per else ""
    )


def _many_or_minutes(match: re.Match[str]) -> str:
    """Put a number with "m" into words: it means millions in "10m people", minutes in "10m left", otherwise metres."""
    amount, letter, behind = match.groups()
    if behind.lower() in COUNTED:
        return f"{decimal(amount)} {MAGNITUDES[letter]} {behind}"
    if letter == "m" and behind.lower() in OF_MINUTES:
        return f"{decimal(amount)} minute{'' if amount == '1' else 's'} {behind}"
    return match[0]


def _size(match: re.Match[str]) -> str:
    feet, *inches = filter(None, match.groups())
    return f"{cardinal(feet)} foot {cardinal(inches[0])}"


def _angle(match: re.Match[str]) -> str:
    """Put an angle, or a latitude or longitude, into words: "40°42′46″N"."""
    degrees, minutes, seconds, direction = match.groups()
    said = f"{cardinal(degrees)} degrees {cardinal(str(int(minutes)))} minutes"
    said += f" {decimal(seconds)} seconds" if seconds else ""
    return f"{said} {_DIRECTIONS[direction]}" if direction else said


def _fraction(match: re.Match[str]) -> str:
    whole, above, below, unit = match.groups()
    if "." in above + below:
        between = "out of" if float(above) <= float(below) else "over"
        named = f"{decimal(above)} {between} {decimal(below)}" + (f" {UNITS[unit][1]}" if unit else "")
        return f"{whole} {named}" if whole else named
    return _fraction_words(whole, int(above), int(below)) + _unit_of_part(whole, int(above), unit)


def _fraction_sign(match: re.Match[str]) -> str:
    whole, sign, unit = match.groups()
    return _fraction_words(whole, *FRACTIONS[sign]) + _unit_of_part(whole, FRACTIONS[sign][0], unit)


def _unit_of_part(whole: str | None, above: int, unit: str | None) -> str:
    if unit is None:
        return ""
    one, several = UNITS[unit]
    return f" {one if whole is None and above == 1 else several}"


def _fraction_words(whole: str | None, above: int, below: int) -> str:
    if above + below == 100 and whole is None:  # shares: "the 80/20 rule"
        return f"{cardinal(str(above))} {cardinal(str(below))}"
    if below in (10, 100) or above >= below or below > 20:
        between = "out of" if above <= below else "over"
        named = f"{cardinal(str(above))} {between} {cardinal(str(below))}"
    else:
        part = {2: "half", 4: "quarter"}.get(below) or ordinal(str(below))
        named = f"{cardinal(str(above))} {part if above == 1 else plural(part)}"
    if whole is None:
        return named
    return f"{cardinal(whole)} and {'a half' if (above, below) == (1, 2) else named}"


def _power(match: re.Match[str]) -> str:
    exponent = (match[1] or "").strip("{}")
    if named := {"2": "squared", "3": "cubed"}.get(exponent):
        return f" {named}"
    return f" to the power of {exponent.replace('-', 'minus ').replace('−', 'minus ')}"


def _superscripts(match: re.Match[str]) -> str:
    digits = match[0].translate(_PLAIN_DIGITS)
    return {"2": " squared", "3": " cubed"}.get(digits, f" to the power of {digits.replace('-', 'minus ')}")


def _charge(match: re.Match[str]) -> str:
    """Put the charge of an ion into words: "Fe³⁺" is "Fe three plus"."""
    return f" {match[1].translate(_PLAIN_DIGITS)} {'plus' if match[2] == '⁺' else 'minus'}"


_PLAIN_DIGITS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _version(match: re.Match[str]) -> str:
    parts = match[1].split(".")
    between = " dot " if len(parts) == 4 else " point "
    return between.join(cardinal(part) for part in parts)


def _version_number(match: re.Match[str]) -> str:
    return "version " + " point ".join(cardinal(part) for part in match[1].split("."))


def _several_models(match: re.Match[str]) -> str:
    """Put the plural of a model's name into words: "MP3s", "H100s", "F-16s"."""
    return f"{match[1]}{'' if match[1].endswith('-') else ' '}{plural(cardinal(match[2]))}"


def _lines(match: re.Match[str]) -> str:
    """Put the number of lines of a video into words: "1080p" is "ten eighty P"."""
    return f"{in_pairs(match[1])} {match[2].upper()}"


def _number(match: re.Match[str]) -> str:
    digits = match[0]
    if len(digits) == 4 and digits.isdigit() and digits[0] != "0":
        number = int(digits)
        if 1900 <= number <= 2099:
            return year(digits)
        if 1100 <= number < 1900:
            words = match.string[: match.start()].lower().split()
            if number % 100 == 0 or match.string[match.start() - 1 : match.start()] == "(":
                return year(digits)
            if words and words[-1] in BEFORE_YEARS:
                return year(digits)
        if 1010 <= number < 1100:
            words = match.string[: match.start()].lower().split()
            if words and words[-1] in ("in", "since", "year", "circa"):
                return in_pairs(digits)
    return decimal(digits)


def _letters_and_digits(match: re.Match[str]) -> str:
    """Put digits among letters into words: "MP3" is "MP three", "H2O" "H two O". Hashes and the like are unchanged."""
    token = match[0]
    runs = re.findall(r"[A-Za-z]+|\d+", token)
    if len(runs) == 2 and runs[1] == "ers" and len(runs[0]) <= 4:
        return cardinal(runs[0]).removesuffix("e") + "ers"  # the 49ers
    if len(runs) > 4:
        return token
    return " ".join(
        cardinal(run) if run.isdigit() and len(run) <= 4 else by_digit(run) if run.isdigit() else run for run in runs
    )


def _times(match: re.Match[str]) -> str:
    return f"{decimal(match[1])} times"


def _roman(match: re.Match[str]) -> str:
    name, numeral = match.groups()
    value = roman(numeral)
    if value and name.lower() in NUMBERED:
        return f"{name} {cardinal(str(value))}"
    if value and name.lower() in CROWNED and numeral != "I":
        return f"{name} the {ordinal(str(value))}"
    return match[0]


def _roman_alone(match: re.Match[str]) -> str:
    """Put a Roman numeral into words if it can be nothing else: "XVIII", "Rocky II", "the XIX century"."""
    numeral, suffix = match.groups()
    value = roman(numeral)
    if value and (suffix or re.match(r" centur(?:y|ies)\b", match.string[match.end() :])):
        return ordinal(str(value))
    name = match.string[: match.start()].rstrip().rpartition(" ")[2]
    sure = len(numeral) > 3 or numeral in _THREE_LETTERS or (numeral == "II" and name.istitle())
    if not value or not sure:
        return match[0]
    return year(str(value)) if 1900 <= value < 2100 else cardinal(str(value))


#: Roman numerals that are no other word.
_THREE_LETTERS: Final = frozenset(("III", "VII", "XII", "XIV", "XIX", "XVI", "XXI", "XXV"))


def _capture(match: re.Match[str]) -> str:
    """Put a capture in chess notation into words: "Nxe5" is "knight takes e five"."""
    piece, place = match.groups()
    return f"{_PIECES.get(piece[0], piece)} takes {place[0]} {cardinal(place[1])}"


_PIECES: Final = {"K": "king", "Q": "queen", "R": "rook", "B": "bishop", "N": "knight"}


def _ends_sentence(behind: str) -> bool:
    """Whether an abbreviation before ``behind`` ends its sentence: "p.m. She", but not "p.m. EST" or "Jr. Blvd."."""
    return not behind or (behind[:2].strip().isupper() and _GOES_ON.match(behind) is None)


def _abbreviation(match: re.Match[str]) -> str:
    words = ABBREVIATIONS[match[0].lower()]
    behind = match.string[match.end() :]
    # If it ends a sentence, its full stop also ends the sentence.
    ends = match[0].lower() in SENTENCE_ENDS and _ends_sentence(behind)
    return f"{words}." if ends else words


def _half_of_day(match: re.Match[str]) -> str:
    behind = match.string[match.end() :]
    ends = match[0].endswith(".") and _ends_sentence(behind)
    return f" {match[1].upper()} M" + ("." if ends else "")


def _short_word(match: re.Match[str]) -> str:
    if match.string[match.end() : match.end() + 1] == "." and f"{match[0].lower()}." in ABBREVIATIONS:
        return match[0]
    return SHORT_WORDS[match[0].lower()]


def _title(match: re.Match[str]) -> str:
    return f"{TITLES[match[1]]} "


def _street(match: re.Match[str]) -> str:
    return f"{match[1]} {'Street' if match[2] == 'St' else 'Drive'}" + ("" if match[3] else ".")


def _initials(match: re.Match[str]) -> str:
    letters, behind = match[0].replace(".", " ").strip(), match.string[match.end() :]
    return letters if behind and _BEGINS_SENTENCE.match(behind) is None else f"{letters}."


def _before_number(match: re.Match[str]) -> str:
    return f"{BEFORE_NUMBERS[match[1].lower()]} "


#: The pattern of each rule, its replacement, and characters of which the text must contain at least one for the rule to
#: be tried: "0" stands for any digit, "" for no condition.
_Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]", frozenset[str]]
_Written = tuple[str, "str | Callable[[re.Match[str]], str]", str] | tuple[str, "str | Callable[[re.Match[str]], str]"]


def _rules(*rules: _Written) -> tuple[_Rule, ...]:
    return tuple((re.compile(rule[0]), rule[1], frozenset(rule[2] if len(rule) == 3 else "")) for rule in rules)


#: The full stop of a unit, unless it may end a sentence.
_STOP: Final = r"(?:(?<=[A-Za-z])\.(?=[,;:)]| [a-z](?![A-Z])))?"
#: The unit after an amount, perhaps with what it is counted by after "/" (not a plural).
_UNIT: Final = rf"({_UNITS})(?:/({_UNITS}|[a-z]+[a-rt-z]\b))?(?![\w/°²³]){_STOP}"
_NAMES: Final = WEEKDAYS | {day: day for day in WEEKDAYS.values()} | MONTH_NAMES
#: A range of weekdays or months: "Mon-Fri", "Jan. – Mar.".
_DAYS_OR_MONTHS: Final = rf"\b({one_of(_NAMES)})\.? ?[-–] ?({one_of(_NAMES)})\b(?![-–])(?:\.(?=,| [a-z\d]))?"
_HYPHENED: Final = re.compile(_DAYS_OR_MONTHS)
_LASTING: Final = "(?:minutes|hours|days|weeks|months|years|people|times)"
#: Operands of a multiplication or a power.
_OPERAND_BEFORE: Final = r"(?:(?<=[\d)])|(?<=\b[A-Za-z]))"
_OPERAND_BEHIND: Final = r"(?=[-−]?\d|[A-Za-z]\b|\(|[a-z]+\()"
_DIRECTIONS: Final = {"N": "north", "S": "south", "E": "east", "W": "west"}

_RULES: Final = _rules(
    # Network addresses and codes of computers.
    (r"\b([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)", _email, "@"),
    (r"\b(?:https?|ftp|wss?)://(?:www\.)?(?=\w)", "", ":"),
    (rf"(?<![\w/])(?ai:{one_of(SHORT_WORDS)})(?![\w/])(?!\.\w)", _short_word),
    (
        r"(?<!\w)0([xXbBoO])((?<=[bB])[01]{1,32}|(?<=[oO])[0-7]{1,16}|(?<=[xX])[0-9A-Fa-f]{1,16})(?!\w)",
        _hexadecimal,
        "0",
    ),
    (r"(?<![\w#&])#([0-9A-Fa-f]{6})(?!\w)", _color, "#"),
    (r"\bU\+([0-9A-F]{4,6})\b", lambda match: f"U plus {_spelled(match[1])}", "+"),
    (r"(?<![\w:-])[0-9A-Fa-f]{2}(?:(?::[0-9A-Fa-f]{2}){5}|(?:-[0-9A-Fa-f]{2}){5})(?![\w:-])", _hardware_address, ":-"),
    (r"(?<![\w-])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}(?![\w-])", _hardware_address, "-"),
    (r"(?<![\w:.])[0-9a-fA-F:]{3,39}(?![\w:])", _long_address, ":"),
    (r"(?<![\w.])(\d{1,3}(?:\.\d{1,3}){3})(?::(\d{2,5}))?(?:/(\d{1,2}))?(?![\w/]|[.:]\d)", _ip_address, "."),
    (r"\b(localhost|[\w-]+\.(?:com|org|net|io|dev|local)):(\d{2,5})(?![\w:])", _port, ":"),
    (r"\b([A-Za-z]):\\+", r"\1 colon backslash ", "\\"),
    (r"(?<=\w)\\+(?=\w)", " backslash ", "\\"),
    (r"(?<!\S)~(?=/)", "tilde ", "~"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([-−+]?)(\d{1,3})(?!\w|\.\d)", _exponent, "eE"),
    # Telephone numbers and codes that are read digit by digit.
    (r"(?<![\w.])(?:\+?\d{1,3}[ .-])?(?:\(\d{3}\) ?|\(?\d{3}\)?[ .-])\d{3}[ .-]\d{4}\b", _phone, "-. )"),
    (r"(?<![\w.,-])0\d{2,4}(?:-\d{3,8}|(?:[ -]\d{3,8}){2,3})(?![\w-]|[.,]\d)", _phone, "- "),
    (r"(?<![\w.])\+\d{1,3}(?:[ -]\(?\d{1,8}\)?){2,5}\b|(?<![\w.])\+\d{8,15}\b|\b555-\d{4}\b", _phone, "+-"),
    (rf"\b((?ai:{'|'.join(sorted(CALLS))}) )(\d{{3}})\b(?![,.]?\d)(?!-\d)", _code, "0"),
    (r"(?<=\b(?ai:call|dial|ring) )\d{3}-\d{4}\b", _phone, "-"),
    (
        rf"\b((?ai:{'|'.join(sorted(CODES))})\.?(?: code| number)?(?: is|:)? #?)(\d{{3,12}})\b(?![,.]?\d|[-/:])",
        _code,
        "0",
    ),
    (r"(?<=\b[A-Z]{2} )(\d{5})(?:-(\d{4}))?(?![\w,.-]\w)(?!\w)", _postcode, "0"),
    # Numbers in the forms of other countries, converted to the English form.
    (
        r"(?<![\w.,])(?:[0-9]{1,3}(?:\.[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]{4,}),[0-9]{1,2}(?!\w|[.,]\d)",
        _continental,
        ",",
    ),
    (r"(?<![\w.,])[0-9]{1,3}(?:\.[0-9]{3}){2,}(?!\w|[.,]\d)", _continental, "."),
    (
        r"(?:(?<=€)|(?<=€ ))[0-9]{1,3}\.[0-9]{3}(?!\w|[.,]\d)|(?<![\w.,])[0-9]{1,3}\.[0-9]{3}(?= ?(?:€|EUR\b|zł))",
        _continental,
        ".",
    ),
    (
        rf"(?<![\w.,])\d{{1,3}},\d{{1,2}}(?= ?(?:[%€£]|zł|EUR\b|degrees|percent|(?:{_UNITS})(?!\w)))"
        r"|(?:(?<=[€£$])|(?<=€ ))\d{1,3},\d{1,2}(?!\w|[.,]\d)|(?<![\w.,])0,\d+(?!\w|[.,]\d)",
        lambda match: match[0].replace(",", "."),
        ",",
    ),
    (r"(?<![\w.,+-])[1-9]\d{0,2}(?:(?: \d{3}){2,}|(?: 000))(?![\w]|[.,]?\d| \d)", _grouped, "0"),
    (r"(?<![\w.,])\d{1,3}(?:['’]\d{3})+(?![\w]|[.,]\d)", _grouped, "'’"),
    # Dates and times come first, since their signs have other meanings elsewhere.
    (r"(?:(?<=\d:\d\d)|(?<=\d [ap]m)|(?<=\d[ap]m)|(?<=\d [AP]M)|(?<=\d[AP]M))\s?[-–]\s?(?=\d)", " to ", "-–"),
    (r"\b(UTC|GMT)([-−+])(?=\d{1,2}\b)", lambda match: f"{match[1]} {'plus' if match[2] == '+' else 'minus'} ", "-−+"),
    (_DAYS_OR_MONTHS, lambda match: f"{_NAMES[match[1]]} to {_NAMES[match[2]]}", "-–"),
    *((pattern, read, "0") for pattern, read in RULES),
    (r"\b(FY) ?[’']?(\d{4})\b", lambda match: f"{match[1]} {year(match[2])}", "0"),
    (
        rf"(?<![\w.,{_SIGNS_OF_MONEY}-])(?:\d+(?:-\d+){{2,}}(?:-X)?|\d{{4}}(?: \d{{4}}){{3}})(?![\w-]|[.,]\d)",
        _digit_groups,
        "- ",
    ),
    (r"(?<=\d)\s*([AaPp])\.?[Mm]\b\.?", _half_of_day, "0"),
    (r"\b(RTX|GTX|RX)(?=\d{3,4}\b)", r"\1 ", "0"),
    (rf"\b({one_of(MODELS)}) (\d{{3,4}})(?![\d.,]\d|\w)", lambda match: f"{match[1]} {in_pairs(match[2])}", "0"),
    (r"\b([A-Z][A-Za-z]{0,9}-?)(\d{1,4})s\b", _several_models, "s"),
    # Money, before ranges of amounts; behind abbreviations that need the digits of their number.
    (r"(?<![\w.])(?ai:(no|nos|figs?|vol|ch|sec|eq|pp?|ca?|est|art))\. ?(?=[$€£]?\d)", _before_number, "."),
    (rf"(?<![\w)])[-−](?={_SYMBOLS})", "minus ", "-−"),
    (
        rf"(?<![A-Za-z])({_SYMBOLS})({_NUMBER})(?: ?({_MAGNITUDES}))?"
        rf"\s?[-–]\s?(?:{_SYMBOLS})?({_NUMBER})(?: ?({_MAGNITUDES})\b)?",
        _money_range,
        "-–",
    ),
    (rf"(?<![A-Za-z])({_SYMBOLS})(\d[\d,]*)s\b", _much_money, "s"),
    (
        rf"((?<![A-Za-z])(?:{_SYMBOLS}) ?|\b(?:{_CODES}) ?)([-−+])?({_NUMBER})(?:[ -]?({_MAGNITUDES})\b)?"
        rf"(?:(?<=\d) ({_CODES})\b)?(?:/([A-Za-z]+)\b)?",
        _money_before,
        "0",
    ),
    (rf"(?:({_NUMBER})[-–])?({_NUMBER})\s?((?:{_SYMBOLS})|(?:{_CODES})\b)(?:/([A-Za-z]+)\b)?", _money_behind, "0"),
    # Ranges and signs of numbers.
    (rf"(?<=\d)[~〜～](?=\d)|(?<=\d) - (?=\d+(?:\.\d+)?(?: ?(?:{_UNITS}|%)| {_LASTING})(?!\w))", " to ", "~〜～-"),
    (r"(?<=\d)[-−](?=\d+(?:\.\d+)? ?=)|(?<=(?<!\w)[a-z])[-−](?=\d+(?![\w-]))", " minus ", "-−"),
    # "-b ± …" and "= -b", but neither the ending "-y" nor the option "-l".
    (r"(?<![\w)\].^}-])[-−](?=[a-z](?:[\^²³]|/\d| (?:[+±=*/×÷−]|- )))|(?<== )[-−](?=[a-z]\b)", "minus ", "-−"),
    (r"(?:(?<=\^\d)|(?<=[²³])|(?<=\d[xyzn]))[-−](?=\d+[a-z]{0,2}(?![\w-]))", " minus ", "-−"),
    (r"(?<=[\d%MK])\s?–\s?(?=[\d.])|(?<=\d)-(?=\d+(?:[.,]\d+)*(?!\d*-|[\w]*[A-Z]))|(?<=\d[kKMB])-(?=\d)", " to ", "-–"),
    (
        r"(?:(?<![\w)\].^])(?<!\^{)|(?<= ))[-−](?=\.?\d)|(?<=[\d)]) [-−] (?=[\d(])"
        r"|(?:(?<=(?<![A-Za-z])[a-z])|(?<=[²³])) [-−] (?=\d|[a-z](?![A-Za-z]))",
        " minus ",
        "-−",
    ),
    (r"\bv\.? ?(\d+(?:\.\d+)*)\b(?!\.?\d)", _version_number, "v"),
    (r"(?<![\w.,])(\d+(?:\.\d+){2,})(?![\w])", _version, "."),
    # Numbers with a suffix.
    (r"(?<=\d)⁄(?=\d)", "/", "⁄"),
    (
        rf"(?<!\d[.,/])\b(?:(\d+) )?(\d{{1,3}}(?:\.\d+)?)/(\d{{1,3}}(?:\.\d+)?)(?:(?:st|nd|rd|th)s?)?"
        rf"(?: ?({_UNITS})(?![\w/°²³]){_STOP})?(?![\w/]|\.\d)",
        _fraction,
        "/",
    ),
    (r"(?<=[\d)]) / (?=[\d(])", " divided by ", "/"),
    (r"(?<=\d)/(?=(?:second|minute|hour|day|week|month|year|person)\b)", " per ", "/"),
    (
        rf"(?:\b(\d+) ?)?([{''.join(FRACTIONS)}])(?: ?({_UNITS})(?![\w/°²³]){_STOP})?",
        _fraction_sign,
        "½⅓⅔¼¾⅛⅕⅗⅖⅘⅙⅚⅐⅜⅝⅞⅑⅒",
    ),
    (r"(\d+)° ?(\d{1,2})[′'’](?: ?(\d{1,2}(?:\.\d+)?)[″\"”])?(?: ?([NSEW])\b)?", _angle, "°"),
    (r"(\d+)[′'’](?:(\d{1,2})(?:[″\"”]|\b)| (\d{1,2})[″\"”])", _size, "′'’"),
    (r"\b(\d+) ?ft\.?,? (\d{1,2}) ?in\b(?:\.(?=,| [a-z]))?", _size, "f"),
    (r"(?<=\d)( ?)[º˚](?=[CF]\b)", r"\1°", "º˚"),
    (r"(?<=\d)° (?=[CF]\b)", "°", "°"),
    (r"(?<![\w.])(\d{2,3}(?:\.\d)?)([CF])\b(?![-+#])", r"\1°\2", "CF"),
    (r"(?<=\d)° ?([NSEW])\b", lambda match: f" degrees {_DIRECTIONS[match[1]]}", "°"),
    (rf"(?<![\w.,])({_NUMBER})([mMBK]) ([a-z]+)\b", _many_or_minutes, "mMBK"),
    (r"(?<=\d) ?x ?(?=\d+(?:\.\d+)? ?(?:[cmk]?m|ft|yd|mi|px)\b)", " by ", "x"),
    (rf"(?<=\d) ?x ?(?=\d+(?:\.\d+)?(?: ?=| ?(?:{_UNITS})(?![\w/°²³])))", " times ", "x"),
    (rf"({_NUMBER})([ -]?){_UNIT}", _unit, "0"),
    (rf"({_NUMBER})\s?%", lambda match: f"{decimal(match[1])} percent", "%"),
    (rf"{_OPERAND_BEFORE}\*\*{_OPERAND_BEHIND}|{_OPERAND_BEFORE} \*\* {_OPERAND_BEHIND}", "^", "*"),
    (
        rf"{_OPERAND_BEFORE}\*{_OPERAND_BEHIND}|{_OPERAND_BEFORE} \* {_OPERAND_BEHIND}|(?<=\d)\*(?=[A-Za-z])",
        " times ",
        "*",
    ),
    (r"(?<=\d) ?[x×] ?(?=10(?:\^|[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]))", " times ", "x×"),
    (r"\^(?=\()", " to the power of ", "^"),
    (r"\^(\{?[-−]?\w+\}?)", _power, "^"),
    (r"(?<=[\w)])([²³⁴⁵⁶⁷]?)([⁺⁻])(?![⁰¹²³⁴⁵⁶⁷⁸⁹])", _charge, "⁺⁻"),
    (r"(?<=[\w)])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", _superscripts, "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"),
    (r"(?<=\d) ?[x×] ?(?=\d)(?<! × )|(?<=\d)x(?=\d)", " by ", "x×"),
    (r"(\d+(?:\.\d+)?)x\b(?!\s*(?:[-+*/=^]|minus|squared|cubed|to the power))", _times, "x"),
    (rf"({_NUMBER})k\b", lambda match: f"{decimal(match[1])} thousand", "k"),
    (r"(?<![\w.])(\d{3,4})([pi])\b", _lines, "pi"),
    # Abbreviations.
    (rf"(?<![\w.])(?ai:{one_of(ABBREVIATIONS)})", _abbreviation, "."),
    (r"\b([A-Z]\w+|\d+(?:st|nd|rd|th)) (St|Dr)\.(?=( [a-z0-9]|,)|$)", _street, "."),
    (r"\b(\d[\d,]*?)(?ai:st|nd|rd|th)\b", lambda match: ordinal(match[1].replace(",", "")), "0"),
    # "Gen Z" is not a general.
    (rf"\b(?!Gen (?:[XYZ](?:ers?|s)?|Alpha|Beta)\b)({one_of(TITLES)})\.? (?=[A-Z])", _title),
    (r"[Ⅰ-ↂ]+", lambda match: unicodedata.normalize("NFKC", match[0])),
    (r"\b([A-Z]\w+) ([IVXLCDM]+)(?:th|st|nd|rd)?\b", _roman, "IVXLCDM"),
    (r"\b([IVXLCDM]{2,})(?:(th|st|nd|rd)\b|\b)(?![.’'&/+-]?\w)", _roman_alone, "IVXLCDM"),
    (r"\b(?:[A-Za-z]\.){2,}", _initials, "."),
    # Moves of chess.
    (r"\bO-O-O\b", "castles queenside", "O"),
    (r"\bO-O\b", "castles kingside", "O"),
    (r"(?<!\w)([KQRBN][a-h]?[1-8]?|[a-h])x([a-h][1-8])(?!\w)", _capture, "x"),
    # All remaining numbers.
    (r"(?<![\w.,])\d+(?:,\d+)+(?![\w,])", _list, ","),
    (r"#(?=\d)", "number ", "#"),
    (r"(?<=\d)\+(?!\d)", " plus", "+"),
    (r"(?<=[A-Za-z])(\d+\.\d+)(?!\w|\.\d)", lambda match: f" {decimal(match[1])}", "."),
    (r"(?<![\w.])\d+\.\d+(?=[A-Za-z])", lambda match: f"{decimal(match[0])} ", "."),
    (r"(?<!\.)\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]+\b", _letters_and_digits, "0"),
    (r"(?:(?<=\s)|^)[’'](\d\d)\b", lambda match: short_year(match[1]), "'’"),
    (rf"(?<![A-Za-z\d])(?:{_NUMBER})(?![A-Za-z])", _number, "0"),
    # Names of files and places.
    (r"/\.(?=[A-Za-z])", " slash dot ", "/"),
    (r"(?<=\w)\.(?=[a-z_]\w*)|(?:(?<=\s)|^)\.(?=[A-Za-z])", " dot ", "."),
    (r"(?:(?<=\s)|^)\.(?=/\w)", "dot ", "/"),
    (r"(?:(?<=\s)|^)\.\.(?=/)", "dot dot ", "/"),
    (r"(?<=[A-Z]{2})/(?=[A-Z]{2})", " ", "/"),
    (r"/(?=[\w.])|(?<=\w)/", " slash ", "/"),
    # Signs.
    (r"(?<=\bC)\+\+(?=\w)", " plus plus ", "C"),
    (r"(?<=\bC)\+\+|(?<=\bC)plusplus", " plus plus", "C"),
    (r"(?<=\b[A-Z])#", " sharp", "#"),
    (r"#(?=[A-Za-z])", "hashtag ", "#"),
    # The way to an entry of a menu: "Settings > Privacy".
    (r"(?:^|\s)>\s(?=[\"'“‘(]*[A-Z][A-Za-z])", ", ", ">"),
    # A single Greek letter is a sign, and so is each of two; more of them are a word.
    (
        rf"[\u0370-\u03ff]{{3,}}|{one_of(SIGNS)}",
        lambda match: f" {SIGNS[match[0]]} " if match[0] in SIGNS else match[0],
    ),
    (r"(?:^|\s)[-–—]{1,3}\s", ", ", "-–—"),
    (r"[{}\[\]\\^|*`™®†‡•·]|(?<=\s)_|_(?=\s)", " "),
    (r"\s+(?=[,.;:!?](?:\s|$))|(?<=\()\s+", ""),
)
