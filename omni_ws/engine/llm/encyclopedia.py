"""Encyclopedia: the first sentence of Wikipedia's articles, found by their titles and by other names in their text.

The summaries (``omni-ws weights show encyclopedia``) are read once, and what is spoken of them is kept beside them in
a file a third as large. Text of Wikipedia is under CC BY-SA 4.0.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import msgspec
import orjson

from omni_ws.config.values import replace_file
from omni_ws.engine.llm.plain_words import plain_words, read

log = logging.getLogger(__name__)

#: What everyone who shows or speaks the text owes.
CREDIT: Final = "Wikipedia (CC BY-SA 4.0)"

#: The file that is kept beside the summaries; the number changes with what is in it.
_KEPT: Final = "sentences-3.json"
#: Words that the ear follows, and those that a sentence has at most where it cannot be cut.
_MOST_WORDS: Final = 25
_MOST_WHOLE: Final = 28
#: The topic of the thousand articles that everyone should know: of two of one name, it is the one that is meant.
_VITAL: Final = "Uncategorized"


#: Where articles are, by their titles, and the licence of their text.
_SITE: Final = "https://en.wikipedia.org/wiki/"
LICENSE: Final = "CC-BY-SA-4.0"


class Article(NamedTuple):
    """What is spoken of an article. ``about`` is its short description, and ``named`` its title as it is spoken."""

    title: str
    named: str
    sentence: str
    about: str
    is_person: bool

    @property
    def url(self) -> str:
        """The address of the article."""
        return _SITE + quote(self.title.replace(" ", "_"), safe="/:@!$'()*,;~")

    @property
    def years(self) -> tuple[str, ...]:
        """The years in which somebody was born and died, or in which something began and ended, or the one there is."""
        found = (_LIFE if self.is_person else _YEARS).search(self.about)
        if found is None or (self.is_person and _IN_OFFICE.search(self.about)):
            return ()
        era = found["end_bc"] or ""
        begin = found["begin"] + (found["begin_bc"] or era)
        return (begin, found["end"] + era) if found["end"] else (begin,)


class Cited(str):
    """A sentence that is taken from an article."""

    __slots__ = ("article",)

    def __new__(cls, sentence: str, article: Article) -> Cited:
        return super().__new__(cls, sentence)

    def __init__(self, sentence: str, article: Article) -> None:
        self.article = article


class Encyclopedia(msgspec.Struct, frozen=True):
    """Finds articles by their names, in the form of ``plain_words``. ``people`` are found by last names, too."""

    articles: tuple[Article, ...] = ()
    names: dict[str, int] = {}
    people: dict[str, int] = {}

    def find(self, name: str, *, person: bool = False) -> Article | None:
        """Return the article of that name, or of one thing where it is a plural; with ``person``, somebody first."""
        name = _bare(name)
        for one in (name, f"{name}s", *_singulars(name)):
            place = self.people.get(one) if person else None
            if place is None:
                place = self.names.get(one)
            if place is not None:
                return self.articles[place]
        return None


def load_encyclopedia(summaries: Path | None) -> Encyclopedia | None:
    """Read what is kept of a file of summaries, or make it; None without one that can be read. Blocks."""
    if summaries is None:
        return None
    kept = summaries.with_name(_KEPT)
    with suppress(OSError, msgspec.MsgspecError):
        book = msgspec.json.decode(kept.read_bytes(), type=Encyclopedia)
        places = {*book.names.values(), *book.people.values()}
        if places <= set(range(len(book.articles))):
            return book
    try:
        book = _made(orjson.loads(summaries.read_bytes()))
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        log.warning("the encyclopedia cannot be read: %s", error)
        return None
    with suppress(OSError):  # it is made again at the next start
        replace_file(kept, msgspec.json.encode(book))
    return book


# How it is made of the summaries

_BRACKETS: Final = re.compile(r"\s*(?:\([^()]*\)|\[[^\[\]]*\])")
_SENTENCE_END: Final = re.compile(
    r"(?<!\b[A-Z])(?<!\bSt)(?<!\bDr)(?<!\bMr)(?<!\bJr)(?<!\bc)(?<!\bca)(?<!\bNo)[.!?]['\"”]?\s+(?=[A-Z0-9\"“])"
)
_VERB: Final = re.compile(r" (?:is|are|was|were|refers to|means|encompasses|includes) ")
#: Where a sentence may end early: behind it stands more about the same, not the rest of a list.
_CLAUSE: Final = re.compile(
    r";|, (?=(?:which|who|whom|whose|where|when|known|located|situated|bordered|comprising|and (?:it|its))\b)|"
    r",? (?=(?:although|because|but|whereas|while|as well as|and (?:is|are|was|were|has))\b)"
)
_NO_END: Final = re.compile(r" (?:who|which|that|and|or|of|the|an?|is|are|was|were|has|had|by|in|to)$")
_FEWEST_WORDS: Final = 7
_FEWEST_LETTERS: Final = 12
_READ_CHARACTERS: Final = 1000
#: Rests of formulas and brackets, and sentences about the word.
_UNSPEAKABLE: Final = re.compile(r"\\|\n|  |[(){}=∑∫√]|\b(?:may|can) (?:also )?refer to\b|:$")
_WORD: Final = re.compile(r"[A-Za-z]+")
#: How much more often a name has a capital than a small letter: ordinary words are parts of names, too.
_MORE_OFTEN: Final = 10
_QUALIFIED: Final = re.compile(r"(.+?) \((.+)\)")
_WORDS: Final = read("encyclopedia")["making"]
#: What a title is qualified by where nobody means it who says the bare word, unless the article is a vital one.
_FIELDS: Final = frozenset(_WORDS["fields"])
_LONGEST_NAME: Final = 40
_OF_A_PHRASE: Final = re.compile(r"(?:in|on|of|at|by|as|for|from|with)\b")
_ALIAS: Final = re.compile(rf",|\b(?:{_WORDS['before_alias']})\b")
_ACRONYM: Final = re.compile(r"\(([A-Z][A-Z.]{1,6})[,;)]")
_HE_OR_SHE: Final = re.compile(r"\b(?:[Hh]e|[Ss]he|[Hh]is|[Hh]im|[Hh]er)\b")
_SPAN: Final = (
    r"(?P<begin>\d{3,4}|\d{1,2}(?= BC))(?P<begin_bc> BC)?"
    r"(?:(?: ?[–-] ?(?:c\. )?| (?:to|until) )(?P<end>\d{3,4}|\d{1,2}(?= BC))(?P<end_bc> BC)?)?"
)
_YEARS: Final = re.compile(rf"(?<![\d.,]){_SPAN}(?![.,]?\d)")
_LIFE: Final = re.compile(rf"\((?:born |c\. )?{_SPAN}\)$")
_IN_OFFICE: Final = re.compile(rf"\b(?:{'|'.join(_WORDS['in_office'].split())})\b", re.I)
_PARTICLES: Final = frozenset(_WORDS["particles"].split())
_NO_LAST_NAMES: Final = frozenset(_WORDS["no_last_names"].split())
#: Roman numerals → what is said for them.
_ORDINALS: Final[dict[str, list[str]]] = _WORDS["numerals"]
#: What is asked with these words is not what an article of that name is about.
_NOT_NAMES: Final = frozenset(_WORDS["not_names"].split())


def _made(summaries: Mapping[str, Any]) -> Encyclopedia:
    articles: list[Article] = []
    vital: set[int] = set()
    #: The ranks of what a name may come from → the names → the articles.
    called: list[dict[str, set[int]]] = [{} for _ in range(6)]
    written: Counter[str] = Counter()
    for summary in summaries.values():
        written.update(_WORD.findall(summary["extract"]))

    def is_name(word: str) -> bool | None:
        small, large = written[word.lower()], written[word.capitalize()]
        return None if small == large == 0 else large > _MORE_OFTEN * small

    for title, summary in summaries.items():
        extract, about = summary["extract"], summary.get("description") or ""
        bare, qualifier = found.groups() if (found := _QUALIFIED.fullmatch(title)) else (title, "")
        place = len(articles)
        is_person = summary.get("topic") == "People" and not qualifier.endswith("band")
        if summary.get("topic") == _VITAL:
            vital.add(place)
            is_person = _YEARS.search(about) is not None and _HE_OR_SHE.search(extract) is not None
        sentence = first_sentence(extract) or described(
            bare, about, _without_brackets(extract[:_READ_CHARACTERS]).strip(), person=is_person, is_name=is_name
        )
        sentence = sentence or (about and f"{bare}: {_without_brackets(about).rstrip('.')}.")
        if not sentence:
            vital.discard(place)
            continue
        named = f"the {bare}" if sentence.lower().startswith(f"the {bare.lower()}") else bare
        articles.append(Article(title, named, sentence, about, is_person))
        for rank, some in enumerate(_names(bare, qualifier, extract, vital=place in vital, person=is_person)):
            for name in some:
                called[rank].setdefault(name, set()).add(place)
    names: dict[str, int] = {}
    for rank_names in called[:-1]:
        for name, places in rank_names.items():
            if name not in names and name not in _NOT_NAMES and (one := _meant(places, vital)) is not None:
                names[name] = one
    people = {name: one for name, places in called[-1].items() if (one := _meant(places, vital)) is not None}
    return Encyclopedia(tuple(articles), names, people)


def _meant(places: set[int], vital: set[int]) -> int | None:
    """The one article that is meant by a name that several have, if it is clear."""
    if len(places) > 1:
        places = places & vital
    return next(iter(places)) if len(places) == 1 else None


def _names(bare: str, qualifier: str, extract: str, *, vital: bool, person: bool) -> Iterator[list[str]]:
    """The names of an article, those that mean it the most first; at last those of somebody, with the last name."""
    name = _bare(bare)
    yield [] if qualifier or bare.startswith("The ") else [name]
    yield [name] if qualifier and vital else []
    words = name.split()
    kind = qualifier.lower()
    exact = [f"{name} {kind}", f"{kind} {name}", f"{name} in {kind}"] if qualifier else []
    for place, word in enumerate(words):
        exact += [" ".join((*words[:place], other, *words[place + 1 :])) for other in _ORDINALS.get(word, ()) if place]
    short = [word for word in words if word not in _NO_LAST_NAMES]
    junior = words[:-1] if words[-1:] in (["jr"], ["sr"]) else words
    yield [*exact, *([] if qualifier else [" ".join(junior)]), *([name] if bare.startswith("The ") else [])]
    subject = _VERB.split(extract[:400], maxsplit=1)[0]
    others = [] if person else [_bare(one) for one in _ALIAS.split(_without_brackets(subject))]
    others = [
        one
        for one in others
        if one.rstrip("s") != name.rstrip("s") and 2 < len(one) < _LONGEST_NAME and _OF_A_PHRASE.match(one) is None
    ]
    yield [*others, *(plain_words(one.replace(".", "")) for one in _ACRONYM.findall(subject))]
    yield [name] if qualifier and not vital and qualifier not in _FIELDS else []
    yield [name, *_last_names(short)] if person else []


def _last_names(words: list[str]) -> list[str]:
    """The last name of somebody, and the one with the particle before it: "gogh" and "van gogh"."""
    if len(words) < 2 or not _ORDINALS.keys().isdisjoint(words):
        return []
    return [words[-1], *([" ".join(words[-2:])] if words[-2] in _PARTICLES else [])]


def first_sentence(extract: str) -> str | None:
    """Return the first sentence without brackets, if it can be cut to what the ear follows."""
    sentence = _SENTENCE_END.split(_without_brackets(extract[:_READ_CHARACTERS]).strip(), maxsplit=1)[0].strip()
    verb = _VERB.search(sentence)
    if verb is None or len(sentence) < _FEWEST_LETTERS or _UNSPEAKABLE.search(sentence):
        return None
    if sentence.count(" ") >= _MOST_WORDS:
        clauses = [clause.start() for clause in _CLAUSE.finditer(sentence, verb.end())]
        cuts = [cut for cut in clauses if _FEWEST_WORDS <= sentence.count(" ", 0, cut) < _MOST_WORDS]
        cuts = [cut for cut in cuts if _NO_END.search(sentence, 0, cut) is None]
        if not cuts and sentence.count(" ") >= _MOST_WHOLE:
            return None
        sentence = sentence[: cuts[-1]] if cuts else sentence
    return sentence.rstrip(" .,;") + "."


def _without_brackets(text: str) -> str:
    while (shorter := _BRACKETS.sub("", text)) != text:
        text = shorter
    return text


_ARTICLES: Final = re.compile(r"^(?:an?|the) ")


def _bare(name: str) -> str:
    """A name in plain words, without accents and without an article."""
    folded = "".join(one for one in unicodedata.normalize("NFKD", name) if not unicodedata.combining(one))
    return _ARTICLES.sub("", plain_words(folded))


def _singulars(name: str) -> Iterator[str]:
    for end, instead in (("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("men", "man")):
        if name.endswith(end) and len(name) > len(end) + 2:
            yield name.removesuffix(end) + instead


# What the description of an article says of it.

_DESCRIBING: Final = read("encyclopedia")["descriptions"]
#: Nouns that have an article in the singular.
_COUNTED: Final = frozenset(_DESCRIBING["counted"].split())
#: What the noun phrase ends before.
_PHRASE_END: Final = re.compile(rf",| (?:{'|'.join(_DESCRIBING['ends'].split())})\b")
#: There is only one of these, whatever follows, and of those only before "of".
_MOST: Final = re.compile(rf"(?:{'|'.join(_DESCRIBING['most'].split())})\b", re.I)
_ONLY_ONE: Final = re.compile(rf"(?:{'|'.join(_DESCRIBING['only_one'].split())})\b", re.I)
#: Nouns for several things: one of these is none of them.
_SEVERAL: Final = frozenset(_DESCRIBING["several"].split())
#: An office that one person had: "King of the French from 1830 to 1848".
_OFFICE: Final = re.compile(rf"(?:{'|'.join(_DESCRIBING['offices'])}) of .* from \d{{3,4}} to \d{{3,4}}")
_LIVED: Final = re.compile(r"\((?:c\. )?\d{1,4}(?: BC)? ?[–-] ?(?:c\. )?\d{1,4}(?: BC| AD)?\)$")
_BORN: Final = re.compile(r"\(born \d{4}\)$")
_HELD: Final = re.compile(r" from \d{1,4}(?: BC)? to \d{1,4}\b")
_REGION: Final = re.compile(r"(?:North|South|East|West|Central)(?:ern)? [A-Z]")
_ROUND_BRACKETS: Final = re.compile(r"\s*\([^()]*\)")
_HYPHENATED: Final = re.compile(r"[A-Za-z]+(?:-[A-Za-z]+)*")

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
    phrase = _ROUND_BRACKETS.sub("", about).strip().rstrip(".")
    if not phrase or ";" in phrase or ":" in phrase:
        return None
    if "," in title:
        return None  # a comma would have to follow it
    if person:
        verb = "was" if _LIVED.search(about) or _HELD.search(about) else "is" if _BORN.search(about) else None
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
        if _HYPHENATED.fullmatch(first) is None or (len(first) > 1 and first.isupper()):
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
    if not known or _HYPHENATED.fullmatch(noun) is None:
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
