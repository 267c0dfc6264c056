"""Intents, things that people say in several ways and what is answered to them; Matcher finds the one that is meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from random import Random
from typing import Final, NamedTuple, TypeAlias

from omni_ws.engine.llm.plain_words import (
    NEAR,
    SoundIndex,
    Talk,
    distance,
    plain_words,
    requests,
    sounds_of,
    without_courtesies,
)

#: In sentences of more words, keys may stand for anything, and whole phrases are not looked for.
MAX_WORDS: Final = 16
_MAX_CHARACTERS: Final = 200

#: A slot's name → what stood there, in plain words, or as it was written where the intent asks for that.
Slots: TypeAlias = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One thing that somebody said, with all that an answer to it may depend on."""

    #: As it was written; each run of white space is one space, and there is none at its ends.
    text: str
    talk: Talk
    now: datetime
    #: What chance is drawn from: the same for the same conversation at the same time.
    chance: Random
    #: Whether pictures came with it, which are described before the answer.
    pictured: bool = False

    @cached_property
    def words(self) -> str:
        """The plain words."""
        return plain_words(self.text)

    @cached_property
    def request(self) -> str:
        """The text without courtesies, as it was written."""
        return without_courtesies(self.text)

    @cached_property
    def asks(self) -> tuple[str, ...]:
        """The words with fewer and fewer courtesies; none of a long text."""
        is_short = len(self.words) <= _MAX_CHARACTERS and self.words.count(" ") < MAX_WORDS
        return tuple(requests(self.words)) if is_short else ()


#: A sentence, several of them, or None where the intent does not fit after all.
Reply: TypeAlias = Callable[[Asked, Slots], str | Iterator[str] | None]
#: A part of a sentence, or None where it is not known.
Value: TypeAlias = Callable[[Asked, Slots], str | None]


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One table of what is understood, as the files beside this module have it: greetings.toml explains the keys."""

    name: str
    phrases: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    slots: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    unless: str = ""
    after: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    #: Names in the wordings → what makes their values.
    values: Mapping[str, Value]
    otherwise: tuple[str, ...] = ()
    table: Mapping[str, str] | None = None
    reply: Reply | None = None
    given: Mapping[str, str] | None = None
    sightless: bool = False
    drawn: bool = False
    light: bool = False
    first: bool = False
    exact: bool = False
    renews: bool = False

    def answer(self, asked: Asked, slots: Slots) -> Iterator[str] | None:
        """Return the sentences of the answer; None where the intent does not fit after all."""
        if self.reply is not None:
            said = self.reply(asked, {**(self.given or {}), **slots})
            return iter((said,)) if isinstance(said, str) else said
        if self.sightless and asked.pictured:
            return iter(())
        if self.drawn:
            return iter((asked.chance.choice(self.says),))
        if self.table is not None:
            return iter((self.table[key],)) if (key := "".join(slots.values())) in self.table else None
        values = {name: value(asked, slots) for name, value in self.values.items()}
        wordings = [wording.format_map(values) for wording in self.says]
        return iter((asked.talk.fresh(wordings if None not in values.values() else self.otherwise),))


_WHAT_IS: Final = re.compile(r"(?:what|who) (?:is|are|was|were) (?:an? |the )?(?P<thing>.+)")
_NO_SLOTS: Final[Slots] = {}


class Understood(NamedTuple):
    """An intent, and the sentences of its answer."""

    intent: Intent
    sentences: Iterator[str]


class Matcher:
    """Looks for keys that count first, then for a whole phrase, slots, keys, and at last for what sounds alike."""

    def __init__(self, intents: Sequence[Intent]) -> None:
        self._phrases: dict[str, Intent] = {}
        self._after = [intent for intent in intents if intent.after]
        for intent in intents:
            for sentence in expanded("|".join(intent.phrases)) if intent.phrases and not intent.after else ():
                if self._phrases.setdefault(sentence, intent) is not intent:
                    raise ValueError(f"{sentence!r} is {self._phrases[sentence].name} and {intent.name}")
        self._slots = [(re.compile(slot), intent) for intent in intents for slot in intent.slots]
        self._written = [(re.compile(slot, re.I), intent) for intent in intents for slot in intent.written]
        keys = [(_runs(key), intent) for intent in intents for written in intent.keys for key in expanded(written)]
        self._urgent = [key for key in keys if key[1].first]
        #: By their first words, with their ranks: those that tell most, in letters, come first.
        self._keys: dict[str, list[tuple[int, tuple[str, ...], Intent]]] = {}
        for rank, (runs, intent) in enumerate(sorted(keys, key=lambda key: -sum(map(len, key[0])))):
            self._keys.setdefault(runs[0].split()[0], []).append((rank, runs, intent))
        self._sounds = SoundIndex((phrase, (phrase, intent)) for phrase, intent in self._phrases.items())

    def find(self, asked: Asked) -> Understood | None:
        """What is answered, if anything fits."""
        if (fitting := self.exactly(asked)) is not None or not (asks := asked.asks):
            return fitting
        meant = self._by_key(asks[-1], asks) or self._by_key(asks[0], asks) or self._by_sound(asks)
        return _answered((meant,), asked)

    def exactly(self, asked: Asked) -> Understood | None:
        """What is answered to a key that counts first, or to what fits to the letter."""
        urgent = (intent for runs, intent in self._urgent if _stand_in(f" {asked.words} ", runs))
        return _answered(urgent, asked) or self.fitting(asked)

    def fitting(self, asked: Asked) -> Understood | None:
        """What is answered to what fits to the letter: no keys, and nothing that only sounds alike."""
        if (phrase := self.phrase(asked)) is not None:
            return phrase
        for texts, patterns in ((reversed(asked.asks), self._slots), ((asked.request,), self._written)):
            for text in texts:
                for pattern, intent in patterns:
                    if (match := pattern.fullmatch(text)) is not None:
                        slots = {name: words for name, words in match.groupdict().items() if words}
                        if (understood := _answered((intent,), asked, slots)) is not None:
                            return understood
        return None

    def phrase(self, asked: Asked) -> Understood | None:
        """What is answered if all of it, but for courtesies, is one phrase."""
        return _answered((self._phrases.get(ask) for ask in asked.asks), asked)

    def following(self, asked: Asked) -> Understood | None:
        """What is answered to a whole phrase that only counts behind the last answer."""
        for intent in self._after:
            if asked.talk.last_answer.endswith(intent.after) and asked.words in expanded("|".join(intent.phrases)):
                return _answered((intent,), asked)
        return None

    def _by_key(self, words: str, asks: Sequence[str]) -> Intent | None:
        """The intent whose key in ``words`` tells most, unless any of ``asks`` is something else after all."""
        found = [
            (rank, intent)
            for word in dict.fromkeys(words.split(" "))
            for rank, runs, intent in self._keys.get(word, ())
            if _stand_in(f" {words} ", runs)
            and not (intent.unless and any(re.fullmatch(intent.unless, ask) for ask in asks))
        ]
        return min(found, key=lambda one: one[0])[1] if found else None

    def _by_sound(self, asks: Sequence[str]) -> Intent | None:
        """The intent with the phrase that sounds most like any of ``asks``."""
        near = [
            (far, intent)
            for ask in dict.fromkeys((asks[0], asks[-1]))
            for far, (phrase, intent) in filter(None, (self._sounds.nearest(ask),))
            if not _asks_for_another(ask, phrase)
        ]
        return min(near, key=lambda found: found[0])[1] if near else None


def _answered(intents: Iterable[Intent | None], asked: Asked, slots: Slots = _NO_SLOTS) -> Understood | None:
    """The answer of the first of them that fits."""
    for intent in intents:
        if intent is not None and (sentences := intent.answer(asked, slots)) is not None:
            return Understood(intent, sentences)
    return None


def _asks_for_another(words: str, phrase: str) -> bool:
    """Whether both ask what something is, and not the same thing: what tells them apart is one short word.

    "What is DNA" and "what is new" have most of their sounds in common.
    """
    asked, known = (_WHAT_IS.fullmatch(one) for one in (words, phrase))
    if asked is None or known is None:
        return False
    heard = sounds_of(asked["thing"])
    return distance(sounds_of(known["thing"]), heard, NEAR * len(heard)) is None


# Phrases and keys

_PHRASE_TOKEN: Final = re.compile(r"[()\[\]|]|[^()\[\]|]+")


def expanded(phrase: str) -> list[str]:
    """Every sentence that ``phrase`` stands for, with single spaces: "(hi|hello) [there]" is four.

    Brackets may stand in brackets.
    """
    outside: list[tuple[list[str], list[str], str]] = []
    #: In the innermost bracket: the alternatives that are complete, and the beginnings of the one under way.
    complete: list[str] = []
    begun = [""]
    for token in _PHRASE_TOKEN.findall(phrase):
        if token in "([":
            outside.append((complete, begun, ")" if token == "(" else "]"))
            complete, begun = [""] if token == "[" else [], [""]
        elif token == "|":
            complete, begun = complete + begun, [""]
        elif token in ")]":
            inside = complete + begun
            complete, begun, closing = outside.pop() if outside else ([], [], "")
            if token != closing:
                raise ValueError(f"{phrase!r} has a bracket too many, or another one")
            begun = [start + end for start in begun for end in inside]
        else:
            begun = [start + token for start in begun]
    if outside:
        raise ValueError(f"{phrase!r} has a bracket too few")
    return list(dict.fromkeys(" ".join(sentence.split()) for sentence in complete + begun))


def _runs(key: str) -> tuple[str, ...]:
    """The runs of words of a key, between which any words may stand."""
    return tuple(f" {run.strip()} " for run in key.split("*") if run.strip())


def _stand_in(words: str, runs: Sequence[str]) -> bool:
    """Whether they stand in ``words``, which have a space at both ends, one behind the other."""
    position = 1
    for run in runs:
        position = words.find(run, position - 1) + len(run)
        if position < len(run):
            return False
    return True
