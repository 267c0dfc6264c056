"""English: numbers, dates, currency, units, abbreviations and signs as a person reads them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from omni_ws.engine.spoken import english_dates as dates
from omni_ws.engine.spoken.english_units import (
    ABBREVIATIONS,
    BEFORE_NUMBERS,
    CROWNED,
    CURRENCIES,
    FRACTIONS,
    MAGNITUDES,
    MONTH_NAMES,
    NUMBERED,
    PER,
    SENTENCE_ENDS,
    SHORT_WORDS,
    SIGNS,
    TITLES,
    UNITS,
)
from omni_ws.engine.spoken.number_words import by_digit, cardinal, decimal, ordinal, plural, roman, year

_NUMBER: Final = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+"


def _one_of(names: Iterable[str]) -> str:
    """Return an alternation that prefers the longer name."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


_SYMBOLS: Final = _one_of([name for name in CURRENCIES if not name.isalpha()])
_SIGNS_OF_MONEY: Final = "".join(re.escape(name) for name in CURRENCIES if len(name) == 1)
_CODES: Final = _one_of([name for name in CURRENCIES if name.isalpha()])
_UNITS: Final = _one_of(UNITS)
_MAGNITUDES: Final = _one_of(MAGNITUDES)

#: What may need the next word to be read: a number before its unit, a month before its day, a title, an operator.
_WAITS: Final = re.compile(
    rf"(?:\dx|[\d%½⅓⅔¼¾⅛⅕²³)]|[a-z]\.[a-z]\.|[A-Z]\.[A-Z]\.|^(?:--?-?|[+=×÷±~≈<>#*/–—−]|{_SYMBOLS})"
    rf"|^(?:Mon|Tues?|Wed|Thu(?:rs)?|Fri|Sat|Sun)[.,]|\b(?:{_one_of(MONTH_NAMES)}|{_one_of(TITLES)})\.)$"
)
_WAITING_WORDS: Final = frozenset((*MONTH_NAMES, *TITLES, *(name for name in CURRENCIES if name.isalpha()), "v", "et"))
_ORDINARY: Final = re.compile(r"[\"'“‘(]*([^\W\d_]+(?:[’'-][^\W\d_]+)*)([.,;:!?…]*)[\"'”’)]*")
#: Letters, to Python, that are signs or numbers to a reader.
_SPECIAL: Final = frozenset((*"⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉", *FRACTIONS, *SIGNS))
_BEFORE_ROMAN: Final = NUMBERED | CROWNED
_DOTTED: Final = frozenset((*ABBREVIATIONS, *(f"{name}." for name in BEFORE_NUMBERS), "a.m.", "p.m."))
_ORDINAL: Final = re.compile(r"\d+(?:st|nd|rd|th)")
_DAY: Final = re.compile(r"\d{1,2}(?:st|nd|rd|th)?,")

_YEAR_WORDS: Final = frozenset(
    (
        *("in", "since", "of", "by", "until", "till", "from", "around", "circa", "before", "after", "between"),
        *("year", "late", "early", "mid", "to", "and", "during", "anno", "established"),
        *(name.lower() for name in MONTH_NAMES.values()),
    )
)
_SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_CALLS: Final = frozenset(("call", "dial", "text", "phone", "ring", "calling", "dialing", "number"))
#: From so many on, digits in groups are the number of something, no amounts.
_MANY_DIGITS: Final = 7
_CONTEXT: Final = _YEAR_WORDS | _CALLS | _BEFORE_ROMAN


def waits(token: str, before: str) -> bool:
    """Whether ``token``, which follows ``before``, may be read in another way with the next one."""
    if token.isalpha():
        return token in _WAITING_WORDS or (token == "x" and before[-1:].isdigit())
    if _WAITS.search(token) or token.lower().lstrip("(\"'“") in _DOTTED:
        return True
    return before.rstrip(".") in MONTH_NAMES and _DAY.fullmatch(token) is not None


def is_read_as_written(word: str, before: str) -> bool:
    """Whether ``word``, which follows ``before``, is an ordinary one. A quick answer: False may be wrong."""
    found = _ORDINARY.fullmatch(word)
    if found is None or not (word.isascii() or _SPECIAL.isdisjoint(word)) or found[1].lower() in SHORT_WORDS:
        return False
    if found[2].startswith(".") and (found[1] in TITLES or f"{found[1].lower()}." in _DOTTED):
        return False
    return not (found[1].isupper() and before.lower() in _BEFORE_ROMAN)


def in_words(text: str, before: str) -> str:
    """Return a few words as they are read; ``before`` is the word before them.

    Its time is quadratic at worst: the caller bounds the length.
    """
    if _needed_before(before):
        read, begins = _read(f"{before} {text}"), f"{_read(before)} "
        if read.startswith(begins):
            return read[len(begins) :]
    return _read(text)


def _read(text: str) -> str:
    text = text.translate(_SUBSCRIPTS)
    for pattern, read in _RULES:
        text = pattern.sub(read, text)
    return " ".join(text.split())


def _needed_before(before: str) -> bool:
    """Whether the word before changes the reading, and is read by itself."""
    if not before.isalpha():
        return _ORDINAL.fullmatch(before) is not None
    return before.lower() in _CONTEXT or before.istitle() or before == "the"


# Rules: each gets a match, in the order of _RULES.


def _email(match: re.Match[str]) -> str:
    name = match[1].replace(".", " dot ").replace("_", " underscore ").replace("-", " dash ").replace("+", " plus ")
    return f"{name} at {match[2].replace('.', ' dot ')}"


def _phone(match: re.Match[str]) -> str:
    plus = "plus " if match[0].lstrip().startswith("+") else ""
    return plus + ", ".join(by_digit(group) for group in re.findall(r"\d+", match[0]))


def _digit_groups(match: re.Match[str]) -> str:
    """The number of a card or a book is read by digit, "1-2-3" is not."""
    groups = re.split(r"[ -]", match[0])
    if sum(map(len, groups)) < _MANY_DIGITS:
        return ", ".join(groups)
    return ", ".join(by_digit(group) if group.isdigit() else group for group in groups)


def _call(match: re.Match[str]) -> str:
    return f"{match[1]} {by_digit(match[2])}"


def _money_range(match: re.Match[str]) -> str:
    symbol, first, last, magnitude = match.groups()
    return f"{decimal(first)} to {_money(symbol, last, magnitude)}"


def _money_before(match: re.Match[str]) -> str:
    return _money(match[1], match[2], match[3]) + (f" per {PER.get(match[4], match[4])}" if match[4] else "")


def _money_behind(match: re.Match[str]) -> str:
    first, last, currency = match.groups()
    return (f"{decimal(first)} to " if first else "") + _money(currency, last, None)


def _money(currency: str, amount: str, magnitude: str | None) -> str:
    one, several, small, smalls = CURRENCIES[currency.strip()]
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
    amount, joint, unit = match.groups()
    one, several = UNITS[unit]
    # "a 5-km run" has the unit as an adjective.
    return f"{decimal(amount)} {one if amount == '1' or joint == '-' else several}"


def _size(match: re.Match[str]) -> str:
    feet, inches = match.groups()
    return f"{cardinal(feet)} foot {cardinal(inches)}"


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
    return {"2": " squared", "3": " cubed"}.get(digits, f" to the power of {digits}")


_PLAIN_DIGITS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")


def _version(match: re.Match[str]) -> str:
    parts = match[1].split(".")
    between = " dot " if len(parts) == 4 else " point "
    return between.join(cardinal(part) for part in parts)


def _decade(match: re.Match[str]) -> str:
    digits = match[1] or match[2]
    return plural(year(digits) if len(digits) == 4 else cardinal(digits))


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
            if words and words[-1] in _YEAR_WORDS:
                return year(digits)
    return decimal(digits)


def _letters_and_digits(match: re.Match[str]) -> str:
    """ "MP3" is "MP three", "3D" "three D", "H2O" "H two O"; a hash or a serial number stays as it is."""
    token = match[0]
    runs = re.findall(r"[A-Za-z]+|\d+", token)
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
    if name.lower() in NUMBERED:
        return f"{name} {cardinal(str(value))}"
    if name.lower() in CROWNED and numeral != "I":
        return f"{name} the {ordinal(str(value))}"
    return match[0]


def _abbreviation(match: re.Match[str]) -> str:
    words = ABBREVIATIONS[match[0].lower()]
    behind = match.string[match.end() :]
    # Where a sentence ends with it, its full stop is the sentence's too.
    ends = match[0].lower() in SENTENCE_ENDS and (not behind or behind[:2].strip().isupper())
    return f"{words}." if ends else words


def _half_of_day(match: re.Match[str]) -> str:
    behind = match.string[match.end() :]
    ends = match[0].endswith(".") and (not behind or behind[:2].strip().isupper())
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
    letters = match[0].replace(".", " ").strip()
    return letters if match.string[match.end() :] else f"{letters}."


def _before_number(match: re.Match[str]) -> str:
    return f"{BEFORE_NUMBERS[match[1].lower()]} "


def _sign(match: re.Match[str]) -> str:
    return f" {SIGNS[match[0]]} "


_Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


def _rules(*pairs: tuple[str, str | Callable[[re.Match[str]], str]]) -> tuple[_Rule, ...]:
    return tuple((re.compile(pattern), read) for pattern, read in pairs)


_RULES: Final = _rules(
    # Addresses, telephone numbers, dates and times: their signs mean something else than elsewhere.
    (r"\b([\w.+-]+)@([\w-]+(?:\.[\w-]+)+)", _email),
    (rf"(?<![\w/])(?ai:{_one_of(SHORT_WORDS)})(?![\w/])(?!\.\w)", _short_word),
    (r"(?<![\w.])(?:\+?\d{1,3}[ .-])?(?:\(\d{3}\) ?|\(?\d{3}\)?[ .-])\d{3}[ .-]\d{4}\b", _phone),
    (r"(?<![\w.,-])0\d{2,4}(?:-\d{3,8}|(?:[ -]\d{3,8}){2,3})(?![\w-]|[.,]\d)", _phone),
    (r"(?<![\w.])\+\d{1,3}(?:[ -]\(?\d{1,8}\)?){2,5}\b|(?<![\w.])\+\d{8,15}\b|\b555-\d{4}\b", _phone),
    (rf"\b((?ai:{'|'.join(_CALLS)})) (\d{{3}})\b(?![,.]?\d)", _call),
    (r"(?:(?<=\d:\d\d)|(?<=\d [ap]m)|(?<=\d[ap]m)|(?<=\d [AP]M)|(?<=\d[AP]M))\s?[-–]\s?(?=\d)", " to "),
    *dates.RULES,
    (
        rf"(?<![\w.,{_SIGNS_OF_MONEY}-])(?:\d+(?:-\d+){{2,}}(?:-X)?|\d{{4}}(?: \d{{4}}){{3}})(?![\w-]|[.,]\d)",
        _digit_groups,
    ),
    (r"(?<=\d)\s*([AaPp])\.?[Mm]\b\.?", _half_of_day),
    (r"\b(\d{3}0)s\b|(?:[’']|(?<=\bthe ))(\d0)s\b", _decade),
    # Money, before the ranges in it.
    (rf"(?<![\w)])[-−](?={_SYMBOLS})", "minus "),
    (
        rf"(?<![A-Za-z])({_SYMBOLS})({_NUMBER})\s?[-–]\s?(?:{_SYMBOLS})?({_NUMBER})(?: ?({_MAGNITUDES})\b)?",
        _money_range,
    ),
    (
        rf"((?<![A-Za-z])(?:{_SYMBOLS})|\b(?:{_CODES}) )({_NUMBER})(?:[ -]?({_MAGNITUDES})\b)?(?:/([a-z]+)\b)?",
        _money_before,
    ),
    (rf"(?:({_NUMBER})[-–])?({_NUMBER})\s?((?:{_SYMBOLS})|(?:{_CODES})\b)", _money_behind),
    # Ranges and signs of numbers.
    (r"(?<=[\d%MK])\s?–\s?(?=[\d.])|(?<=\d)-(?=\d+(?:[.,]\d+)*(?!\d*-|[\w]*[A-Z]))", " to "),
    (r"(?:(?<![\w)\].^])(?<!\^{)|(?<= ))[-−](?=\.?\d)|(?<=\d) [-−] (?=\d)", " minus "),
    (r"\bv\.? ?(?=\d+(?:\.\d+)*\b)", "version "),
    (r"(?<![\w.,])(\d+(?:\.\d+){2,})(?![\w])", _version),
    # Numbers with something behind them.
    (
        rf"(?<!\d[.,])\b(?:(\d+) )?(\d{{1,3}}(?:\.\d+)?)/(\d{{1,3}}(?:\.\d+)?)"
        rf"(?: ?({_UNITS})(?![\w/°²³]))?(?![\w/]|\.\d)",
        _fraction,
    ),
    (r"(?<=[\d)]) / (?=[\d(])", " divided by "),
    (rf"(?:\b(\d+) ?)?([{''.join(FRACTIONS)}])(?: ?({_UNITS})(?![\w/°²³]))?", _fraction_sign),
    (r"(\d+)[′'’](\d{1,2})(?:[″\"”]|\b)", _size),
    (r"(?<=\d)( ?)[º˚](?=[CF]\b)", r"\1°"),
    (rf"({_NUMBER})([ -]?)({_UNITS})(?![\w/°²³])", _unit),
    (rf"({_NUMBER})\s?%", lambda match: f"{decimal(match[1])} percent"),
    (r"\^(\{?[-−]?\w+\}?)", _power),
    (r"(?<=[\w)])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", _superscripts),
    (r"(?<=\d) ?[x×] ?(?=\d)(?<! × )|(?<=\d)x(?=\d)", " by "),
    (r"(\d+(?:\.\d+)?)x\b(?! ?[-+*/=^])", _times),
    (r"(?<=\d) \* (?=\d)", " times "),
    (rf"({_NUMBER})k\b", lambda match: f"{decimal(match[1])} thousand"),
    # Abbreviations.
    (r"\b(?ai:(no|nos|figs?|vol|ch|sec|eq|pp?|ca?|est|art))\. ?(?=\d)", _before_number),
    (rf"(?<![\w.])(?ai:{_one_of(ABBREVIATIONS)})", _abbreviation),
    (r"\b([A-Z]\w+|\d+(?:st|nd|rd|th)) (St|Dr)\.(?=( [a-z0-9]|,)|$)", _street),
    (r"\b(\d[\d,]*?)(?:st|nd|rd|th)\b", lambda match: ordinal(match[1].replace(",", ""))),
    # "Gen Z" is no general.
    (rf"\b(?!Gen (?:[XYZ](?:ers?|s)?|Alpha|Beta)\b)({_one_of(TITLES)})\.? (?=[A-Z])", _title),
    (r"\b([A-Z]\w+) ([IVXL]+)\b", _roman),
    (r"\b(?:[A-Za-z]\.){2,}", _initials),
    # What is left of numbers.
    (r"#(?=\d)", "number "),
    (r"(?<=\d)\+(?!\d)", " plus"),
    (r"(?<![\w.])\d+\.\d+(?=[A-Za-z])", lambda match: f"{decimal(match[0])} "),
    (r"(?<!\.)\b(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]+\b", _letters_and_digits),
    (rf"(?<![A-Za-z\d])(?:{_NUMBER})(?![A-Za-z])", _number),
    # Names of files and places.
    (r"(?<=\w)\.(?=[a-z_]\w*)|(?:(?<=\s)|^)\.(?=[A-Za-z])", " dot "),
    (r"(?<=[A-Z]{2})/(?=[A-Z]{2})", " "),
    (r"/(?=\w)|(?<=\w)/", " slash "),
    # Signs.
    (r"(?<=\bC)\+\+|(?<=\bC)plusplus", " plus plus"),
    (r"(?<=\b[A-Z])#", " sharp"),
    (r"#(?=[A-Za-z])", "hashtag "),
    (_one_of(SIGNS), _sign),
    (r"(?:^|\s)[-–—]{1,3}\s", ", "),
    (r"[{}\[\]\\^|*`™®†‡•·]|(?<=\s)_|_(?=\s)", " "),
    (r"\s+(?=[,.;:!?](?:\s|$))|(?<=\()\s+", ""),
)
