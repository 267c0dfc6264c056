"""The time of day, and days of the calendar as people name them: tomorrow, next Friday, July 4th, in ten days."""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable
from datetime import date, datetime, timedelta
from typing import Final

from omni_ws.engine.llm.intents.sums import parse_number
from omni_ws.engine.llm.plain_words import Asked, Slots, expanded, read
from omni_ws.engine.spoken.english_numbers import ordinal

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
    number = 1 if slots["number"] in ("a", "an") else parse_number(slots["number"])
    if number is None or not 0 < number <= _MOST_LATER:
        return None
    return _clock(asked.now + timedelta(**{f"{slots['unit']}s": number}))


def which_day(asked: Asked, slots: Slots) -> str | None:
    """The day of the week of a date, or the date of a day."""
    today = asked.now.date()
    if (found := day_named(slots["day"], today)) is None:
        return None
    name, day = found
    is_past = "was" if day < today else "is"
    return f"{name} {is_past} {in_full(day)}." if name else f"{in_full(day, weekday=False)} {is_past} a {day:%A}."


def days_until(asked: Asked, slots: Slots) -> str | None:
    today = asked.now.date()
    if (found := day_named(slots["day"], today)) is None:
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
    """A date as it is spoken and written, such as "Tuesday, March 4, 2031"."""
    return f"{f'{day:%A}, ' if weekday else ''}{day:%B} {day.day}, {day.year}"


def day_named(words: str, today: date) -> tuple[str, date] | None:
    """The name of a day, "" for a bare date, and its date. A feast is the next one. None for what is no day."""
    shorter = re.sub(r"^(?:on|the next|until) |(?: this year| day)$", "", words)
    try:
        for name in (words, shorter):
            if name in _NEAR:
                return name[:1].upper() + name[1:], today + timedelta(_NEAR[name])
            if (feast := _feast(name, today)) is not None:
                return feast
        return _weekday_named(shorter, today) or _ahead(shorter, today) or _date_named(shorter, today)
    except (ValueError, OverflowError):
        return None


def _clock(now: datetime) -> str:
    return f"{now.hour % 12 or 12}:{now.minute:02d} {'AM' if now.hour < 12 else 'PM'}"


def _counted(number: int, unit: str) -> str:
    return f"one {unit}" if number == 1 else f"{number} {unit}s"


def _feast(words: str, today: date) -> tuple[str, date] | None:
    """The feast of that name which comes next."""
    for name, (month, day, names) in _CLOCK["feasts"].items():
        if words in expanded(names):
            for year in (today.year, today.year + 1):
                found = _easter(year) if name == "Easter" else date(year, month, day)
                if name == "Thanksgiving":  # the fourth Thursday
                    found += timedelta((3 - found.weekday()) % 7)
                if found >= today:
                    return name, found
    return None


def _weekday_named(words: str, today: date) -> tuple[str, date] | None:
    which, _, name = words.rpartition(" ")
    if name not in _WEEKDAYS or which not in ("", "next", "this", "last", "the coming"):
        return None
    days = (_WEEKDAYS[name] - today.weekday() - 1) % 7 + 1
    if which == "last":
        return f"Last {name.capitalize()}", today + timedelta(days - 7 - 7 * (days == 7))
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


def _date_named(words: str, today: date) -> tuple[str, date] | None:
    match = next(filter(None, (form.fullmatch(words) for form in _DATES)), None)
    day = None if match is None else _day_of_month(match["day"])
    if match is None or day is None:
        return None
    named = match["month"]
    month = int(named) if named.isdigit() else _MONTHS.get(named) or _SHORT_MONTHS[named[:3]]
    if match["year"]:
        return "", date(int(match["year"]), month, day)
    # The next of its kind, which for February 29 may be some years away.
    years = (year for year in range(today.year, today.year + 9) if day <= calendar.monthrange(year, month)[1])
    return next((("", found) for year in years if (found := date(year, month, day)) >= today), None)


def _day_of_month(words: str) -> int | None:
    if (digits := re.fullmatch(r"(\d{1,2})(?: ?(?:st|nd|rd|th))?", words)) is not None:
        return int(digits[1])
    tens, _, last = words.rpartition(" ")
    number = _ORDINALS.get(last) or parse_number(last)
    return None if number is None else number + {"": 0, "twenty": 20, "thirty": 30}.get(tens, 100)


def _easter(year: int) -> date:
    """Easter Sunday of the Gregorian calendar, by the anonymous algorithm of 1876."""
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
