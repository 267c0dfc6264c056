"""Weighs what a user says: whether somebody must still know a sentence hours later.

By rules, without a model: a small one that chooses lines takes all of them, and one that writes notes loses what it
rewrites. A sentence weighs more that tells of oneself, of what lasts (family, work, health, appointments, wishes,
promises, corrections), and that has numbers, dates and names; less if it asks something, or only says what the user
thinks of an answer. The words are in ``worth_keeping.toml``, those of all languages in one: which language a typed text
has is not known.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Final

from omni_ws.core.history import Message

#: The languages whose words are known.
LANGUAGES: Final = frozenset({"en", "de", "es", "fr", "it", "pt"})
#: From this weight on a sentence is kept.
KEPT_FROM: Final = 1
#: How often lasting words, numbers and names count at most.
_MOST: Final = 2
#: What a question loses, which may tell something before it asks; what it loses besides if it begins with "what"; and
#: what a remark loses.
_ASKS: Final = 2
_ASKS_ONLY: Final = 2
_REMARKS: Final = 2
#: The longest text that is weighed, in characters.
_LONGEST: Final = 240

#: Behind these marks a sentence ends, unless they follow an initial or a short title: "Dr. Osei".
_END: Final = re.compile(r"(?:(?<!\b[A-Z])(?<!\b[A-Z][a-z])(?<!\bMrs)\.|[!?…])[\"'”»)]*\s+|(?<=[。？！])")
_ASKED: Final = re.compile(r"[?？؟]['\"”»)]*\s*$|^¿")
_WORD: Final = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+(?:[.,:]\d+)*")
_LETTER: Final = re.compile(r"[^\W\d_]")
#: The last letter of the Latin script, without the rarest.
_LATIN: Final = "\u024f"


def is_readable(message: Message) -> bool:
    """Whether the rules know the language of a message: the one in which it was spoken, or else its script."""
    if message.language is not None:
        return message.language in LANGUAGES
    letters: list[str] = _LETTER.findall(message.text[:_LONGEST])
    return 2 * sum(letter <= _LATIN for letter in letters) >= len(letters)


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text, each with its mark."""
    start = 0
    for end in _END.finditer(text):
        if sentence := text[start : end.end()].strip():
            yield sentence
        start = end.end()
    if rest := text[start:].strip():
        yield rest


def says(sentence: str) -> str:
    """Return a sentence without the words at its beginning that say nothing: "oh, well"."""
    said = sentence.replace("’", "'")[:_LONGEST]
    lead = _leads().match(said)
    return said if lead is None else said[lead.end() :]


def asks(sentence: str) -> bool:
    """Whether a sentence asks something, or for something."""
    return _ASKED.search(sentence) is not None or any(_begins(says(sentence), name) for name in ("open", "asking"))


def is_open_question(sentence: str) -> bool:
    """Whether a sentence is a question that "yes" does not answer."""
    said = says(sentence).lstrip("¿¡")
    return _ASKED.search(sentence) is not None and _begins(said, "open")


def remarks(sentence: str) -> bool:
    """Whether a sentence only says what the user thinks of an answer."""
    return _begins(says(sentence), "remarks")


def weight(sentence: str) -> int:
    """Return how much a sentence is worth keeping; below KEPT_FROM it is not."""
    words: list[str] = _WORD.findall(sentence.replace("’", "'")[:_LONGEST])
    low = [word.casefold() for word in words]
    numbers, dates = _listed("numbers"), _listed("dates")
    found = int(not _listed("oneself").isdisjoint(low))
    found += min(_MOST, sum(word in _listed("lasting") for word in low))
    found += min(_MOST, sum(word[0].isdigit() or word in numbers or word in dates for word in low))
    found += min(_MOST, _names(words))
    found -= _ASKS_ONLY * is_open_question(sentence)
    return found - _ASKS * asks(sentence) - _REMARKS * remarks(sentence)


def _names(words: list[str]) -> int:
    """Return how many words look like names: those with a capital, behind the first. German nouns count, too."""
    return sum(word[0].isupper() and word != "I" and not word.startswith("I'") for word in words[1:])


@cache
def _tables() -> dict[str, str]:
    return tomllib.loads(files(__package__).joinpath("worth_keeping.toml").read_text(encoding="utf-8"))


@cache
def _listed(name: str) -> frozenset[str]:
    return frozenset(_tables()[name].casefold().split())


def _begins(sentence: str, name: str) -> bool:
    return _beginnings(name).match(sentence) is not None


@cache
def _beginnings(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_one_of(name)})(?![\w'])", re.IGNORECASE)


@cache
def _leads() -> re.Pattern[str]:
    return re.compile(rf"(?:(?:{_one_of('leads')})\b[\s,.!]*)+", re.IGNORECASE)


def _one_of(name: str) -> str:
    return "|".join(map(re.escape, _tables()[name].strip().replace("\n", "|").split("|")))
