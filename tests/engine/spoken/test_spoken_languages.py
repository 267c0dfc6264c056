"""How text in Spanish, French, Italian, Portuguese and German is read aloud, and that other text is left alone."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from omni_ws.core.chunks import Word
from omni_ws.engine.clauses import ClauseSplitter
from omni_ws.engine.spoken import languages
from omni_ws.engine.spoken.languages import LANGUAGES, load_rules, rules_of
from omni_ws.engine.spoken.speakable_text import SpeakableText, WrittenWords, spoken_form

pytest.importorskip("unicode_rbnf")

_TABLE = Path(__file__).parents[2] / "data" / "spoken_languages.tsv"
EXAMPLES = [tuple(line.split("\t")) for line in _TABLE.read_text(encoding="utf-8").splitlines()]

#: What many patterns match a part of.
HOSTILE = ["1.", "a.", "1 ", "1/", "€1", "-1 ", "1:1", "1,000", "a@a.", "+1 ", "½", "1. ", "a-", "a_a.", "x1"]


def read(text: str, language: str) -> str:
    return "".join(piece.text for piece in spoken_form(text, language)).strip()


@pytest.mark.parametrize(("language", "written", "spoken"), EXAMPLES)
def test_what_is_read(language: str, written: str, spoken: str) -> None:
    assert read(written, language) == spoken


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_pieces_in_which_a_text_arrives_change_nothing(language: str) -> None:
    text = " ".join(written for its, written, _ in EXAMPLES if its == language)
    whole = "".join(piece.text for piece in spoken_form(text, language))
    speakable = SpeakableText(language)
    pieces = [piece for letter in text for piece in speakable.feed(letter)] + speakable.rest()
    assert "".join(piece.text for piece in pieces) == whole


def test_words_keep_the_place_where_they_are_written() -> None:
    pieces = spoken_form("Son **21 €** hoy.", "es")
    assert "".join(piece.text for piece in pieces) == "Son veintiún euros hoy."
    written = WrittenWords()
    written.add(pieces)
    said = ("Son", "veintiún", "euros", "hoy")
    placed = written.place(Word(word, 100 * at, 100 * at + 100) for at, word in enumerate(said))
    assert [(word.text, word.start_ms, word.end_ms) for word in (*placed, *written.rest())] == [
        ("Son", 0, 100),
        ("21 €", 100, 300),
        ("hoy", 300, 400),
    ]


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("es", "- [x] pan\n- leche\n", "hecho: pan.\nleche.\n"),
        ("de", "```python\nx = 1\n```\n", "Python-Code ausgelassen.\n"),
        ("fr", "![](chat.png)", "image"),
        ("it", "| a | b |\n|---|---|\n| x | ✅ |\n", "x: b sì.\n"),
    ],
)
def test_what_cannot_be_read_is_named_in_the_language(language: str, text: str, said: str) -> None:
    assert "".join(piece.text for piece in spoken_form(text, language)).strip() == said.strip()


@pytest.mark.parametrize("language", ["nl", "", "hi"])
def test_text_of_other_languages_goes_to_the_voice_as_it_is(language: str) -> None:
    assert rules_of(language) is None
    assert read("**21** euro, 3-5 km, Dr. No. 5", language) == "21 euro, 3-5 km, Dr. No. 5"


async def test_rules_are_loaded_once_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[str, bool]] = []

    def load(language: str) -> None:
        loaded.append((language, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(languages, "_in_use", set())
    monkeypatch.setattr(languages, "rules_of", load)
    for language in ("es-MX", "ES", "de", "en", "nl", ""):
        await load_rules(language)
    assert loaded == [("es", False), ("de", False)]


def test_without_the_package_numbers_go_to_the_voice_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(languages, "find_spec", lambda name: None)
    languages._loaded.cache_clear()
    try:
        assert read("21 €", "es") == "21 €"
    finally:
        languages._loaded.cache_clear()


@pytest.mark.parametrize(
    ("language", "text", "clauses"),
    [
        ("en", "I met Dr. No. He left. So", ["I met Dr. No.", "He left."]),
        ("es", "Dijo que no. 5 vinieron. Y", ["Dijo que no.", "5 vinieron."]),
        ("es", "La Sra. Díaz llegó. Y", ["La Sra. Díaz llegó."]),
        ("de", "So eine Art. Und Art. 5 gilt. Und", ["So eine Art.", "Und Art. 5 gilt."]),
        ("fr", "Il a pris son vol. Puis le vol. 3 vint. Et", ["Il a pris son vol.", "Puis le vol. 3 vint."]),
        ("it", "Prese il vol. Poi il cap. 2 venne. E", ["Prese il vol.", "Poi il cap. 2 venne."]),
        ("es", "Es el art. Según la pág. 5 no. Y", ["Es el art.", "Según la pág. 5 no."]),
        ("pt", "Foi o vol. Depois a fig. 2 veio. E", ["Foi o vol.", "Depois a fig. 2 veio."]),
        ("de", "Das ist z. B. gut. Und", ["Das ist z. B. gut."]),
        ("nl", "Het is Co. Dat is. En", ["Het is Co.", "Dat is."]),
    ],
)
def test_abbreviations_are_those_of_the_language(language: str, text: str, clauses: list[str]) -> None:
    assert [clause.text for clause in ClauseSplitter(language=language).feed(text)] == clauses


def took(text: str, language: str) -> float:
    """Return the processor time of this thread that it takes to read a text."""
    began = time.thread_time()
    read(text, language)
    return time.thread_time() - began


def check_growth(short: str, long: str, *, language: str, most: float) -> None:
    """Check that ``long`` takes less than ``most`` times as long to read as ``short``, in one of six tries at least."""
    read(short, language)
    ratios: list[float] = []
    while len(ratios) < 6:  # the machine's speed changes
        ratios.append(took(long, language) / min(took(short, language) for _ in range(3)))
        if ratios[-1] < most:
            return
    pytest.fail(f"it takes {ratios} times as long")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_long_hostile_word_takes_little_longer_than_short_ones(language: str, unit: str) -> None:
    """Cubic work, such as a pattern may do, takes 64 times as long at eight times the length, and square work 8 times.

    A longer word than these is said as it is.
    """
    short, long = ((unit * (length // len(unit)) + " ") * (512 // length) for length in (16, 128))
    check_growth(short, long, language=language, most=4)


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("unit", HOSTILE)
def test_a_long_hostile_text_takes_linear_time(language: str, unit: str) -> None:
    word = unit * (190 // len(unit)) + " "
    check_growth(word * 3, word * 24, language=language, most=16)  # quadratic work takes 64 times as long


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize(
    "text", ["1.000.000 000e 1.", "②. Mai", "٣,٥ €", "99/99/9999", "99:99", "0/0", "1.2.3.4", "000º", "€", "5 -"]
)
def test_what_is_no_number_is_read_somehow(language: str, text: str) -> None:
    assert read(text, language)
