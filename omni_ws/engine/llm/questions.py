"""The input of rules: sentences in plain words (Asked), the conversation so far (Talk), and the encyclopedia."""

from __future__ import annotations

import logging
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

import msgspec
import orjson

from omni_ws.config.values import replace_file

if TYPE_CHECKING:
    from omni_ws.core.history import Message


_NAME: Final = re.compile(r"{([a-z_]+)}")
_LINE_END: Final = re.compile(r"\n *|^ +")
_BRACKET: Final = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of ``name``.toml in the folder ``intents``. Each file is read once."""
    file = resources.files("omni_ws.engine.llm") / "intents" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def inserted(text: str, words: dict[str, str]) -> str:
    """Return ``text``, from a file of intents, on one line and with each ``{name}`` replaced by ``words[name]``."""
    return _NAME.sub(lambda found: inserted(words[found[1]], words), _LINE_END.sub("", text))


def expanded(phrase: str) -> list[str]:
    """Return every sentence that ``phrase`` stands for, with single spaces: "(hi|hello) [there]" stands for four.

    Brackets may be nested. Raises ValueError for a bracket without its counterpart.
    """
    sentences: dict[str, None] = {}
    unexpanded = [phrase]
    while unexpanded:
        part = unexpanded.pop()
        if (found := _BRACKET.search(part)) is None:
            if any(bracket in part for bracket in "()[]"):
                raise ValueError(f"{part!r} has a bracket too many, or too few")
            sentences.update((" ".join(sentence.split()), None) for sentence in part.split("|"))
            continue
        inside = [*found[0][1:-1].split("|"), *([""] if found[0][0] == "[" else [])]
        begin, end = part[: found.start()], part[found.end() :]
        unexpanded += [begin + one + end for one in reversed(inside)]
    return list(sentences)


# Plain words: text in a uniform spelling, and without courtesies ("please", "could you") around it

WORDS: Final = read("words")
_QUOTES: Final = str.maketrans("’‘ʼ`´", "'''''")
_SIGNS: Final = re.compile(r"°\s?[cf]\b|[%°&]")
_MINUS: Final = re.compile(r"(?<![\w)])[-−](?=\d)")
_IS: Final = re.compile(rf"\b({'|'.join(WORDS['before_is'])})'s\b")
_CONTRACTED: Final = re.compile(r"\bwon't\b|\bcan't\b|\blet's\b|n't\b|'re\b|'ve\b|'ll\b|'m\b|'d\b")
_TOKEN: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d_]+(?:'[^\W\d_]+)*")
_LEADING: Final = re.compile(rf"^(?:{'|'.join(WORDS['courtesies']['before'])}) (?=.)")
_TRAILING: Final = re.compile(rf"(?<=.) (?:{'|'.join(WORDS['courtesies']['behind'])})$")
#: How many courtesies are removed at most, before and after a request.
_MOST_COURTESIES: Final = 6
#: Courtesies around a request as it was written.
_POLITE: Final = re.compile(rf"(?:{'|'.join(WORDS['courtesies']['written_before'])})[\s,.!]+", re.I)
_POLITE_END: Final = re.compile(rf"(?:{'|'.join(WORDS['courtesies']['written_behind'])})$", re.I)
_LONGEST_POLITE_END: Final = len(", could you please tell me")
_MARKS: Final = " \t\r\n.!?,;"


def plain_words(text: str) -> str:
    """Return ``text`` in *plain words*: "What's up?" → "what is up".

    They are in lower case, without punctuation or contractions, with signs as words, and with one spelling of each
    word.
    """
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES).lower()
    text = _MINUS.sub(" minus ", text)
    text = _SIGNS.sub(lambda sign: f" {WORDS['signs'][sign[0].replace(' ', '')]} ", text)
    text = _CONTRACTED.sub(lambda found: WORDS["contractions"][found[0]], _IS.sub(r"\1 is", text))
    return " ".join(WORDS["spellings"].get(word, word) for word in _TOKEN.findall(text))


def requests(words: str) -> Iterator[str]:
    """Yield the plain ``words``, then the same with fewer courtesies around them ("please").

    The last result has no courtesies.
    """
    yield words
    yield from _stripped(_LEADING, words)
    for shorter in _stripped(_TRAILING, words):
        yield shorter
        words = shorter
    yield from _stripped(_LEADING, words)


def _stripped(courtesy: re.Pattern[str], words: str) -> Iterator[str]:
    """Yield ``words`` without the first match of ``courtesy``, then without the first two, and so on."""
    for _ in range(_MOST_COURTESIES):
        shorter = courtesy.sub("", words, count=1)
        if shorter == words:
            return
        yield shorter
        words = shorter


def without_courtesies(text: str) -> str:
    """Return ``text`` as it was written, but without courtesies and punctuation at both ends."""
    request = text.strip(_MARKS)
    request = request[courtesies(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        shorter = request[: end.start()].rstrip(" ,")
        if not shorter:
            break
        request = shorter.strip(_MARKS)
    return request


def courtesies(text: str) -> int:
    """Return the length of the courtesies at the beginning of ``text``; it is less than that of the whole text."""
    length = 0
    while (match := _POLITE.match(text, length)) is not None and match.end() < len(text):
        length = match.end()
    return length


# The conversation so far

#: How many messages of each side are considered, and how many characters of each.
RECENT: Final = 64
_LOOKED_AT: Final = 2048
#: In sentences of more words keywords are ambiguous, and whole phrases are not searched for.
MAX_WORDS: Final = 16
_MAX_CHARACTERS: Final = 200


class Talk:
    """The last RECENT messages each of user (``heard``) and assistant (``answers``), cut to 2,048 characters each.

    The newest is last. ``said`` are the earlier sentences of the message that is being answered, also in ``heard``.
    """

    def __init__(self, history: Sequence[Message], *, said: Sequence[str] = ()) -> None:
        answers, heard = (
            [message.text for message in history if message.role == role and message.text.strip()]
            for role in ("assistant", "user")
        )
        self.history = history
        #: The complete last answer and the complete last message of the user; empty before the first.
        self.last_answer = answers[-1].strip() if answers else ""
        self.last_heard = heard[-1].strip() if heard else ""
        self.answers = tuple(answer[:_LOOKED_AT] for answer in answers[-RECENT:])
        self.heard = tuple(words[:_LOOKED_AT] for words in (*heard[-RECENT:], *said))
        #: All messages of the user before the current one.
        self.all_heard = [words.strip()[:_LOOKED_AT] for words in heard]

    def fresh(self, wordings: Sequence[str]) -> str:
        """Return the first of ``wordings`` that no answer contains yet; otherwise the one that was used longest ago."""
        places = enumerate(self.answers)
        said = {wording: place for place, answer in places for wording in wordings if wording in answer}
        return min(wordings, key=lambda wording: said.get(wording, -1))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sentence of the user, with the data on which its answer may depend."""

    #: The sentence as it was written, with single spaces.
    text: str
    talk: Talk
    now: datetime
    #: The generator of random choices: it makes the same ones for the same conversation at the same time.
    chance: Random
    #: Whether the message has images, which are described before the answer.
    pictured: bool = False
    #: The encyclopedia in which facts are looked up; None without one.
    encyclopedia: Encyclopedia | None = None

    @cached_property
    def words(self) -> str:
        """The sentence in plain words."""
        return plain_words(self.text)

    @cached_property
    def request(self) -> str:
        """The sentence as it was written, without courtesies."""
        return without_courtesies(self.text)

    @cached_property
    def asks(self) -> tuple[str, ...]:
        """The results of ``requests`` for the plain words; () for a long sentence."""
        is_short = len(self.words) <= _MAX_CHARACTERS and self.words.count(" ") < MAX_WORDS
        return tuple(requests(self.words)) if is_short else ()


#: From the name of a slot of a phrase to the words in its place: plain words, or as written if the intent requires it.
Slots: TypeAlias = Mapping[str, str]


# Encyclopedia: the first sentence of Wikipedia's articles, found by their titles and by other names in their text.
#
# The summaries (``omni-ws weights show encyclopedia``) are read once, and what is spoken of them is kept beside them in
# a file a third as large. Text of Wikipedia is under CC BY-SA 4.0.


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
    """An article of Wikipedia, as it is spoken: ``sentence`` is the answer to a question about its subject.

    ``about`` is its short description, such as "American physicist (1918–1988)", ``named`` its title as it is spoken.
    """

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
        """The years of birth and death, or of beginning and end; a single year if the description has only one."""
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
    """The articles, and an index from their names, in plain words, to their positions in ``articles``.

    ``people`` has the names of persons, last names among them.
    """

    articles: tuple[Article, ...] = ()
    names: dict[str, int] = {}
    people: dict[str, int] = {}

    def find(self, name: str, *, person: bool = False) -> Article | None:
        """Return the article with this name, or with its singular or plural; None if there is none.

        With ``person``, persons come first.
        """
        name = _bare(name)
        for one in (name, f"{name}s", *_singulars(name)):
            place = self.people.get(one) if person else None
            if place is None:
                place = self.names.get(one)
            if place is not None:
                return self.articles[place]
        return None


def load_encyclopedia(summaries: Path | None) -> Encyclopedia | None:
    """Read the index file beside the file of summaries; if there is none, make and write it. Blocks.

    Returns None if there is no readable file.
    """
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
    """Return the article that is meant by a name which all ``places`` have, if it is clear; else None.

    It is clear if there is only one such article, or only one of the ``vital`` articles.
    """
    if len(places) > 1:
        places = places & vital
    return next(iter(places)) if len(places) == 1 else None


def _names(bare: str, qualifier: str, extract: str, *, vital: bool, person: bool) -> Iterator[list[str]]:
    """Yield lists of an article's names, in the order of how certainly the names mean this article.

    The last list has the names of a person, with the last name alone among them.
    """
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
    """Return a person's last name without and with its particle: "gogh" and "van gogh"."""
    if len(words) < 2 or not _ORDINALS.keys().isdisjoint(words):
        return []
    return [words[-1], *([" ".join(words[-2:])] if words[-2] in _PARTICLES else [])]


def first_sentence(extract: str) -> str | None:
    """Return the first sentence without brackets, cut to at most about 25 words; None if it cannot be spoken well."""
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
    """Return a name in plain words, without accents and without "a", "an" or "the" before it."""
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
    """Return a sentence such as "Etna is a volcano in Sicily." from a title and its short description (``about``).

    Returns None if the grammar is not certain. ``extract`` is the beginning of the article, without brackets.
    ``is_name`` returns whether a word is written with a capital within a sentence, or None if that is not known.
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
    """Return a description with "a", "an" or "the" before it, and in lower case if it begins with an ordinary word.

    ``one``: the subject has an indefinite article, so it is one thing of its kind. Returns None if it is not certain
    which article is right.
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


# What is known by heart: what the encyclopedia says of things and people, and facts about countries.


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
    """Return the article with this name or, for a pronoun, the article from which the last answer was taken."""
    if asked.encyclopedia is None:
        return None
    if name in _PRONOUNS:
        articles, last = asked.encyclopedia.articles, asked.talk.last_answer
        return next((article for article in articles if article.sentence == last), None)
    return asked.encyclopedia.find(name, person=person)


def defined(asked: Asked, slots: Slots) -> str | None:
    """Return the sentence about a thing or a person; None if there is no article that is meant."""
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
    """Return the sentence about a person; None if the article that is meant is not about a person."""
    said = defined(asked, slots)
    return said if isinstance(said, Cited) and said.article.is_person else None


def when(asked: Asked, slots: Slots) -> str | None:
    """Return a sentence with the year of a birth, a death or an event; None if it is not known."""
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
    """Return a sentence about who wrote, painted, composed or directed a work; None if it is not known."""
    found, did = _article_of(asked, slots["name"]), _DID.get(slots["did"], slots["did"])
    if found is None or _WORKS[did].search(found.about) is None or (by := _BY.search(found.about)) is None:
        return None
    return Cited(f"{by['maker']} {did} {found.named}.", found)


def where(asked: Asked, slots: Slots) -> str | None:
    """Return the sentence about a place; None if the article that is meant is not about a place."""
    found = _article_of(asked, slots["name"])
    return None if found is None or _PLACE.search(found.about) is None else Cited(found.sentence, found)


@cache
def _countries() -> dict[str, tuple[str, dict[str, Any]]]:
    """Return countries by all their names, in plain words: the name to speak, and the table of facts."""
    countries = read("countries")
    names = ((one, name) for name, facts in countries.items() for one in (name, *facts.get("names", ())))
    return {plain_words(one): (name, countries[name]) for one, name in names}


@cache
def _countries_by_capital() -> dict[str, str]:
    """Return countries by their capitals, in plain words; the first country if several share a capital's name."""
    return {plain_words(facts["capital"]): name for name, facts in reversed(read("countries").items())}


def country(asked: Asked, slots: Slots) -> str | None:
    """Return a sentence with the capital, language or currency of a country, or with the country of a capital."""
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
