"""Days as people name them: tomorrow, next Friday, July 4th, Christmas, in ten days."""

from __future__ import annotations

import calendar
import re
from datetime import date, timedelta
from typing import Final

from omni_ws.engine.llm.arithmetic import parse_number
from omni_ws.engine.llm.plain_words import listed

_MONTHS: Final = {name.lower(): number for number, name in enumerate(calendar.month_name) if name}
_SHORT_MONTHS: Final = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_WEEKDAYS: Final = {name.lower(): number for number, name in enumerate(calendar.day_name)}
_ORDINALS: Final = {
    name: number
    for number, name in enumerate(
        listed(
            "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
            "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth twentieth"
        ),
        1,
    )
} | {"thirtieth": 30}
_MONTH: Final = "|".join((*_MONTHS, *_SHORT_MONTHS, "sept"))
_MONTH_DAY = re.compile(rf"(?P<month>{_MONTH}) (?:the )?(?P<day>[a-z0-9]+(?: [a-z]+)?)(?: (?:in )?(?P<year>\d{{4}}))?")
_DAY_MONTH = re.compile(
    rf"(?:the )?(?P<day>[a-z0-9]+(?: [a-z]+)?) (?:of )?(?P<month>{_MONTH})(?: (?:in "
    rf")?(?P<year>\d{{4}}))?"
)
_ISO = re.compile(r"(?P<year>\d{4}) (?P<month>\d{1,2}) (?P<day>\d{1,2})")
_AHEAD = re.compile(r"(?:in )?(?P<number>.+) (?P<unit>days?|weeks?)(?: (?P<way>from now|from today|ago|later))?")
_MOST_DAYS: Final = 1_000_000


def in_full(day: date, *, weekday: bool = True) -> str:
    """Such as "Tuesday, March 4, 2031"."""
    return f"{f'{day:%A}, ' if weekday else ''}{day:%B} {day.day}, {day.year}"


def day_named(words: str, today: date) -> tuple[str, date] | None:
    """The name, empty where there is only a date, and the day. Feasts are those to come; None for what is no day."""
    words = (
        re.sub(r"^(?:on|the next|until) |(?: this year| day)$", "", words) if words not in _DAYS_CALLED_DAY else words
    )
    near = {
        "today": 0,
        "tomorrow": 1,
        "yesterday": -1,
        "the day after tomorrow": 2,
        "day after tomorrow": 2,
        "the day before yesterday": -2,
    }
    try:
        if words in near:
            return words[:1].upper() + words[1:], today + timedelta(near[words])
        if (feast := _feast(words, today)) is not None:
            return feast
        if (weekday := _weekday(words, today)) is not None:
            return weekday
        if (ahead := _ahead(words, today)) is not None:
            return ahead
        return _date(words, today)
    except (ValueError, OverflowError):
        return None


_DAYS_CALLED_DAY: Final = frozenset(
    ("new year's day", "christmas day", "valentine's day", "independence day", "the day after tomorrow")
)


def named_days(year: int) -> dict[str, tuple[str, date]]:
    """Feasts by what they are called in plain words."""
    thanksgiving = date(year, 11, 1) + timedelta((3 - date(year, 11, 1).weekday()) % 7 + 21)
    feasts = (
        ("Christmas", date(year, 12, 25), ("christmas", "christmas day", "xmas", "next christmas")),
        ("Christmas Eve", date(year, 12, 24), ("christmas eve",)),
        ("New Year's Eve", date(year, 12, 31), ("new year's eve", "new years eve")),
        (
            "New Year's Day",
            date(year, 1, 1),
            ("new year's day", "new years day", "new year", "new years", "new year's", "the new year"),
        ),
        ("Halloween", date(year, 10, 31), ("halloween",)),
        ("Valentine's Day", date(year, 2, 14), ("valentine's day", "valentines day", "valentine's", "valentines")),
        ("Independence Day", date(year, 7, 4), ("independence day",)),
        ("Thanksgiving", thanksgiving, ("thanksgiving", "thanksgiving day")),
        ("Easter", _easter(year), ("easter", "easter sunday")),
    )
    return {word: (name, day) for name, day, words in feasts for word in words}


def _feast(words: str, today: date) -> tuple[str, date] | None:
    for year in (today.year, today.year + 1):
        found = named_days(year).get(words)
        if found is not None and found[1] >= today:
            return found
    return None


def _weekday(words: str, today: date) -> tuple[str, date] | None:
    which, _, name = words.rpartition(" ")
    if name not in _WEEKDAYS or which not in ("", "next", "this", "last", "the coming"):
        return None
    days = (_WEEKDAYS[name] - today.weekday() - 1) % 7 + 1
    day = today + timedelta(days if which != "last" else days - 7 - 7 * (days == 7))
    return (
        f"{which} {name.capitalize()}".strip().capitalize()
        if which == "last"
        else f"{'Next ' if which == 'next' else ''}{name.capitalize()}",
        day,
    )


def _ahead(words: str, today: date) -> tuple[str, date] | None:
    match = _AHEAD.fullmatch(words)
    if match is None or not (words.startswith("in ") or match["way"]):
        return None
    number = parse_number(match["number"]) if match["number"] not in ("a", "one") else 1
    if number is None or number > _MOST_DAYS:
        return None
    days = number * (7 if match["unit"].startswith("week") else 1)
    return words[:1].upper() + words[1:], today + timedelta(-days if match["way"] == "ago" else days)


def _date(words: str, today: date) -> tuple[str, date] | None:
    match = _MONTH_DAY.fullmatch(words) or _DAY_MONTH.fullmatch(words) or _ISO.fullmatch(words)
    if match is None:
        return None
    named = match["month"]
    month = int(named) if named.isdigit() else _MONTHS.get(named) or _SHORT_MONTHS.get(named[:3], 0)
    day = _day_of_month(match["day"])
    if day is None:
        return None
    if match["year"]:
        return "", date(int(match["year"]), month, day)
    # The next of its kind, which for February 29 may be some years away.
    for year in range(today.year, today.year + 9):
        if day <= calendar.monthrange(year, month)[1] and date(year, month, day) >= today:
            return "", date(year, month, day)
    return None


def _day_of_month(words: str) -> int | None:
    if (digits := re.fullmatch(r"(\d{1,2})(?: ?(?:st|nd|rd|th))?", words)) is not None:
        return int(digits[1])
    tens, _, last = words.rpartition(" ")
    number = _ORDINALS.get(last) or parse_number(last)
    if number is None:
        return None
    return number + {"": 0, "twenty": 20, "thirty": 30}.get(tens, 100)


def _easter(year: int) -> date:
    """Easter Sunday of the Gregorian calendar, by the anonymous algorithm of 1876."""
    century, rest = divmod(year, 100)
    golden = year % 19
    moon = (19 * golden + century - century // 4 - (century - (century + 8) // 25 + 1) // 3 + 15) % 30
    weekday = (32 + 2 * (century % 4) + 2 * (rest // 4) - moon - rest % 4) % 7
    shift = (golden + 11 * moon + 22 * weekday) // 451
    month, day = divmod(moon + weekday - 7 * shift + 114, 31)
    return date(year, month, day + 1)
