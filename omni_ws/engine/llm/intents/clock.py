"""The time of day, and days of the calendar."""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from omni_ws.engine.llm.arithmetic import parse_number
from omni_ws.engine.llm.intents.calendar_days import day_named, in_full
from omni_ws.engine.llm.intents.intent import Asked, Intent, Slots


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
