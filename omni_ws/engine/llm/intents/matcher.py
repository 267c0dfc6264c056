"""Intents, things that people say in several ways and what is answered to them; Matcher finds the one that is meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import product
from random import Random
from typing import Final, NamedTuple, TypeAlias

from omni_ws.engine.llm.plain_words import NEAR, SoundIndex, Talk, distance, plain_words, requests, sounds_of

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


#: The sentences of an answer, or None where the intent does not fit after all.
Reply: TypeAlias = Callable[[Asked, Slots], Iterator[str] | None]


@dataclass(frozen=True, kw_only=True)
class Intent:
    """One row of what is understood. ``says`` has several wordings of an answer; ``reply`` makes one instead.

    ``phrases`` and ``keys`` are in plain words, with alternatives in brackets: "(hi|hello) [there]", where square
    brackets may be left out, and in keys "*" for any words.
    """

    name: str
    #: All that is said, but for courtesies. What sounds like one counts as it, too.
    phrases: tuple[str, ...] = ()
    #: Words that tell enough wherever they stand in a short sentence.
    keys: tuple[str, ...] = ()
    #: Regular expressions for a whole request in plain words, with named groups for slots.
    slots: tuple[str, ...] = ()
    #: The same for a request as it was written, but for courtesies.
    written: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    reply: Reply | None = None
    #: A regular expression for whole requests in plain words that its keys do not stand for after all.
    unless: str = ""
    #: Whether it needs no answer beside something else: a greeting before a question.
    light: bool = False
    #: Whether its keys count before anything else, and in sentences of any length.
    first: bool = False
    #: Whether its answer is exact where its phrases or slots fit, so that a model could only do worse.
    exact: bool = False
    #: Whether "another one" asks for it again.
    renews: bool = False

    def answer(self, asked: Asked, slots: Slots) -> Iterator[str] | None:
        """Return the sentences of the answer; None where the intent does not fit after all."""
        if self.reply is not None:
            return self.reply(asked, slots)
        return iter((asked.talk.fresh(self.says),))


#: In sentences of more words, keys may stand for anything, and whole phrases are not looked for.
MAX_WORDS: Final = 16
_MAX_CHARACTERS: Final = 200

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
        for intent in intents:
            for phrase in intent.phrases:
                for sentence in expanded(phrase):
                    if self._phrases.setdefault(sentence, intent) is not intent:
                        raise ValueError(f"{sentence!r} is {self._phrases[sentence].name} and {intent.name}")
        self._slots = [(re.compile(slot), intent) for intent in intents for slot in intent.slots]
        self._written = [(re.compile(slot, re.I), intent) for intent in intents for slot in intent.written]
        #: By their first words, with the place of their intent.
        self._keys: dict[str, list[tuple[Key, int, Intent]]] = {}
        for order, intent in enumerate(intents):
            for key in (Key(sentence) for written in intent.keys for sentence in expanded(written)):
                self._keys.setdefault(key.first_word, []).append((key, order, intent))
        self._first = [(key, intent) for keys in self._keys.values() for key, _, intent in keys if intent.first]
        self._sounds = SoundIndex((phrase, (phrase, intent)) for phrase, intent in self._phrases.items())

    def find(self, asked: Asked, request: str) -> Understood | None:
        """What is answered; ``request`` is the text without courtesies, as it was written."""
        if (fitting := self.exactly(asked, request)) is not None:
            return fitting
        asks = _asks(asked)
        meant = self._by_key(asks[-1], asks) or self._by_key(asks[0], asks) or self._by_sound(asks) if asks else None
        if meant is not None and (sentences := meant.answer(asked, _NO_SLOTS)) is not None:
            return Understood(meant, sentences)
        return None

    def exactly(self, asked: Asked, request: str) -> Understood | None:
        """What is answered to a key that counts first, or to what fits to the letter."""
        inside = f" {asked.words} "
        for key, intent in self._first:
            if key.stands_in(inside) and (sentences := intent.answer(asked, _NO_SLOTS)) is not None:
                return Understood(intent, sentences)
        return self.fitting(asked, request)

    def fitting(self, asked: Asked, request: str) -> Understood | None:
        """What is answered to what fits to the letter: no keys, and nothing that only sounds alike."""
        for intent, slots in self._fitting(_asks(asked), request):
            if (sentences := intent.answer(asked, slots)) is not None:
                return Understood(intent, sentences)
        return None

    def phrase(self, asked: Asked) -> Understood | None:
        """What is answered if all of it, but for courtesies, is one phrase."""
        for ask in _asks(asked):
            if (intent := self._phrases.get(ask)) is not None and (said := intent.answer(asked, _NO_SLOTS)) is not None:
                return Understood(intent, said)
        return None

    def _fitting(self, asks: Sequence[str], request: str) -> Iterator[tuple[Intent, Slots]]:
        for ask in asks:
            if (intent := self._phrases.get(ask)) is not None:
                yield intent, _NO_SLOTS
        for ask in reversed(asks):
            for pattern, intent in self._slots:
                if (match := pattern.fullmatch(ask)) is not None:
                    yield intent, _filled(match)
        for pattern, intent in self._written:
            if (match := pattern.fullmatch(request)) is not None:
                yield intent, _filled(match)

    def _by_key(self, words: str, asks: Sequence[str]) -> Intent | None:
        """The intent whose key in ``words`` tells most, unless any of ``asks`` is none of it after all.

        Of several that tell as much, the first.
        """
        inside = f" {words} "
        found = [
            (-key.weight, order, intent)
            for word in dict.fromkeys(words.split(" "))
            for key, order, intent in self._keys.get(word, ())
            if key.stands_in(inside) and not _is_something_else(intent, asks)
        ]
        return min(found, key=lambda one: one[:2])[2] if found else None

    def _by_sound(self, asks: Sequence[str]) -> Intent | None:
        """The intent with the phrase that sounds most like any of ``asks``."""
        near = [
            (far, intent)
            for ask in dict.fromkeys((asks[0], asks[-1]))
            for far, (phrase, intent) in filter(None, (self._sounds.nearest(ask),))
            if not _asks_for_another(ask, phrase)
        ]
        return min(near, key=lambda found: found[0])[1] if near else None


def _asks(asked: Asked) -> tuple[str, ...]:
    """The words with fewer and fewer courtesies; none of a long text."""
    is_short = len(asked.words) <= _MAX_CHARACTERS and asked.words.count(" ") < MAX_WORDS
    return tuple(requests(asked.words)) if is_short else ()


def _is_something_else(intent: Intent, asks: Sequence[str]) -> bool:
    return bool(intent.unless) and any(re.fullmatch(intent.unless, ask) is not None for ask in asks)


def _asks_for_another(words: str, phrase: str) -> bool:
    """Whether both ask what something is, and not the same thing: what tells them apart is one short word.

    "What is DNA" and "what is new" have most of their sounds in common.
    """
    asked, known = (_WHAT_IS.fullmatch(one) for one in (words, phrase))
    if asked is None or known is None:
        return False
    heard = sounds_of(asked["thing"])
    return distance(sounds_of(known["thing"]), heard, NEAR * len(heard)) is None


def _filled(match: re.Match[str]) -> Slots:
    return {name: text for name, text in match.groupdict().items() if text}


# Phrases and keys

_PHRASE_TOKEN: Final = re.compile(r"[()\[\]|]|[^()\[\]|]+")


def expanded(phrase: str) -> list[str]:
    """Every sentence that ``phrase`` stands for, with single spaces: "(hi|hello) [there]" is four.

    Brackets may stand in brackets.
    """
    tokens = iter((*_PHRASE_TOKEN.findall(phrase), ""))
    return list(dict.fromkeys(" ".join(sentence.split()) for sentence in _alternatives(tokens, "")))


def _alternatives(tokens: Iterator[str], closing: str) -> list[str]:
    """The sentences up to the bracket ``closing``."""
    found: list[str] = []
    parts: list[list[str]] = []
    for token in tokens:
        if token in ("|", closing):
            found += ("".join(choice) for choice in product(*parts))
            parts = []
            if token == closing:
                return found
        elif token == "(":
            parts.append(_alternatives(tokens, ")"))
        elif token == "[":
            parts.append(["", *_alternatives(tokens, "]")])
        elif token in (")", "]", ""):
            break
        else:
            parts.append([token])
    raise ValueError(f"a phrase has a bracket too many or too few, which should be {closing!r}")


class Key:
    """Runs of words that stand in a sentence one behind the other, with any words between them."""

    def __init__(self, sentence: str) -> None:
        self._runs = tuple(f" {run.strip()} " for run in sentence.split("*") if run.strip())
        self.first_word = self._runs[0].split()[0]
        #: How much it tells: its letters.
        self.weight = sum(map(len, self._runs))

    def stands_in(self, words: str) -> bool:
        """Whether it is in ``words``, which have a space at both ends."""
        position = 0
        for run in self._runs:
            position = words.find(run, position)
            if position < 0:
                return False
            position += len(run) - 1
        return True
