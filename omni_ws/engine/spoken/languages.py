"""The conversion of Spanish, French, Italian, Portuguese and German text to words; and lexicons of pronunciation.

Numbers, dates, times, money, units and signs are put into words. The words for numbers come from Unicode's CLDR, in the
package unicode-rbnf. The names of months, units and currencies, and further features of a language, are in a table
beside this module (``es.toml`` …). For a language without a table, or on a server without the package, there are no
rules: the text goes to the voice as it is written.
"""

from __future__ import annotations

import asyncio
import re
import tomllib
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module, resources
from importlib.util import find_spec
from itertools import accumulate
from typing import Any, Final, NamedTuple

from omni_ws.core.json_values import primary_subtag
from omni_ws.engine.threads import Work, run_work

#: The languages with rules of their own here (RFC 5646); English has a module of its own.
LANGUAGES: Final = ("de", "es", "fr", "it", "pt")
#: The digits of a longer number are read one by one: it is no quantity.
_MAX_DIGITS: Final = 15
_KEPT_NUMBERS: Final = 4096

#: Whole numbers and decimals, with a point, an apostrophe or a space between thousands, or as in English.
_NUMBER: Final = (
    r"(?:\d{1,3}(?:[.’'\u00a0\u202f ]\d{3})+(?!\d)(?:,\d+)?|\d{1,3}(?:,\d{3})+\.\d+|\d{1,3}(?:,\d{3}){2,}(?!\d)"
    r"|\d+(?:[.,]\d+)?)"
)
_TITLE: Final = re.compile(r"[A-ZÀ-Ý](?:[^\W\d_]*\.|[^\W\d_]*[a-zß-ÿ])")
_AT_ENDS: Final = frozenset(("etc.", "usw.", "ecc."))
_BEGIN: Final = r"(?<![\w.,])"
_END: Final = r"(?![\w])"
_THOUSANDS: Final = re.compile(r"\d{1,3}(?:\.\d{3})+|\d{1,3}(?:,\d{3}){2,}")
_ISO_DATE: Final = re.compile(rf"{_BEGIN}(?P<year>\d{{4}})-(?P<month>\d{{1,2}})-(?P<day>\d{{1,2}}){_END}")
_DATE: Final = re.compile(
    rf"{_BEGIN}(?P<day>\d{{1,2}})(?P<mark>[./-])(?P<month>\d{{1,2}})(?P=mark)(?P<year>\d{{4}}|\d\d){_END}"
)
_DAY_AND_MONTH: Final = re.compile(rf"{_BEGIN}(?P<day>\d{{1,2}})/(?P<month>0\d|1[0-2])(?![\w/])")
_TELEPHONE: Final = re.compile(r"(?<![\w+])\+\d[\d ()/.\-]{5,30}\d(?!\w)")
#: Numbers as they are dialled within a country: behind an area code with a zero or in brackets, or in the form of the
#: United States; and groups of digits, which are one if they are no thousands and no pairs.
_DIALLED: Final = re.compile(
    r"(?<![\w.,+])(?:(?:(?:\(0\d{1,4}\)|0\d{1,4}) |0\d{2,4}(?:[/-]| / ))\d{3,}(?:[ -]\d{2,})*(?![\w/]|[.,]\d)"
    r"|(?:\(\d\d\) ?\d{4,5}|9\d{4})-\d{4}(?!\w)|(?:1-)?(?:\(\d{3}\) ?|\d{3}-)\d{3}-\d{4}(?!\w)"
    r"|\d{2,3}(?: \d{2,3}){2,4}(?!\w|[ .,]?\d))"
)
#: Pairs of digits that are dialled, with marks in place of spaces: no date.
_DIALLED_PAIRS: Final = re.compile(r"(?<![\w.,+-])0\d([.-])\d\d(?:\1\d\d){3}(?!\w|[.,-]\d)")
_TIME_RANGE: Final = re.compile(
    r"(?<!\w)(\d{1,2}(?::\d\d|[hH]\d{0,2})(?: ?h)?(?= ?[-–] ?\d{1,2}[:hH])"
    r"|\d{1,2}\.\d\d(?= ?[-–] ?\d{1,2}\.\d\d ?Uhr)) ?[-–] ?"
)
#: "$1,500", as in Mexico and the United States; a price of petrol, "1,659 €", has its sign behind it.
_DOLLARS_BY_THOUSANDS: Final = re.compile(r"[-−]?(?:(?:US)?\$|£) ?\d{1,3},\d{3}(?:/.*)?")
_NO_CENTS: Final = re.compile(r"(?<=\d),[-–—]{1,2}(?!\d)")
_SCORE: Final = re.compile(r"(?<![\w:.,])(\d{1,3}):(?=\d{1,3}(?![\w:]|[.,]\d))")
_WHOLE: Final = re.compile(rf"{_BEGIN}(\d{{1,3}}) (?=\d{{1,2}}[/⁄]\d{{1,2}}(?![\w/]))")
_POWER: Final = re.compile(r"(?<=[\w)])[²³]")
_SUBSCRIPTS: Final = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
#: What an amount is counted by: "/Monat", "/100 km"; digits alone, as in "24h/24".
_PER: Final = r"(?:/(?P<per>(?:\d+ ?)?[^\W\d_]+[²³]?|\d+))?(?![\w/])"
#: Letters behind a number that belong to its word: "1990er".
_SUFFIX: Final = re.compile(r"[a-zà-ÿ]{2}")
_RANGE: Final = re.compile(rf"{_BEGIN}({_NUMBER}) ?([–—-]) ?(?=({_NUMBER}))")
_FRACTION: Final = rf"{_BEGIN}(?P<part>(\d{{1,2}})[/⁄](\d{{1,2}}))"
_VULGAR: Final[Mapping[str, str]] = {"½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4"}
_ADDRESS: Final = re.compile(r"(?<![\w.+-])[\w.+-]*@?(?:[A-Za-z][\w-]*\.)+[a-z]{2,}(?!\w)")
#: The ends of addresses without "@"; other words with a point inside are left alone.
_TOP_LEVEL: Final = frozenset(
    ("com", "org", "net", "edu", "info", "io", "eu", "de", "at", "ch", "es", "mx", "ar", "fr", "be", "it", "pt", "br")
)
_SIGN: Final = re.compile(rf"(?<![\w.,)%°])([-−+±]) ?(?={_NUMBER})")
_ORDINARY: Final = re.compile(r"[\"'“‘«(¿¡]*([^\W\d_]+(?:[’'-][^\W\d_]+)*)[.,;:!?…]*[\"'”’»)]*")
_OPENING: Final = "\"'“‘„«(¿¡["
_CLOSING: Final = ".,;:!?…\"'”’“»)]"
#: Between two numbers these are operators; each language has its words.
_BETWEEN: Final = re.compile(r"(?<=\d) ?([+×x*÷=<>≈±≤≥]|(?<= )[-−/](?= )) ?(?=[-−+]?\d)")
#: An address of a computer, or the number of a version.
_DOTTED_PARTS: Final = re.compile(r"(?<![\d.,])\d+(?:\.\d+){2,}(?!\w)")
_DOTTED_TIME: Final = re.compile(r"^(\d{1,2})\.(\d\d)(?!\w|[.,]\d)")


def has_rules(language: str) -> bool:
    """Whether there are rules that put numbers and signs of ``language`` into words."""
    return primary_subtag(language) == "en" or rules_of(language) is not None


def rules_of(language: str) -> LanguageRules | None:
    """Return the rules for a language (RFC 5646) in LANGUAGES; None for other languages, or without unicode-rbnf.

    The first call for a language takes about 15 ms.
    """
    return _loaded(primary_subtag(language)) if primary_subtag(language) in LANGUAGES else None


#: The languages that ``load_rules`` has loaded.
_in_use: Final[set[str]] = set()


async def load_rules(language: str) -> None:
    """Load the rules of a language in a thread, unless they are loaded already."""
    code = primary_subtag(language)
    if code in LANGUAGES and code not in _in_use:
        await run_work(Work.FILES, rules_of, code)
        _in_use.add(code)


@lru_cache
def abbreviations_of(language: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the abbreviations of a language whose full stop ends no sentence, in lower case and without full stop.

    The second set has those that count as abbreviations only before numbers, such as "no". Both sets are empty for a
    language other than English and LANGUAGES.
    """
    code = primary_subtag(language)
    if code == "en":
        return _english("clause_abbreviations"), _english("clause_numbered")
    if code not in LANGUAGES:
        return frozenset(), frozenset()
    table = table_of(code)
    words = (name for name in table["abbreviations"] if name.endswith("."))
    usual = frozenset(part.rstrip(".").lower() for name in words for part in name.split())
    return usual | frozenset(table["unread_abbreviations"]), frozenset(table["before_numbers"])


class PhraseWords(NamedTuple):
    """The words of a language, in lower case, with which phrases begin.

    A phrase begins with one of ``starts``, or with one or more of ``links`` and one of ``starts`` ("by which").
    """

    starts: frozenset[str]
    links: frozenset[str]


def phrase_words_of(language: str) -> PhraseWords | None:
    """Return the words of a language before which a sentence may be cut; None for any language except English."""
    if primary_subtag(language) != "en":
        return None
    return PhraseWords(_english("phrase_starts"), _english("phrase_links"))


@lru_cache
def _english(name: str) -> frozenset[str]:
    return frozenset(table_of("english")[name].split())


@lru_cache
def _loaded(language: str) -> LanguageRules | None:
    if find_spec("unicode_rbnf") is None:
        return None
    return LanguageRules(table_of(language), _engine(language))


@lru_cache
def table_of(name: str) -> Mapping[str, Any]:
    """Return the content of ``name``.toml beside this module: the table of a language, or that of markup."""
    text = (resources.files("omni_ws.engine.spoken") / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _engine(language: str) -> Any:
    return import_module("unicode_rbnf").RbnfEngine.for_language(language)


def one_of(names: Iterable[str]) -> str:
    """Return a regular expression that matches any of ``names``, preferring the longest."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


#: A pattern and its replacement.
_Rule = tuple[re.Pattern[str], "str | Callable[[re.Match[str]], str]"]


class LanguageRules:
    """The rules of one language other than English; ``table`` is its table, ``engine`` its number speller.

    The speller comes from unicode-rbnf. The time has a small term that is quadratic in the length of a text, so callers
    limit this length. Not thread-safe.
    """

    def __init__(self, table: Mapping[str, Any], engine: Any) -> None:
        self.table = table
        #: What stands for what cannot be read aloud: pictures, code, a ticked box; yes and no in tables.
        self.phrases: Mapping[str, str] = table["phrases"]
        self._engine = engine
        self._words = lru_cache(_KEPT_NUMBERS)(self._spelled)
        self._kinds: Mapping[str, str] = table["numbers"]
        self._months: Mapping[str, int] = {name: place for place, name in enumerate(table["months"], 1)}
        self._months_by_word = {name.lower(): place for name, place in self._months.items()}
        self._months_by_word |= table["short_months"]
        self._units: Mapping[str, Sequence[str]] = table["units"]
        self._currencies: Mapping[str, Sequence[str]] = table["currencies"]
        self._signs: Mapping[str, str] = table["signs"]
        self._feminine = re.compile(table["feminine"])
        self._masculine = re.compile(table["masculine"])
        #: Words before which "1" is no article; behind it in a formula come operators.
        operators = (said.partition(" ")[0] for said in table["operators"].values())
        self._not_nouns = frozenset((*table["not_nouns"], *operators))
        self._ordinal = re.compile(table["ordinal"]) if "ordinal" in table else None
        self._dotted: Mapping[str, Any] = table.get("dotted_ordinals", {})
        written: Mapping[str, str] = table["abbreviations"]
        #: As written, or with a capital at the beginning of a sentence.
        self._abbreviations = {**{name[0].upper() + name[1:]: said for name, said in written.items()}, **written}
        symbols = [name for name in self._currencies if not name.isalpha()]
        self._weekdays: Mapping[str, str] = {name.lower(): day for name, day in table["weekdays"].items()}
        days = one_of(name for day in table["weekdays"] for name in (day, day[0].upper() + day[1:]))
        self._days = re.compile(rf"(?<!\w)({days})\.? ?[-–] ?({days})(?!\w)(?:\.(?=,| [a-z\d]))?")
        magnitudes = [*table["magnitudes"], *table["magnitude_signs"]]
        self._magnitudes = frozenset(name.rstrip(".").lower() for name in magnitudes)
        self._rules = (*self._rules_of_words(days), *self._rules_of_amounts(symbols, magnitudes))
        firsts = {name.partition(" ")[0].lower() for name in self._abbreviations if " " in name}
        weekdays = frozenset[str]()
        if self._dotted:
            weekdays = frozenset(self._weekdays)
            firsts |= {*self._weekdays, *(f"{name}." for name in self._weekdays)}
        self._waiting = frozenset((*firsts, *(name.lower() for name in (*symbols, *table["numbered"]))))
        shortened = (*self._abbreviations, *table["numbered"], *weekdays)
        self._quick = frozenset(name.rstrip(".").lower() for name in shortened)
        self._after_numbers = frozenset((*self._units, *table["waits_after_numbers"]))

    def _rules_of_words(self, days: str) -> Sequence[_Rule]:
        """Return the rules of words, dates, times and telephone numbers; ``days`` matches the name of a weekday."""
        table = self.table
        # "20 M." and "20 St." are no titles, but "20 v. Chr." is a year.
        titles = {name for name in table["abbreviations"] if _TITLE.fullmatch(name)}
        others = self._abbreviations.keys() - titles
        return (
            (_ADDRESS, self._address),
            (_DIALLED_PAIRS, lambda found: found[0].replace(found[1], " ")),
            (_NO_CENTS, ""),
            (_TIME_RANGE, lambda found: f"{found[1].replace('.', ':')} {self.table['to']} "),
            (self._days, self._range_of_days),
            (
                re.compile(rf"(?<!\w)({days})(?:\.(?=[,)])|(?:\.|(?<!So))(?= \d))" if self._dotted else "(?!)"),
                self._weekday,
            ),
            (re.compile(rf"(?<!\w)(?:(?<!\d )(?:{one_of(titles)})|{one_of(others)})(?!\w)"), self._abbreviation),
            (re.compile(rf"(?<!\w)(?P<word>{one_of(table['numbered'])}) ?(?=\d)"), self._numbered),
            (re.compile("[½⅓⅔¼¾]"), lambda found: f" {_VULGAR[found[0]]}"),
            (_WHOLE, r"\1 & "),
            (_ISO_DATE, self._date),
            (_DATE, self._date),
            (re.compile(table["short_date"]) if "short_date" in table else _DAY_AND_MONTH, self._date),
            (_DOTTED_PARTS, self._part_by_part),
            (re.compile(table["time"], re.VERBOSE), self._time),
            (_SCORE, rf"\1 {table.get('score', table['to'])} "),
            (_TELEPHONE, self._digits),
            (_DIALLED, self._dialled),
        )

    def _rules_of_amounts(self, symbols: Sequence[str], magnitudes: Sequence[str]) -> Sequence[_Rule]:
        table = self.table
        signs = one_of(name for name in table["magnitude_signs"] if len(name) > 1) or "(?!)"
        magnitude = rf"(?: (?P<magnitude>{one_of(magnitudes)})(?!\w))?"
        amount = rf"(?P<number>{_NUMBER})"
        stop = r"(?<=[A-Za-z])\.(?=,| [a-zà-ÿ])"  # of an abbreviation that ends no sentence
        return (
            (re.compile(rf"{_BEGIN}{_NUMBER}(?=[.,;:!?)]* |$)"), self._long_digits),
            (_BETWEEN, self._between),
            (_SIGN, self._signed),
            (
                re.compile(rf"{_BEGIN}(?P<sign>[-−]?)(?P<symbol>{one_of(symbols)}) ?{amount}{magnitude}(?:{_PER}|)"),
                self._money_per,
            ),
            (
                re.compile(rf"{_BEGIN}{amount}{magnitude} ?(?P<symbol>{one_of(self._currencies)})(?!\w)(?:{_PER}|)"),
                self._money_per,
            ),
            (re.compile(rf"{_BEGIN}{amount}{magnitude}(?= (?:{table['of']}))"), self._magnitude),
            (re.compile(rf"{_BEGIN}{amount} (?P<magnitude>{signs})(?!\w)"), self._magnitude),
            (_RANGE, self._range),
            (re.compile(rf"{_FRACTION}(?: ?(?P<unit>{one_of(self._units)}))?(?![\w/])"), self._fraction),
            (re.compile(rf"{_BEGIN}{amount} ?(?P<unit>{one_of(self._units)})(?!\w){_PER}(?:{stop})?"), self._unit),
            (_POWER, lambda found: f" {self.table['powers'][found[0]]}"),
            (re.compile(rf"{_BEGIN}{amount}(?= (?P<next>[^\W\d_]+)|)"), self._counted),
            (re.compile(r"\d+"), self._plain),
            (re.compile(rf"(?:{one_of(self._signs)})"), lambda found: f" {self._signs[found[0]]} "),
        )

    # What SpeakableText asks.

    def is_month(self, word: str) -> bool:
        """Whether ``word`` is the name of a month, so that a number before it is a day of this month."""
        return word.strip(_CLOSING).lower() in self._months_by_word

    def waits(self, token: str, before: str) -> bool:
        bare = token.lstrip(_OPENING)
        if not bare:
            return False
        if bare.rstrip(")")[-1:].isdecimal() or bare in "-−+±×=÷<>≈–—/":
            return True
        if self._dotted and bare[-1] == "." and bare[:-1].isdecimal():
            return True
        if bare.lower() in self._waiting or self._days.match(bare) is not None:
            return True
        if not before[-1:].isdecimal():
            return False
        if bare in "x*≤≥":
            return True
        if bare == "de" and self.table["of_month"] == "de" and before.rpartition(" ")[2] in ("1", "01"):
            return True
        return bare.rstrip(".").lower() in self._magnitudes or bare.rstrip(".") in self._after_numbers

    def is_read_as_written(self, word: str, before: str) -> bool:
        found = _ORDINARY.fullmatch(word)
        if (
            found is None
            or found[1] in self._signs
            or self._days.match(found[1]) is not None
            or any(map(str.isdigit, found[1]))
        ):
            return False
        return self._quick.isdisjoint(re.split("[’'-]", found[1].lower()))

    def in_words(self, text: str, before: str) -> str:
        text = text.translate(_SUBSCRIPTS)
        if self._dotted:
            text = self._with_dotted_ordinals(text, before)
        if self._ordinal is not None:
            text = self._ordinal.sub(self._ordinal_word, text)
        text = self._first_of_month(text)
        self._before = before.rpartition(" ")[2].lower()
        if self._before in self.table.get("time_after", ()):
            text = _DOTTED_TIME.sub(r"\1:\2", text)
        for pattern, read in self._rules:
            text = pattern.sub(read, text)
        return " ".join(text.split())

    # Numbers.

    def _spelled(self, number: int, kind: str) -> str:
        """Return a number in words, without soft hyphens; ``kind`` is the name of one of CLDR's sets of rules."""
        text: str = self._engine.format_number(number, ruleset_names=[kind]).text_by_ruleset[kind]
        return text.replace("\u00ad", "")

    def cardinal(self, number: int, kind: str = "numbering") -> str:
        """Return a number in words; ``kind`` is ``masculine`` or ``feminine`` before nouns, else ``numbering``."""
        if number != 1 and "only_one_agrees" in self.table:
            kind = "numbering"
        return self._words(number, self._kinds[kind])

    def _year(self, number: int) -> str:
        return self._words(number, self._kinds["year"])

    def _amount(self, written: str, kind: str = "numbering") -> tuple[str, float]:
        """Return a number in words, and its value; ``written`` are its digits, with separators."""
        whole, decimals = _parts(written)
        if len(whole) > _MAX_DIGITS or (len(whole) > 1 and whole[0] == "0"):
            return self._one_by_one(whole + decimals), 2.0
        value = float(f"{whole}.{decimals or 0}")
        if decimals:
            return f"{self.cardinal(int(whole))} {self.table['point']} {self._decimals(decimals)}", value
        if len(written) == 4 and "years" in self.table and _is_between(int(whole), self.table["years"]):
            return self._year(int(whole)), value
        return self.cardinal(int(whole), kind), value

    def _decimals(self, digits: str) -> str:
        if self.table["decimals_as_number"] and len(digits) == 2 and digits[0] != "0":
            return self.cardinal(int(digits))
        return self._one_by_one(digits)

    def _one_by_one(self, digits: str) -> str:
        return " ".join(self.cardinal(int(digit)) for digit in digits if digit.isdecimal())

    def _form(self, forms: Sequence[str], value: float) -> str:
        """Return the noun for ``value`` things; ``forms`` are its singular and plural."""
        single = value < 2 if self.table["singular_below_two"] else value == 1
        return forms[0] if single else forms[1]

    def _kind_before(self, noun: str) -> str:
        """Return the form of a number before ``noun``, see ``cardinal``, by the ending of the noun."""
        word = noun.lower()
        if word in self._not_nouns or (self.table["nouns_are_capital"] and not noun[:1].isupper()):
            return "numbering"
        if self._feminine.search(word) and not self._masculine.search(word):
            return "feminine"
        return "masculine"

    def _counted(self, found: re.Match[str]) -> str:
        noun = found["next"]
        kind = "numbering" if noun is None or self._is_named(found) else self._kind_before(noun)
        return self._apart(found, self._amount(found["number"], kind)[0])

    def _part_by_part(self, found: re.Match[str]) -> str:
        if _THOUSANDS.fullmatch(found[0]):
            return found[0]
        return self._apart(found, f" {self.table['dot']} ".join(self._amount(part)[0] for part in found[0].split(".")))

    def _is_named(self, found: re.Match[str]) -> bool:
        """Whether the number is used as a noun, such as a day of a month, after an article: "el 21 ganó"."""
        before = found.string[: found.start()].split()
        return (before[-1].lower() if before else self._before) in self.table["names_after"]

    def _plain(self, found: re.Match[str]) -> str:
        return self._apart(found, self._amount(found[0])[0])

    def _apart(self, found: re.Match[str], said: str) -> str:
        """Return ``said``, the words for a match, with spaces where letters adjoin the match, as in "A4" and "5G"."""
        text = found.string
        left = " " if found.start() and text[found.start() - 1].isalnum() else ""
        right = " " if found.end() < len(text) and text[found.end()].isalnum() else ""
        if self.table.get("joins_suffixes") and _SUFFIX.match(text, found.end()):
            right = ""
        return f"{left}{said}{right}"

    def _digits(self, found: re.Match[str]) -> str:
        plus = self._signs["+"] if found[0].startswith("+") else ""
        return f"{plus} {self._one_by_one(found[0])}".strip()

    def _dialled(self, found: re.Match[str]) -> str:
        groups = re.findall(r"\d+", found[0])
        alike = {len(group) for group in groups[1:]} if " " in found[0] else {0}
        is_amount = alike == {3} and found[0][0] not in "0("
        if sum(map(len, groups)) < 8 or is_amount or (alike == {2} and len(groups) > 2):
            return found[0]
        return self._one_by_one(found[0])

    def _long_digits(self, found: re.Match[str]) -> str:
        return self._one_by_one(found[0]) if found[0].isdecimal() and len(found[0]) > _MAX_DIGITS else found[0]

    def _signed(self, found: re.Match[str]) -> str:
        return f"{self.table['signs_before'][found[1]]} "

    def _between(self, found: re.Match[str]) -> str:
        return f" {self.table['operators'][found[1].replace('/', '÷')]} "

    def _range(self, found: re.Match[str]) -> str:
        first, last = (_parts(found[place])[0] for place in (1, 3))
        if found[2] == "-" and (len(first) > 4 or len(last) > 4 or int(first) >= int(last)):
            return f"{found[1]}, " if " " not in found[0] else found[0]
        return f"{found[1]} {self.table['to']} "

    def _fraction(self, found: re.Match[str]) -> str:
        written, above, below = found["part"].replace("⁄", "/"), found[2], found[3]
        over = "" if written == "24/7" else self.table["over"]
        name = self.table["fractions"].get(written, f"{above} {over} {below}")
        return name if found["unit"] is None else f"{name} {self._units[found['unit']][0]}"

    # Ordinals.

    def _ordinal_word(self, found: re.Match[str]) -> str:
        kinds: Mapping[str, str] = self.table["ordinals"]
        kind = next(kind for end, kind in kinds.items() if end in found["mark"].lower())
        return self._words(int(found["number"]), kind)

    def _with_dotted_ordinals(self, text: str, before: str) -> str:
        """Put "3." into words as an ordinal if an article or noun shows that it is one; the article sets its ending."""
        words = text.split()
        for place, word in enumerate(words):
            digits = word.removesuffix(".")
            if digits == word or not digits.isdecimal() or len(digits) > 3:
                continue
            previous = (words[place - 1] if place else before.rpartition(" ")[2]).lower()
            following = words[place + 1].strip(_CLOSING) if place + 1 < len(words) else ""
            month = self._months_by_word.get(following.lower())
            named = month is not None or following in self._dotted["nouns"]
            if not named and not (previous in self._dotted["articles"] and following[:1].isupper()):
                continue
            kind = self._dotted["articles"].get(previous, self._dotted["alone" if month else "otherwise"])
            words[place] = self._words(int(digits), kind)
        return " ".join(words)

    def _first_of_month(self, text: str) -> str:
        """Put the first day of a month into words, if the language uses an ordinal for it ("1er mai" in French)."""
        if not (first := self.table["first_day"]):
            return text
        words = text.split()
        for place, word in enumerate(words[:-1]):
            following = words[place + 1 :]
            if following[:1] == ["de"] and self.table["of_month"] == "de":
                following = following[1:]
            if word in ("1", "01") and following and following[0].strip(_CLOSING).lower() in self._months_by_word:
                words[place] = first
        return " ".join(words)

    # Dates and times.

    def _date(self, found: re.Match[str]) -> str:
        parts = found.groupdict()
        day, month, written = int(parts["day"]), int(parts["month"]), parts.get("year")
        if not (1 <= day <= 31 and 1 <= month <= 12):
            return found[0]
        if "/" in found[0] and not written and month in (10, 12) and day <= month and not self._is_named(found):
            return found[0]  # a mark, "8/10", unless an article shows that it is a day
        year = self._full_year(written) if written else ""
        name = self.table["months"][month - 1]
        before = found.string[: found.start()].split()
        said = self._day(day, before[-1].lower() if before else self._before)
        form: str = self.table["date" if year else "day_and_month"]
        return form.format(day=said, month=name, year=year)

    def _day(self, day: int, before: str) -> str:
        if self._dotted:
            kind = self._dotted["articles"].get(before, self._dotted["alone"])
            return self._words(day, kind)
        if day == 1 and self.table["first_day"]:
            return str(self.table["first_day"])
        return self.cardinal(day)

    def _full_year(self, written: str) -> str:
        number = int(written)
        if len(written) == 2:
            number += 2000 if number < 70 else 1900
        in_pairs = "years" in self.table and _is_between(number, self.table["years"])
        return self._year(number) if in_pairs else self.cardinal(number)

    def _time(self, found: re.Match[str]) -> str:
        hour, minute = int(found["hour"]), int(found["minute"])
        if hour > 24 or minute > 59:
            return found[0]
        said = str(self.table["one_hour"]) if hour == 1 else self.cardinal(hour, self.table["hours"])
        words = {"hour": said, "minute": self.cardinal(minute), "hours": self._form(self.table["hour_forms"], hour)}
        return str(self.table["full_hour" if minute == 0 else "hour_and_minute"]).format(**words)

    def _range_of_days(self, found: re.Match[str]) -> str:
        return f"{self._weekdays[found[1].lower()]} {self.table['to']} {self._weekdays[found[2].lower()]}"

    def _weekday(self, found: re.Match[str]) -> str:
        return self._weekdays[found[1].lower()]

    # Money and units.

    def _per(self, found: re.Match[str]) -> str:
        """Return the words for what an amount is counted by."""
        if not (written := found["per"]):
            return ""
        unit = written.lstrip("0123456789").strip()
        digits = written.removesuffix(unit).strip()
        if not unit:
            return f" {self.table['over']} {self._amount(digits)[0]}"
        forms = self._units.get(unit, (unit, unit))
        return f" {self.table['per']} {f'{self._amount(digits)[0]} {forms[1]}' if digits else forms[0]}"

    def _money_per(self, found: re.Match[str]) -> str:
        return self._money(found) + self._per(found)

    def _money(self, found: re.Match[str]) -> str:
        forms = self._currencies[found["symbol"]]
        minus = f"{self.table['signs_before']['-']} " if found.groupdict().get("sign") else ""
        if (magnitude := found["magnitude"]) is not None:
            noun = self._magnitude_noun(magnitude, found["number"])
            return f"{minus}{noun}{self._of(forms[1])}"
        number = found["number"]
        if _DOLLARS_BY_THOUSANDS.fullmatch(found[0]):
            number = number.replace(",", "")
        whole, decimals = _parts(number)
        if len(decimals) != 2 or len(forms) < 6 or len(whole) > _MAX_DIGITS:
            said, value = self._amount(number, forms[2])
            return f"{minus}{said} {self._form(forms, value)}"
        minor = int(decimals)
        parts = []
        if int(whole) or not minor:
            parts.append(f"{self.cardinal(int(whole), forms[2])} {self._form(forms, int(whole))}")
            if minor:
                parts.append(self.table["and_cents"].format(self.cardinal(minor)))
        else:
            parts.append(f"{self.cardinal(minor, forms[5])} {self._form(forms[3:], minor)}")
        return minus + " ".join(" ".join(parts).split())

    def _magnitude(self, found: re.Match[str]) -> str:
        magnitude = found["magnitude"]
        return found[0] if magnitude is None else self._magnitude_noun(magnitude, found["number"])

    def _magnitude_noun(self, magnitude: str, number: str) -> str:
        forms = self.table["magnitude_signs"].get(magnitude)
        noun = magnitude if forms is None else self._form(forms, 1 if number == "1" else 2)
        return f"{self._amount(number, self._kind_before(noun))[0]} {noun}"

    def _of(self, noun: str) -> str:
        of = str(self.table["of_money"])
        if of == "de" and self.table["elides"] and noun[0] in "aeiouyh":
            return f" d'{noun}"
        return f" {of} {noun}" if of else f" {noun}"

    def _unit(self, found: re.Match[str]) -> str:
        forms = self._units[found["unit"]]
        said, value = self._amount(found["number"], forms[2] if len(forms) > 2 else "masculine")
        return f"{said} {self._form(forms, value)}{self._per(found)}"

    # Words and signs.

    def _abbreviation(self, found: re.Match[str]) -> str:
        said = self._abbreviations[found[0]]
        # "usw." usually ends a sentence where it is not followed by a comma.
        ends = found[0].lower() in _AT_ENDS and found.end() == len(found.string)
        return f"{said}." if ends else said

    def _numbered(self, found: re.Match[str]) -> str:
        return f"{self.table['numbered'][found['word']]} "

    def _address(self, found: re.Match[str]) -> str:
        address = found[0]
        if "@" not in address and address.rpartition(".")[2] not in _TOP_LEVEL:
            return address
        named = {
            "@": self._signs["@"],
            ".": self.table["dot"],
            "-": self.table["hyphen"],
            "_": self.table["underscore"],
        }
        return "".join(f" {named[sign]} " if sign in named else sign for sign in address).strip()


def _parts(written: str) -> tuple[str, str]:
    """Return the digits of a number before and after its decimal mark."""
    number = re.sub(r"[’'\u00a0\u202f ]", "", written)
    if "." in number and "," in number:
        mark = max(number.rfind("."), number.rfind(","))
        return re.sub(r"[.,]", "", number[:mark]), number[mark + 1 :]
    if _THOUSANDS.fullmatch(number) or number.count(".") > 1:
        return re.sub(r"[.,]", "", number), ""
    whole, _, decimals = number.replace(",", ".").partition(".")
    return whole, decimals


def _is_between(number: int, limits: Sequence[int]) -> bool:
    return limits[0] <= number <= limits[1]


# Lexicon: how single words and names are said, and LexiconReader, which finds them in a text as it arrives.


#: Scripts without white space between words: each of their letters is a word of its own.
UNSPACED: Final = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef"
_IS_UNSPACED: Final = re.compile(f"[{UNSPACED}]")
_ASCII_UNITS: Final = re.compile(r"\w+|\W", re.ASCII)
_ANY_UNITS: Final = re.compile(rf"[^\W{UNSPACED}]+|.", re.DOTALL)
#: Signs that are written in several ways.
_SAME_SIGNS: Final = str.maketrans("‘’‐‑–", "''---")


class TextWord(NamedTuple):
    """A word with the punctuation around it, and its start and end in the text, in characters."""

    text: str
    start: int
    end: int
    #: Whether white space precedes it.
    gap: bool = False


class Reading(NamedTuple):
    """One or more words of the text, and how they are said (``said``); ``said`` is () for a word without an entry.

    ``said`` has parts in order: (text of an entry, True), or (text that no entry covers, such as punctuation, False).
    """

    word: TextWord
    said: tuple[tuple[str, bool], ...] = ()


class _Entry:
    """The entry of a lexicon for one or more words; how the words are said may depend on their case."""

    __slots__ = ("as_written", "in_any_case", "units")

    def __init__(self, units: int) -> None:
        self.units = units
        #: How the words are said in any case; and how they are said with exactly these capitals.
        self.in_any_case: str | None = None
        self.as_written: dict[str, str] = {}

    def add(self, units: list[str], joined: str, said: str) -> None:
        """Add that the words ``units``, written as ``joined``, are said as ``said``."""
        if any(len(unit) > 1 and unit[1:] != unit[1:].lower() for unit in units):
            self.as_written[joined] = said
        else:
            self.in_any_case = said


class Lexicon:
    """How words are said: ``entries`` maps a word, or several with spaces, to a text that is read in its place.

    Entries match whole words in any case. Entries with a capital inside a word (``iPhone``, ``US``) match only as they
    are written, and take precedence. Among entries that differ only in case, the last one counts.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        found: dict[str, _Entry] = {}
        for written, said in entries.items():
            units = _units(" ".join(written.split()))
            joined = _joined(units)
            found.setdefault(joined.casefold(), _Entry(len(units))).add(units, joined, " ".join(said.split()))
        self._keys = sorted(found)
        self._entries = [found[key] for key in self._keys]
        #: The first units of all entries; the largest number of units.
        self.firsts = frozenset(key.partition(_UNIT_END)[0] for key in self._keys)
        self._most = max((entry.units for entry in self._entries), default=0)
        #: For each entry the place of the longest one with which it begins; -1 if there is none.
        self._within: list[int] = []
        path: list[int] = []
        for place, key in enumerate(self._keys):
            while path and not key.startswith(self._keys[path[-1]]):
                path.pop()
            self._within.append(path[-1] if path else -1)
            path.append(place)

    def find(self, units: list[_Unit], begin: int, *, final: bool) -> tuple[int, str | None] | None:
        """Find the longest entry from ``begin`` on; return the index after its last unit, and how it is said.

        If there is no entry, the result is (``begin`` + 1, None). Returns None if further units may complete an entry;
        ``final``: no further units follow.
        """
        if units[begin].folded not in self.firsts:
            return begin + 1, None
        window = units[begin : begin + self._most]
        folded = _joined([unit.folded for unit in window])
        place = bisect_right(self._keys, folded)
        goes_on = place < len(self._keys) and self._keys[place].startswith(folded)
        if goes_on and not final and begin + len(window) == len(units):
            return None
        place -= 1
        written, ends = "", list[int]()
        while place >= 0:
            entry = self._entries[place]
            if folded.startswith(self._keys[place]):
                how = entry.in_any_case
                if entry.as_written:
                    if not ends:
                        written = _joined([unit.text for unit in window])
                        ends = list(accumulate(len(unit.text) + 1 for unit in window))
                    how = entry.as_written.get(written[: ends[entry.units - 1]], how)
                if how is not None:
                    return begin + entry.units, how
            place = self._within[place]
        return begin + 1, None


#: Ends each unit of a key, so that no key begins within a unit of another. No word has it.
_UNIT_END: Final = "\n"


def _joined(units: Sequence[str]) -> str:
    return _UNIT_END.join(units) + _UNIT_END


#: More entries than these may take more than 2 ms.
_MANY: Final = 40


@lru_cache(32)
def _lexicon_of(entries: tuple[tuple[str, str], ...]) -> Lexicon:
    return Lexicon(dict(entries))


def lexicon_of(entries: Mapping[str, str]) -> Lexicon:
    """Return the Lexicon with these entries, from a cache that all answers and sessions share.

    A large Lexicon takes about 20 ms to make, and a megabyte; call ``prepare`` before, to make it in a thread.
    """
    return _lexicon_of(tuple(entries.items()))


async def prepare(entries: Mapping[str, str]) -> None:
    """Make the Lexicon with these entries in a thread, so that ``lexicon_of`` returns it without delay.

    A Lexicon of few entries is left to ``lexicon_of``.
    """
    if len(entries) > _MANY:
        await asyncio.to_thread(lexicon_of, entries)


class _Unit(NamedTuple):
    """A unit of text: a run of letters and digits, or any other single character.

    ``word`` is the word to which the unit belongs; None for a space.
    """

    folded: str
    text: str
    word: TextWord | None = None
    #: Whether it ends its word.
    last: bool = False


_SPACE: Final = _Unit(" ", " ")


class LexiconReader:
    """A reader of words in order, which finds the longest entry of ``lexicon`` at each place, from left to right.

    The reader holds words back while they may be the beginning of an entry of several words. The time is linear in the
    length of the text, and does not depend on the number of entries.
    """

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = lexicon
        #: The units not yet given out.
        self._units: list[_Unit] = []
        #: The words of the reading that is being put together, and its parts.
        self._words: list[TextWord] = []
        self._parts: list[tuple[str, bool]] = []

    @property
    def held(self) -> str:
        """The last word that is held back; "" if no word is held back."""
        word = self._units[-1].word if self._units else None
        return word.text if word is not None else ""

    def feed(self, word: TextWord) -> list[Reading]:
        """Add the next word, and return the readings that are complete."""
        units = [(unit.casefold(), unit) for unit in _units(word.text)]
        if not self._units and not any(folded in self._lexicon.firsts for folded, _ in units):
            return [Reading(word)]
        if self._units and word.gap:
            self._units.append(_SPACE)
        self._units += [_Unit(folded, text, word) for folded, text in units[:-1]]
        self._units.append(_Unit(*units[-1], word, last=True))
        return list(self._read(final=False))

    def rest(self) -> list[Reading]:
        """Return the readings of the words that are held back, as if the text ended."""
        return list(self._read(final=True))

    def _read(self, *, final: bool) -> Iterator[Reading]:
        units, begin = self._units, 0
        while begin < len(units) and (found := self._lexicon.find(units, begin, final=final)) is not None:
            end, how = found
            if (reading := self._take(units[begin:end], how)) is not None:
                yield reading
            begin = end
        del units[:begin]

    def _take(self, units: list[_Unit], how: str | None) -> Reading | None:
        """Add units, said as ``how`` (None: as written), to the current reading; return it at the end of a word."""
        for unit in units:
            if unit.word is not None and (not self._words or self._words[-1] is not unit.word):
                self._words.append(unit.word)
        if how is not None:
            self._parts.append((how, True))
        elif units[0].word is not None:
            self._parts.append((units[0].text, False))
        if not units[-1].last:
            return None
        words, parts, self._words, self._parts = self._words, self._parts, [], []
        if not any(by_entry for _, by_entry in parts):
            return Reading(words[0])
        text = "".join(f" {word.text}" if word.gap else word.text for word in words)
        written = TextWord(text.removeprefix(" "), words[0].start, words[-1].end, words[0].gap)
        return Reading(written, tuple(parts))


def _units(text: str) -> list[str]:
    """Return the runs of letters and digits in ``text``, and each other character by itself."""
    if text.isascii():
        return _ASCII_UNITS.findall(text)
    units: list[str] = []
    in_run = False
    for unit in _ANY_UNITS.findall(unicodedata.normalize("NFC", text).translate(_SAME_SIGNS)):
        # Vowel signs, as in Hindi, are no letters to Python.
        runs = unit[0].isalnum() or unit[0] == "_" or unicodedata.category(unit)[0] == "M"
        runs = runs and (len(unit) > 1 or not _IS_UNSPACED.match(unit))
        if runs and in_run:
            units[-1] += unit
        else:
            units.append(unit)
        in_run = runs
    return units
