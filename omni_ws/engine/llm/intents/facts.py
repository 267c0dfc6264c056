"""What is known by heart: what the encyclopedia says of things and people, and facts about countries."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final

from omni_ws.engine.llm.encyclopedia import Article, Cited
from omni_ws.engine.llm.plain_words import Asked, Slots, plain_words, read

_TITLED: Final = re.compile(r"^(?:the )?(?P<kind>[a-z]+) (?P<name>.+)$")
_BY: Final = re.compile(r"\bby (?P<maker>[A-Z].*?)(?:,|$| in \d| around \d| on )")
_KINDS: Final = read("encyclopedia")["kinds"]
#: What was done → what an article's description calls such a work.
_WORKS: Final = {did: re.compile(rf"\b(?:{works})\b", re.I) for did, works in _KINDS["works"].items()}
_DID: Final[dict[str, str]] = _KINDS["did"]
_PLACE: Final = re.compile(rf"\b(?:{'|'.join(_KINDS['places'].split())})\b", re.I)
_WITH_THE: Final = re.compile("|".join(_KINDS["with_the"]))
_PRONOUNS: Final = ("he", "she", "it", "him", "her", "that", "they")


def _article_of(asked: Asked, name: str, *, person: bool = False) -> Article | None:
    """The article of that name; where it is a pronoun, the one that the last answer is of."""
    if asked.encyclopedia is None:
        return None
    if name in _PRONOUNS:
        articles, last = asked.encyclopedia.articles, asked.talk.last_answer
        return next((article for article in articles if article.sentence == last), None)
    return asked.encyclopedia.find(name, person=person)


def defined(asked: Asked, slots: Slots) -> str | None:
    """The first sentence about a thing, or about somebody."""
    name, article = slots["name"], slots.get("article", "")
    if name in _PRONOUNS:
        return None
    found = _article_of(asked, name, person="who" in slots and not article)
    if found is None:  # "the planet Mars", if its description says that it is one
        kind = _TITLED.match(name)
        found = None if kind is None else _article_of(asked, kind["name"], person=True)
        if kind is None or found is None or re.search(rf"\b{kind['kind']}\b", found.about, re.I) is None:
            return None
    elif article == "the" and " " not in name and not found.named.lower().startswith("the "):
        return None  # "what is the news" does not ask what news is
    elif article[:1] == "a" and found.is_person:
        return None  # "a prince" is nobody called Prince
    return Cited(found.sentence, found)


def somebody(asked: Asked, slots: Slots) -> str | None:
    """The first sentence about somebody who is called by a whole name: a last name alone may be that of another."""
    said = defined(asked, slots)
    return said if isinstance(said, Cited) and said.article.is_person else None


def when(asked: Asked, slots: Slots) -> str | None:
    """The year in which somebody was born or died, or in which something was."""
    found, what = _article_of(asked, slots["name"], person=True), slots["what"]
    if found is None or not found.years or found.is_person != (what in ("born", "die")):
        return None
    said = _dated(found, what)
    return None if said is None else Cited(said, found)


def _dated(found: Article, what: str) -> str | None:
    named, begin, end = found.named[:1].upper() + found.named[1:], found.years[0], found.years[-1]
    if found.is_person:
        is_known = what == "born" or begin != end
        return (
            f"{named} {'was born' if what == 'born' else 'died'} in {begin if what == 'born' else end}."
            if is_known
            else None
        )
    if begin == end:
        return f"That was in {begin}."
    return {
        "end": f"{named} ended in {end}.",
        "over": f"{named} was over in {end}.",
        "start": f"{named} began in {begin}.",
        "begin": f"{named} began in {begin}.",
    }.get(what, f"{named} was from {begin} to {end}.")


def made_by(asked: Asked, slots: Slots) -> str | None:
    """Who wrote, painted, composed or directed a work."""
    found, did = _article_of(asked, slots["name"]), _DID.get(slots["did"], slots["did"])
    if found is None or _WORKS[did].search(found.about) is None or (by := _BY.search(found.about)) is None:
        return None
    return Cited(f"{by['maker']} {did} {found.named}.", found)


def where(asked: Asked, slots: Slots) -> str | None:
    """The first sentence about a place."""
    found = _article_of(asked, slots["name"])
    return None if found is None or _PLACE.search(found.about) is None else Cited(found.sentence, found)


@cache
def _countries() -> dict[str, tuple[str, dict[str, Any]]]:
    """Names of countries, in plain words → the one to speak, and what is known of it."""
    countries = read("countries")
    names = ((one, name) for name, facts in countries.items() for one in (name, *facts.get("names", ())))
    return {plain_words(one): (name, countries[name]) for one, name in names}


@cache
def _countries_by_capital() -> dict[str, str]:
    """Capitals, in plain words → the first country that has it."""
    return {plain_words(facts["capital"]): name for name, facts in reversed(read("countries").items())}


def country(asked: Asked, slots: Slots) -> str | None:
    """The capital, the language or the currency of a country, or the country of a capital."""
    name = re.sub(r"^the ", "", slots["name"]).removesuffix(" s").removesuffix("'s")
    if "capital" in slots:
        if (of := _countries_by_capital().get(name)) is None:
            return None
        return f"{read('countries')[of]['capital']} is the capital of {_spoken(of)}."
    if name not in _countries():
        return None
    found, facts = _countries()[name]
    what, value = slots["what"], facts[slots["what"]]
    if what == "capital":
        return f"The capital of {_spoken(found)} is {value.rstrip('.')}."
    if what == "language":
        return f"In {_spoken(found)} they speak {value}."
    return f"The currency of {_spoken(found)} is the {value}."


def _spoken(country: str) -> str:
    return f"the {country}" if _WITH_THE.match(country) else country
