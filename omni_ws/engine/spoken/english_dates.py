"""Dates and times of day as they are read in English."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from omni_ws.engine.spoken.english_units import MONTH_NAMES, MONTHS
from omni_ws.engine.spoken.number_words import cardinal, clock, decimal, ordinal, year

_MONTH: Final = "|".join(sorted(MONTH_NAMES, key=len, reverse=True))
_WEEKDAYS: Final = {
    "Mon": "Monday",
    "Tue": "Tuesday",
    "Tues": "Tuesday",
    "Wed": "Wednesday",
    "Thu": "Thursday",
    "Thurs": "Thursday",
    "Fri": "Friday",
    "Sat": "Saturday",
    "Sun": "Sunday",
}


def _iso(match: re.Match[str]) -> str:
    if not _is_date(int(match[2]), int(match[3])):
        return match[0]
    said = f"{MONTHS[int(match[2]) - 1]} {ordinal(str(int(match[3])))}, {year(match[1])}"
    if match[4]:
        said += f", {_clock(match[4], match[5])}"
        said += " U T C" if match[6] == "Z" else ""
    return said


def _numeric(match: re.Match[str]) -> str:
    """3/15/2024 is the American order; a first number over 12 is a day."""
    first, second = int(match[1]), int(match[2])
    month, day = (second, first) if first > 12 else (first, second)
    return _named(match[0], month, day, match[3])


def _dotted(match: re.Match[str]) -> str:
    return _named(match[0], int(match[2]), int(match[1]), match[3])


def _named(text: str, month: int, day: int, digits: str) -> str:
    if not _is_date(month, day):
        return text
    return f"{MONTHS[month - 1]} {ordinal(str(day))}, {_year(digits)}"


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


def _ratio(match: re.Match[str]) -> str:
    return f"{cardinal(match[1])} to {cardinal(match[2])}"


def _weekday(match: re.Match[str]) -> str:
    return _WEEKDAYS[match[1]]


def _month_name(match: re.Match[str]) -> str:
    return MONTH_NAMES[match[1]]


def _year(digits: str) -> str:
    return year(digits) if len(digits) == 4 else year(("20" if int(digits) < 50 else "19") + digits)


def _is_date(month: int, day: int) -> bool:
    return 1 <= month <= 12 and 1 <= day <= 31


#: In the order in which they apply.
RULES: Final[tuple[tuple[str, Callable[[re.Match[str]], str]], ...]] = (
    (rf"\b({'|'.join(_WEEKDAYS)})\b\.?(?=,? (?:{_MONTH})\b|,? \d)", _weekday),
    (
        r"(?<![\w-])(\d{4})-(\d\d)-(\d\d)(?:[T ](\d\d):(\d\d)(?::\d\d(?:\.\d+)?)?(Z|[+-]\d\d:\d\d)?)?(?![\w-])",
        _iso,
    ),
    (r"(?<![\w/])(\d{1,2})/(\d{1,2})/(\d{4}|\d\d)(?![\w/])", _numeric),
    (r"(?<![\w/-])(\d{1,2})-(\d{1,2})-(\d{4})(?![\w/-])", _numeric),
    (r"(?<![\w.])(\d{1,2})\.(\d{1,2})\.(\d{4})(?![\w])", _dotted),
    (
        rf"\b({_MONTH})\.? (\d{{1,2}})(?:st|nd|rd|th)?(?:[-–](\d{{1,2}}))?(?![\d:%])(?:,? (\d{{4}})\b)?",
        _month_first,
    ),
    (
        r"(?<!\d[-–])\b(the )?(\d{1,2})(?:st|nd|rd|th)?(?: ?[-–] ?(\d{1,2})(?:st|nd|rd|th)?)? (?:of )?"
        rf"({_MONTH})\b\.?(?:,? (\d{{4}})\b)?",
        _day_first,
    ),
    (rf"\b({_MONTH})(?:\.(?= ?\d)|(?=,? \d{{4}}\b))", _month_name),
    (
        r"(?<![\w:.])(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?(?:\s?([AaPp])\.?[Mm]\b(?:\.(?! [A-Z]|$))?)?(?![\d:])",
        _time,
    ),
    (r"(?<![\w:.])(\d{1,3}):(\d{1,3})(?![\w:])(?!\.\d)", _ratio),
)
