"""Sentences made of Wikipedia's short descriptions: "A volcano is a rupture in a planet's crust."

A sentence is made only where it is grammatical for certain: the subject and its verb stand in the article, and the
description begins with a noun phrase whose last noun is known to be counted. Everything else is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from omni_ws.engine.llm.plain_words import read

_WORDS: Final = read("encyclopedia")["descriptions"]
#: Nouns that have an article in the singular.
_COUNTED: Final = frozenset(_WORDS["counted"].split())
#: What the noun phrase ends before.
_PHRASE_END: Final = re.compile(rf",| (?:{'|'.join(_WORDS['ends'].split())})\b")
#: There is only one of these, whatever follows, and of those only before "of".
_MOST: Final = re.compile(rf"(?:{'|'.join(_WORDS['most'].split())})\b", re.I)
_ONLY_ONE: Final = re.compile(rf"(?:{'|'.join(_WORDS['only_one'].split())})\b", re.I)
#: Nouns for several things: one of these is none of them.
_SEVERAL: Final = frozenset(_WORDS["several"].split())
#: An office that one person had: "King of the French from 1830 to 1848".
_OFFICE: Final = re.compile(rf"(?:{'|'.join(_WORDS['offices'])}) of .* from \d{{3,4}} to \d{{3,4}}")
_SPAN: Final = re.compile(r"\((?:c\. )?\d{1,4}(?: BC)? ?[–-] ?(?:c\. )?\d{1,4}(?: BC| AD)?\)$")
_BORN: Final = re.compile(r"\(born \d{4}\)$")
_HELD: Final = re.compile(r" from \d{1,4}(?: BC)? to \d{1,4}\b")
_REGION: Final = re.compile(r"(?:North|South|East|West|Central)(?:ern)? [A-Z]")
_BRACKETS: Final = re.compile(r"\s*\([^()]*\)")
_WORD: Final = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")

#: Beginnings that sound like a vowel, and those that only look like one.
_VOWEL: Final = re.compile(r"[aeio]|u(?!k|ni(?![ndm])|[bfgjkqrst][aeiou])|h(?:our|onest|onou?r|eir)", re.I)
_NO_VOWEL: Final = re.compile(r"eu|ewe|one\b|once\b", re.I)
_AN_NUMBER: Final = re.compile(r"8|11(?!\d{3})(?:\D|\d\d\b)|18(?:\D|\d\d\b)|1[18]th")


def described(
    title: str, about: str, extract: str, *, person: bool, is_name: Callable[[str], bool | None]
) -> str | None:
    """Return the sentence that says ``about``, the short description, of ``title``; None where that is not certain.

    ``extract`` is the beginning of the article, without brackets. ``is_name`` tells whether a word is written with a
    capital within a sentence; None where that is not known.
    """
    phrase = _BRACKETS.sub("", about).strip().rstrip(".")
    if not phrase or ";" in phrase or ":" in phrase:
        return None
    if "," in title:
        return None  # a comma would have to follow it
    if person:
        verb = "was" if _SPAN.search(about) or _HELD.search(about) else "is" if _BORN.search(about) else None
        predicate = phrase if _OFFICE.match(phrase) else _counted(phrase, is_name, person=True)
        return None if verb is None or predicate is None else f"{title} {verb} {predicate}."
    subject = re.match(rf"((?:(an?|the) )?{re.escape(title)})(?:, [^,.]{{1,60}},)? (is|are|was|were) ", extract, re.I)
    predicate = None if subject is None else _counted(phrase, is_name, one=(subject[2] or "")[:1].lower() == "a")
    return None if subject is None or predicate is None else f"{subject[1]} {subject[3]} {predicate}."


def _counted(
    phrase: str, is_name: Callable[[str], bool | None], *, person: bool = False, one: bool = False
) -> str | None:
    """Return a description with its article, and with a small letter if it begins with an ordinary word.

    ``one`` is whether the subject is one thing of its kind: "a volcano".
    """
    end = _PHRASE_END.search(phrase)
    noun = (phrase[: end.start()] if end else phrase).rpartition(" ")[2].lower()
    before = end[0].strip() if end else ""
    first = phrase.split(" ")[0].rstrip(",")
    if first[0].isalpha():
        if _WORD.fullmatch(first) is None or (len(first) > 1 and first.isupper()):
            return None
        if (name := is_name(first)) is None:
            return None
        # A name is of several words, as "North American" is; "sea" alone is none.
        name = (name and (person or first.lower() != noun)) or _REGION.match(phrase) is not None
        phrase = phrase if name else phrase[0].lower() + phrase[1:]
    elif not first[0].isdecimal():
        return None
    if person:
        # Of a person every noun is counted, but "wife of" and "founder of" may mean the only one.
        known = not noun.endswith("s") and before != "of" and not (_MOST.match(phrase) or _ONLY_ONE.match(phrase))
    elif _is_only_one(phrase, noun, before):
        return f"the {phrase}"
    else:
        known = noun in _COUNTED and before not in ("and", "or") and not (one and noun in _SEVERAL)
        known = known and not _ONLY_ONE.match(phrase) and not _MOST.match(phrase)
    if not known or _WORD.fullmatch(noun) is None:
        return None
    return f"{_article(phrase)} {phrase}"


def _is_only_one(phrase: str, noun: str, before: str) -> bool:
    if _MOST.match(phrase):
        return not noun.endswith("s")
    return before == "of" and (noun == "study" or _ONLY_ONE.match(phrase) is not None)


def _article(phrase: str) -> str:
    if phrase[0].isdecimal():
        return "an" if _AN_NUMBER.match(phrase) else "a"
    return "an" if _VOWEL.match(phrase) and not _NO_VOWEL.match(phrase) else "a"
