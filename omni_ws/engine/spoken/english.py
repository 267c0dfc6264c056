"""Converts English text to words as a person reads them: numbers, dates, money, units, abbreviations and signs."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Final

from omni_ws.engine.spoken import english_numbers
from omni_ws.engine.spoken.english_numbers import (
    ABBREVIATIONS,
    BEFORE_DATES,
    BEFORE_NUMBERS,
    BEFORE_YEARS,
    CALLS,
    CODES,
    COUNTED,
    COUNTS,
    CROWNED,
    CURRENCIES,
    FRACTIONS,
    MAGNITUDES,
    MODELS,
    MONTH_NAMES,
    NUMBERED,
    OF_MINUTES,
    OWNERS,
    PARTS_OF_DECADES,
    PER,
    SENTENCE_ENDS,
    SHORT_WORDS,
    SIGNS,
    TITLES,
    UNITS,
    WEEKDAYS,
    by_digit,
    cardinal,
    decimal,
    in_pairs,
    is_adjective,
    ordinal,
    plural,
    plural_of,
    roman,
    short_year,
    year,
)
from omni_ws.engine.spoken.languages import one_of, table_of

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
    rf"(?:\d(?:x|[hdmskKMB]|hrs?|mins?|st|nd|rd|th)|[\d%½⅓⅔¼¾⅛⅕²³°)]|[a-z]\.[a-z]\.|[A-Z]\.[A-Z]\."
    rf"|^(?:--?-?|\*\*?|[+=×÷±~≈<>#/–—−]|[-−+]?(?:{_SYMBOLS})[-−]?)"
    rf"|^(?:Mon|Tues?|Wed|Thu(?:rs)?|Fri|Sat|Sun)[.,]|\b(?:{one_of(MONTH_NAMES)}|{one_of(TITLES)})\.)$"
)
_WAITING_WORDS: Final = frozenset(
    (*MONTH_NAMES, *WEEKDAYS, *TITLES, *(name for name in CURRENCIES if name.isalpha()), "v", "et")
)
#: Words of the same kind if they follow a number.
_WAITING_UNITS: Final = frozenset(("x", "d", "h", "hr", "hrs", "m", "min", "mins", "sq", "cu", "fl"))
_ORDINARY: Final = re.compile(r"[\"'“‘(]*([^\W\d_]+(?:[’'-][^\W\d_]+)*)([.,;:!?…]*)[\"'”’)]*")
#: Letters, by Python's definition, that people read as signs or numbers.
_SPECIAL: Final = frozenset((*"⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉ⅠⅡⅢⅣⅤⅥⅦⅧⅨⅩⅪⅫ", *FRACTIONS, *SIGNS))
_BEFORE_ROMAN: Final = NUMBERED | CROWNED
_DOTTED: Final = frozenset((*ABBREVIATIONS, *(f"{name}." for name in BEFORE_NUMBERS), "a.m.", "p.m."))
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
    """The rules of English; ``languages.LanguageRules`` are those of other languages."""

    phrases: Mapping[str, str] = table_of("english")["phrases"]

    def waits(self, token: str, before: str) -> bool:
        """Whether the reading of ``token``, which follows ``before``, may depend on the next token."""
        if token.isalpha():
            if token in _WAITING_WORDS or _ROMAN_NUMERAL.fullmatch(token):
                return True
            return token in _WAITING_UNITS and before[-1:].isdigit()
        if _WAITS.search(token) or token.lower().lstrip("(\"'“") in _DOTTED:
            return True
        return before.rpartition(" ")[2].rstrip(".") in MONTH_NAMES and _DAY.fullmatch(token) is not None

    def is_read_as_written(self, word: str, before: str) -> bool:
        """Whether ``word``, which follows ``before``, is certainly read as written. Quick: False means unknown."""
        found = _ORDINARY.fullmatch(word)
        if found is None or not (word.isascii() or _SPECIAL.isdisjoint(word)) or found[1].lower() in SHORT_WORDS:
            return False
        if found[2].startswith(".") and (found[1] in TITLES or f"{found[1].lower()}." in _DOTTED):
            return False
        if _ROMAN_NUMERAL.fullmatch(found[1]):
            return False
        return not found[1].isupper() or before.rpartition(" ")[2].lower() not in _BEFORE_ROMAN

    def in_words(self, text: str, before: str) -> str:
        """Return ``text``, a few words, in the words in which it is read; ``before`` are up to three words before it.

        In the worst case the time is quadratic in the length, so the caller must limit the length.
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
    """Read a MAC address or a UUID in pairs of digits."""
    return ", ".join(_spelled(pair) for pair in re.split("[:-]", match[0]))


def _ip_address(match: re.Match[str]) -> str:
    parts, port, length = match[1].split("."), match[2], match[3]
    if any(int(part) > 255 for part in parts):
        return match[0]
    said = " dot ".join(cardinal(part) for part in parts)
    return said + (f" port {by_digit(port)}" if port else "") + (f" slash {cardinal(length)}" if length else "")


def _long_address(match: re.Match[str]) -> str:
    """Read an IPv6 address, which has "::" or all eight parts, digit by digit."""
    if ("::" not in match[0] and match[0].count(":") != 7) or not re.search(r"\d", match[0]):
        return match[0]
    return " ".join("colon" if part == ":" else _spelled(part) for part in re.findall(r":|\w+", match[0]))


def _exponent(match: re.Match[str]) -> str:
    sign = "minus " if match[2] in "-−" and match[2] else ""
    return f"{decimal(match[1])} times ten to the power of {sign}{cardinal(match[3].lstrip('0') or '0')}"


def _port(match: re.Match[str]) -> str:
    return f"{match[1]} port {by_digit(match[2])}"


def _postcode(match: re.Match[str]) -> str:
    return ", ".join(by_digit(digits) for digits in match.groups() if digits)


def _continental(match: re.Match[str]) -> str:
    """Convert separators to the English form: "1.234,56" and "1 234,56" to "1,234.56", "1.234.567" to "1,234,567"."""
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
    """Read long groups of digits, as on a card or of a book, digit by digit; "1-2-3" is read as numbers."""
    groups = re.split(r"[ -]", match[0])
    if sum(map(len, groups)) < _MANY_DIGITS:
        return ", ".join(groups)
    return ", ".join(by_digit(group) if group.isdigit() else group for group in groups)


def _code(match: re.Match[str]) -> str:
    return f"{match[1]}{by_digit(match[2])}"


def _money_range(match: re.Match[str]) -> str:
    symbol, first, last, magnitude = match.groups()
    return f"{decimal(first)} to {_money(symbol, last, magnitude)}"


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
    """Read an amount in the plural, such as "$100s"."""
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
    return f"{decimal(amount)} {one if single else several}" + (f" per {UNITS[per][0]}" if per else "")


def _many_or_minutes(match: re.Match[str]) -> str:
    """Read the "m" after a number: millions in "10m people", minutes in "10m left", otherwise metres."""
    amount, letter, behind = match.groups()
    if behind.lower() in COUNTED:
        return f"{decimal(amount)} {MAGNITUDES[letter]} {behind}"
    if letter == "m" and behind.lower() in OF_MINUTES:
        return f"{decimal(amount)} minute{'' if amount == '1' else 's'} {behind}"
    return match[0]


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


def _version_number(match: re.Match[str]) -> str:
    return "version " + " point ".join(cardinal(part) for part in match[1].split("."))


def _several_models(match: re.Match[str]) -> str:
    """Read a plural of letters and digits: "MP3s", "H100s", "F-16s"."""
    return f"{match[1]}{'' if match[1].endswith('-') else ' '}{plural(cardinal(match[2]))}"


def _lines(match: re.Match[str]) -> str:
    """Read a number of lines of video: "1080p"."""
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
    """Read digits among letters: "MP3" is "MP three", "H2O" is "H two O". A hash or a serial number stays as it is."""
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
    if value and name.lower() in NUMBERED:
        return f"{name} {cardinal(str(value))}"
    if value and name.lower() in CROWNED and numeral != "I":
        return f"{name} the {ordinal(str(value))}"
    return match[0]


def _roman_alone(match: re.Match[str]) -> str:
    """Read a Roman numeral if it can be nothing else: "XVIII", "Rocky II", "the XIX century"."""
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
    """Read a capture in chess."""
    piece, place = match.groups()
    return f"{_PIECES.get(piece[0], piece)} takes {place[0]} {cardinal(place[1])}"


_PIECES: Final = {"K": "king", "Q": "queen", "R": "rook", "B": "bishop", "N": "knight"}


def _abbreviation(match: re.Match[str]) -> str:
    words = ABBREVIATIONS[match[0].lower()]
    behind = match.string[match.end() :]
    # If it ends a sentence, its full stop also ends the sentence.
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


#: The pattern of each rule, its replacement, and characters of which the text must contain at least one for the rule to
#: be tried: "0" stands for any digit, "" for no condition.
_Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]", frozenset[str]]
_Written = tuple[str, "str | Callable[[re.Match[str]], str]", str] | tuple[str, "str | Callable[[re.Match[str]], str]"]


def _rules(*rules: _Written) -> tuple[_Rule, ...]:
    return tuple((re.compile(rule[0]), rule[1], frozenset(rule[2] if len(rule) == 3 else "")) for rule in rules)


#: The unit after an amount, perhaps with another one after "/".
_UNIT: Final = rf"({_UNITS})(?:/({_UNITS}))?(?![\w/°²³])"
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
    *((pattern, read, "0") for pattern, read in english_numbers.RULES),
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
    # Money, before ranges of amounts.
    (rf"(?<![\w)])[-−](?={_SYMBOLS})", "minus ", "-−"),
    (
        rf"(?<![A-Za-z])({_SYMBOLS})({_NUMBER})\s?[-–]\s?(?:{_SYMBOLS})?({_NUMBER})(?: ?({_MAGNITUDES})\b)?",
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
    (r"(?<=[\d%MK])\s?–\s?(?=[\d.])|(?<=\d)-(?=\d+(?:[.,]\d+)*(?!\d*-|[\w]*[A-Z]))|(?<=\d[kKMB])-(?=\d)", " to ", "-–"),
    (
        r"(?:(?<![\w)\].^])(?<!\^{)|(?<= ))[-−](?=\.?\d)|(?<=[\d)]) [-−] (?=[\d(])|(?<=(?<![A-Za-z])[a-z]) [-−] (?=\d)",
        " minus ",
        "-−",
    ),
    (r"\bv\.? ?(\d+(?:\.\d+)*)\b(?!\.?\d)", _version_number, "v"),
    (r"(?<![\w.,])(\d+(?:\.\d+){2,})(?![\w])", _version, "."),
    # Numbers with a suffix.
    (r"(?<=\d)⁄(?=\d)", "/", "⁄"),
    (
        rf"(?<!\d[.,])\b(?:(\d+) )?(\d{{1,3}}(?:\.\d+)?)/(\d{{1,3}}(?:\.\d+)?)(?:(?:st|nd|rd|th)s?)?"
        rf"(?: ?({_UNITS})(?![\w/°²³]))?(?![\w/]|\.\d)",
        _fraction,
        "/",
    ),
    (r"(?<=[\d)]) / (?=[\d(])", " divided by ", "/"),
    (rf"(?:\b(\d+) ?)?([{''.join(FRACTIONS)}])(?: ?({_UNITS})(?![\w/°²³]))?", _fraction_sign, "½⅓⅔¼¾⅛⅕⅗⅖⅘⅙⅚⅐⅜⅝⅞⅑⅒"),
    (r"(\d+)[′'’](\d{1,2})(?:[″\"”]|\b)", _size, "′'’"),
    (r"(?<=\d)( ?)[º˚](?=[CF]\b)", r"\1°", "º˚"),
    (r"(?<=\d)° (?=[CF]\b)", "°", "°"),
    (r"(?<![\w.])(\d{2,3}(?:\.\d)?)([CF])\b(?![-+#])", r"\1°\2", "CF"),
    (r"(?<=\d)°([NSEW])\b", lambda match: f" degrees {_DIRECTIONS[match[1]]}", "°"),
    (rf"(?<![\w.,])({_NUMBER})([mMBK]) ([a-z]+)\b", _many_or_minutes, "mMBK"),
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
    (r"(?<=[\w)])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", _superscripts, "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"),
    (r"(?<=\d) ?[x×] ?(?=\d)(?<! × )|(?<=\d)x(?=\d)", " by ", "x×"),
    (r"(\d+(?:\.\d+)?)x\b(?!\s*(?:[-+*/=^]|minus|squared|cubed|to the power))", _times, "x"),
    (rf"({_NUMBER})k\b", lambda match: f"{decimal(match[1])} thousand", "k"),
    (r"(?<![\w.])(\d{3,4})([pi])\b", _lines, "pi"),
    # Abbreviations.
    (r"\b(?ai:(no|nos|figs?|vol|ch|sec|eq|pp?|ca?|est|art))\. ?(?=\d)", _before_number, "."),
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
    (r"(?<=\bC)\+\+|(?<=\bC)plusplus", " plus plus", "C"),
    (r"(?<=\b[A-Z])#", " sharp", "#"),
    (r"#(?=[A-Za-z])", "hashtag ", "#"),
    (one_of(SIGNS), lambda match: f" {SIGNS[match[0]]} "),
    (r"(?:^|\s)[-–—]{1,3}\s", ", ", "-–—"),
    (r"[{}\[\]\\^|*`™®†‡•·]|(?<=\s)_|_(?=\s)", " "),
    (r"\s+(?=[,.;:!?](?:\s|$))|(?<=\()\s+", ""),
)
