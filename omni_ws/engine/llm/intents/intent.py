"""Intent: something that people say in several ways, and what is answered to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from random import Random
from typing import TypeAlias

from omni_ws.engine.llm.plain_words import plain_words
from omni_ws.engine.llm.talk import Talk

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
