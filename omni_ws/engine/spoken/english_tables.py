"""The tables of english.toml: units, currencies, months, abbreviations, and words around numbers."""

from __future__ import annotations

import tomllib
from importlib import resources
from typing import Any, Final

_TABLES: Final[dict[str, Any]] = tomllib.loads(
    resources.files("omni_ws.engine.spoken").joinpath("english.toml").read_text(encoding="utf-8")
)


def _words(name: str) -> frozenset[str]:
    return frozenset(_TABLES[name].split())


def _units() -> dict[str, tuple[str, str]]:
    units = {name: (one, several) for name, (one, several) in _TABLES["units"].items()}
    for name, (one, several, prefixes) in _TABLES["units_with_prefixes"].items():
        units[name] = (one, several)
        for prefix in prefixes.split():
            spoken = _TABLES["prefixes"][prefix]
            units[prefix + name] = (spoken + one, spoken + several)
    # The Greek letter is written as often as the sign for micro, and the sign for ohm as often as the letter.
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

#: One and several of each.
UNITS: Final = _units()
#: One, several, and the hundredth part likewise.
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

# Words around numbers, in lower case but for the models.
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
