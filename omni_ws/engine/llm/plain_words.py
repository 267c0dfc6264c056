"""The input of the rules engine: a user's sentence in plain words (Asked), and the conversation so far (Talk)."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from importlib import resources
from random import Random
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from omni_ws.core.history import Message
    from omni_ws.engine.llm.encyclopedia import Encyclopedia

_NAME: Final = re.compile(r"{([a-z_]+)}")
_LINE_END: Final = re.compile(r"\n *|^ +")
_BRACKET: Final = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")


@cache
def read(name: str) -> dict[str, Any]:
    """Return the content of the TOML file ``name`` in the folder of the intents. Each file is read once."""
    file = resources.files("omni_ws.engine.llm") / "intents" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def inserted(text: str, words: dict[str, str]) -> str:
    """Return ``text``, of such a file, on one line and with each ``{name}`` replaced by ``words[name]``."""
    return _NAME.sub(lambda found: inserted(words[found[1]], words), _LINE_END.sub("", text))


def expanded(phrase: str) -> list[str]:
    """Return every sentence that ``phrase`` stands for, with single spaces: "(hi|hello) [there]" stands for four.

    Brackets may be nested.
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
    """Return ``text`` in lower case, without punctuation, contractions written out: "What's up?" → "what is up"."""
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES).lower()
    text = _MINUS.sub(" minus ", text)
    text = _SIGNS.sub(lambda sign: f" {WORDS['signs'][sign[0].replace(' ', '')]} ", text)
    text = _CONTRACTED.sub(lambda found: WORDS["contractions"][found[0]], _IS.sub(r"\1 is", text))
    return " ".join(WORDS["spellings"].get(word, word) for word in _TOKEN.findall(text))


def requests(words: str) -> Iterator[str]:
    """Yield plain ``words``, then the same with fewer and fewer courtesies around them; the last one has none."""
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
    """Return ``text`` as it was written, but without courtesies and punctuation around it."""
    request = text.strip(_MARKS)
    request = request[courtesies(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        shorter = request[: end.start()].rstrip(" ,")
        if not shorter:
            break
        request = shorter.strip(_MARKS)
    return request


def courtesies(text: str) -> int:
    """Return the length of the courtesies with which ``text`` begins, so that something is left after them."""
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
    """The conversation so far: the messages of both sides, the newest last.

    ``said`` are the earlier sentences of the message that is being answered.
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
        """Return the first of ``wordings`` that was not used yet; if all were, the one used longest ago."""
        places = enumerate(self.answers)
        said = {wording: place for place, answer in places for wording in wordings if wording in answer}
        return min(wordings, key=lambda wording: said.get(wording, -1))


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A sentence of the user, with everything that its answer may depend on."""

    #: The sentence as it was written, with single spaces.
    text: str
    talk: Talk
    now: datetime
    #: The generator of random choices: it makes the same ones for the same conversation at the same time.
    chance: Random
    #: Whether the message has images, which are described before the answer.
    pictured: bool = False
    #: What may be looked up; None where nothing is.
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
        """The plain words with fewer and fewer courtesies, such as "could you"; empty for a long sentence."""
        is_short = len(self.words) <= _MAX_CHARACTERS and self.words.count(" ") < MAX_WORDS
        return tuple(requests(self.words)) if is_short else ()


#: From the name of a slot of a phrase to the words in its place: plain words, or as written if the intent requires it.
Slots: TypeAlias = Mapping[str, str]
