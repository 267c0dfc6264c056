"""The time of day, and days of the calendar as people name them."""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from typing import Final

from omni_ws.engine.llm.intents.matcher import Asked, Intent, Slots
from omni_ws.engine.llm.plain_words import listed, parse_number


def _time(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"It is {_clock(asked.now)}.",))


def _clock(now: datetime) -> str:
    return f"{now.hour % 12 or 12}:{now.minute:02d} {'AM' if now.hour < 12 else 'PM'}"


def _time_elsewhere(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"I only know the time here. It is {_clock(asked.now)}.",))


def _time_later(asked: Asked, slots: Slots) -> Iterator[str] | None:
    number = 1 if slots["number"] in ("a", "an") else parse_number(slots["number"])
    if number is None or not 0 < number <= _MOST_LATER:
        return None
    later = asked.now + timedelta(**{f"{slots['unit']}s": number})
    return iter((f"Then it will be {_clock(later)}.",))


def _date(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"Today is {in_full(asked.now.date())}.",))


def _date_and_time(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"Today is {in_full(asked.now.date())}.", f"It is {_clock(asked.now)}."))


def _is_it(asked: Asked, slots: Slots) -> Iterator[str]:
    today = f"{asked.now:%A}"
    return iter((f"{'Yes' if today.lower() == slots['weekday'] else 'No'}. It is {today}.",))


def _year(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"It is the year {asked.now.year}.",))


def _month(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"It is {asked.now:%B} {asked.now.year}.",))


def _week(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"It is week {asked.now.isocalendar().week} of the year.",))


def _weekend(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"{'Yes' if asked.now.weekday() >= 5 else 'No'}. It is {asked.now:%A}.",))


def _weekday(asked: Asked, slots: Slots) -> Iterator[str]:
    return iter((f"{'Yes' if asked.now.weekday() < 5 else 'No'}. It is {asked.now:%A}.",))


def _day(asked: Asked, slots: Slots) -> Iterator[str] | None:
    """Which day of the week a date is, and which date a day."""
    today = asked.now.date()
    found = day_named(slots["day"], today)
    if found is None:
        return None
    name, day = found
    is_past = "was" if day < today else "is"
    return iter(
        (f"{name} {is_past} {in_full(day)}.",) if name else (f"{in_full(day, weekday=False)} {is_past} a {day:%A}.",)
    )


def _until(asked: Asked, slots: Slots) -> Iterator[str] | None:
    today = asked.now.date()
    found = day_named(slots["day"], today)
    if found is None:
        return None
    name, day = found
    name = name or in_full(day, weekday=False)
    days = (day - today).days
    if days == 0:
        return iter((f"{name} is today.",))
    many = "one day" if abs(days) == 1 else f"{abs(days)} days"
    if days < 0:
        return iter((f"{name} was {many} ago.",))
    unit = slots.get("unit", "days")
    if unit.startswith("week") and days >= 7:
        weeks, rest = divmod(days, 7)
        many = f"{_counted(weeks, 'week')} and {_counted(rest, 'day')}" if rest else _counted(weeks, "week")
    verb = "is" if many == "one day" else "are"
    return iter((f"There {verb} {many} until {name}.",))


def _counted(number: int, unit: str) -> str:
    return f"one {unit}" if number == 1 else f"{number} {unit}s"


def _leap_year(asked: Asked, slots: Slots) -> Iterator[str] | None:
    year = parse_number(slots["year"]) if "year" in slots else asked.now.year
    if year is None or not 0 < year <= 9999:
        return None
    return iter((f"{year} is a leap year." if calendar.isleap(year) else f"{year} is not a leap year.",))


def _days_of_month(asked: Asked, slots: Slots) -> Iterator[str] | None:
    month = slots["month"].capitalize()
    if month not in calendar.month_name[1:]:
        return None
    if month == "February":
        return iter(("February has 28 days, and 29 in a leap year.",))
    return iter((f"{month} has {calendar.monthrange(2001, list(calendar.month_name).index(month))[1]} days.",))


#: Of minutes or hours.
_MOST_LATER: Final = 1000
_NOW: Final = "[(now|right now|today|exactly|at the moment|please)]"

CLOCK = (
    Intent(
        name="time",
        phrases=(
            f"[what is] the [current|exact] time [(is it|here)] {_NOW}".replace("[current|exact]", "[(current|exact)]"),
            f"what time [(is it|it is|do you have|do we have)] {_NOW}",
            "(what the time is|do you (know|have) the time|have you got the time|time|the time|what is time now|how "
            "late is it|what is your time|current time|what hour is it|tell time|is it late|what is the hour|what "
            "time is it there|what does the clock say|what time is)",
        ),
        reply=_time,
    ),
    Intent(
        name="time elsewhere",
        slots=(
            r"(?:what time is it|what is the time|what is the local time|the time|what time do they have) "
            r"(?:now )?(?:in|at|for) .+",
        ),
        reply=_time_elsewhere,
    ),
    Intent(
        name="time later",
        slots=(
            r"(?:what time|how late|what) (?:is it|will it be|will be the time) in (?P<number>.+?) (?P<unit>minute|"
            r"hour)s?",
            r"what will the time be in (?P<number>.+?) (?P<unit>minute|hour)s?",
        ),
        reply=_time_later,
    ),
    Intent(
        name="date",
        phrases=(
            f"[what is] [(the|today's|todays|current)] date [(today|of today|is it)] {_NOW}",
            "(what|which) (day|date) (is it|is today|it is|do we have|of the week is it|of the month is it|is it "
            f"today|of the week is today|are we) {_NOW}",
            "(what is today|what day of the week it is|the day today|what is the day|what is the day today|what is "
            "today's day|today|what weekday is it|what day|which day)",
        ),
        reply=_date,
    ),
    Intent(
        name="date and time",
        phrases=(
            "[what is] [the] (date and [the] time|time and [the] date) [today]",
            "what is the date today and the time",
        ),
        reply=_date_and_time,
    ),
    Intent(
        name="is it Monday",
        slots=(rf"is (?:it|today) (?:a )?(?P<weekday>{'|'.join(calendar.day_name).lower()})(?: today)?",),
        reply=_is_it,
    ),
    Intent(
        name="year",
        phrases=("(what|which) year (is it|is this|do we have|are we in|it is) [now]", "what is the [current] year"),
        reply=_year,
    ),
    Intent(
        name="month",
        phrases=("(what|which) month (is it|is this|do we have|are we in|it is) [now]", "what is the [current] month"),
        reply=_month,
    ),
    Intent(
        name="week",
        phrases=(
            "(what|which) (week|calendar week|week number|week of the year) (is it|is this|do we have|are we in)",
            "what is the week number",
        ),
        reply=_week,
    ),
    Intent(
        name="weekend",
        phrases=("is (it|today) (the weekend|weekend|a weekend) [today]", "is it weekend yet"),
        reply=_weekend,
    ),
    Intent(
        name="weekday",
        phrases=("is (it|today) a (weekday|working day|work day) [today]",),
        reply=_weekday,
    ),
    Intent(
        name="leap year",
        slots=(r"(?:is|was|will) (?:it|this|this year|(?P<year>[a-z0-9 ]+?))(?: be)? a leap year",),
        reply=_leap_year,
    ),
    Intent(
        name="days of a month",
        slots=(r"how many days (?:are )?(?:there )?(?:in|has|does) (?P<month>[a-z]+)(?: have)?",),
        reply=_days_of_month,
    ),
    Intent(
        name="a day",
        slots=(
            r"(?:what|which) (?:day|weekday|day of the week|date)(?: of the week)? (?:is|was|will|does|did|"
            r"falls?)(?: it)? ?(?P<day>.+?)(?: be| fall on| this year| on)*",
            r"when (?:is|was) (?P<day>.+?)(?: this year)?",
            r"what is the date (?:of |on )?(?P<day>.+)",
            r"what is (?P<day>tomorrow|yesterday|the day after tomorrow)",
            r"(?:what|which) (?:day|date) (?:is it|was it|will it be|do we have) (?P<day>.+)",
        ),
        reply=_day,
    ),
    Intent(
        name="days until",
        slots=(
            r"how (?:many (?P<unit>days|weeks|months)|long|far)(?: away| off)?(?: is it| are there| are| is| "
            r"do we have| left| more| it is)*(?: left)?(?: until| till| til| to| before) (?P<day>.+?)(?: "
            r"comes| again)?",
            r"how (?:many days|long)(?: away)? is (?P<day>.+?)(?: away| from now)",
            r"how many days(?: ago was| since| is it since| have passed since| has it been since) (?P<day>.+)",
        ),
        reply=_until,
    ),
)


# Days as people name them: tomorrow, next Friday, July 4th, Christmas, in ten days

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
_DAYS_CALLED_DAY: Final = frozenset(
    ("new year's day", "christmas day", "valentine's day", "independence day", "the day after tomorrow")
)


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
        if (weekday := _weekday_named(words, today)) is not None:
            return weekday
        if (ahead := _ahead(words, today)) is not None:
            return ahead
        return _date_named(words, today)
    except (ValueError, OverflowError):
        return None


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


def _weekday_named(words: str, today: date) -> tuple[str, date] | None:
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


def _date_named(words: str, today: date) -> tuple[str, date] | None:
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
