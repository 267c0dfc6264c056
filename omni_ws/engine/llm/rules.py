"""Answers by rules: no model, the same answer to the same conversation.

What is understood stands in ``intents/``. What is not is admitted in one sentence, never guessed and never parroted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from random import Random
from typing import Final

from omni_ws.core.history import Message
from omni_ws.engine.clauses import pieces_of
from omni_ws.engine.llm.intents import fun
from omni_ws.engine.llm.intents.catalogue import INTENTS
from omni_ws.engine.llm.intents.intent import Asked
from omni_ws.engine.llm.intents.letters import REPEAT, SPELL, repeated, spelled
from omni_ws.engine.llm.intents.matcher import Matcher, Understood
from omni_ws.engine.llm.intents.names import name_told
from omni_ws.engine.llm.intents.unknown import unknown
from omni_ws.engine.llm.plain_words import plain_words, requests
from omni_ws.engine.llm.talk import Talk

#: Longer texts, in characters, are at most something to repeat or to spell.
MAX_REQUEST: Final = 4096
#: Of longer texts, single sentences are not looked at.
_MAX_SENTENCES_LETTERS: Final = 400
_MAX_SENTENCES: Final = 5
_MAX_ANSWERED: Final = 2

NOTHING_HEARD = "I did not hear anything."
NOTHING_WRITTEN = "The message is empty."
TOO_LONG = "That is more than I can follow."

_POLITE: Final = re.compile(
    r"(?:please|hey|hi|hello|okay|ok|so|um|uh|oh|well|now|and|computer|(?:can|could|would|will) "
    r"you(?: please)?|(?:tell|give) me|"
    r"i(?: would|['’]d) like you to|i want you to|do you know|go on and|just)[\s,.!]+",
    re.I,
)
_POLITE_END: Final = re.compile(
    r"(?:[\s,](?:please|thank you|thanks|for me)|"
    r",\s?(?:(?:do|can|if) you (?:still )?(?:know|remember)|(?:can|could) you (?:please )?tell me|any idea))$",
    re.I,
)
_LONGEST_POLITE_END: Final = len(", could you please tell me")
_TRAILING: Final = " \t\r\n.!?,;"
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+(?=\S)")
_ANOTHER: Final = re.compile(
    r"(?:(?:tell me |give me |do |say )?(?:another(?: one)?|one more|again|once more|once again|one "
    r"more time|do it again|do that again|more|next|"
    r"next one|a different one|more please|the next one|go on|continue|keep going)(?: one| please)?)"
)
#: Between two requests in one sentence.
_JOINED: Final = re.compile(
    r",? and (?:then |also |please )*"
    r"(?=(?:tell|give|what(?:['’]s)?|how|when|who|where|is|spell|say|flip|roll|toss|count) )",
    re.I,
)
#: A follow-up: the last question, asked about something else.
_FOLLOWING: Final = re.compile(r"(?:and what about|and how about|what about|how about|and|or) (?P<rest>.+)")

_PREPOSITIONS: Final = frozenset(("in", "at", "on", "for"))


@cache
def _matcher() -> Matcher:
    return Matcher(INTENTS)


def prepare() -> None:
    """Build what all answers need, which takes a moment."""
    _matcher()


def answer(
    text: str, history: Sequence[Message], now: datetime, *, seed: object = None, pictured: bool = False
) -> Iterator[str]:
    """The sentences of the answer to ``text``, one at a time, so that a long one can be spoken while it is made.

    Chance is drawn from ``seed``, or ``now`` where there is none, and from the text and its place in the conversation.
    ``pictured`` says that pictures came with the text and were described.
    """
    plain = _single_spaced(text)
    if not plain:
        yield NOTHING_WRITTEN
        return
    if len(plain) > MAX_REQUEST:
        yield from _long_answer(plain) or (TOO_LONG,)
        return
    yield from _short_answer(_asked(plain, Talk(history), now, seed=seed, pictured=pictured))


def _asked(plain: str, talk: Talk, now: datetime, *, seed: object, pictured: bool = False) -> Asked:
    drawn_from = f"{now.isoformat() if seed is None else seed} {talk.position} {plain}"
    chance = Random(drawn_from.encode("utf-8", "surrogatepass"))
    return Asked(text=plain, talk=talk, now=now, chance=chance, pictured=pictured)


def exact_answer(text: str, history: Sequence[Message], now: datetime, *, seed: object = None) -> Iterator[str] | None:
    """The sentences of an answer that rules give exactly, each request in ``text`` for itself; None for all else.

    Nothing is guessed here: words that only sound alike, or a word that tells enough among others, do not count.
    """
    plain = _single_spaced(text)
    if not plain or len(plain) > _MAX_SENTENCES_LETTERS:
        return None
    talk = Talk(history)
    asked = _asked(plain, talk, now, seed=seed)
    parts = _parts(plain)
    parts = (parts if len(parts) > 1 else _joined(asked)) or [plain]
    found = [_matcher().exactly(one, without_courtesy(one.text)) for one in (_with_text(asked, part) for part in parts)]
    exact = [match for match in found if match is not None and match.intent.exact]
    known = all(match is not None and (match.intent.exact or match.intent.light) for match in found)
    if not exact or not known or (exact[0].intent.name == "what is my name" and name_told(talk) is None):
        return None
    return _each_once(exact[:_MAX_ANSWERED])


def _short_answer(asked: Asked) -> Iterator[str]:
    if (line := _in_play(asked)) is not None:
        return iter((line,))
    if (renewed := _renewed(asked)) is not None:
        return renewed.sentences
    parts = _parts(asked.text)
    if len(parts) < 2:
        parts = _joined(asked)
    if len(parts) < 2:
        match = _found(asked) or _followed_up(asked)
        return match.sentences if match is not None else _unknown(asked)
    return _answered_in_parts(asked, parts)


def _answered_in_parts(asked: Asked, parts: Sequence[str]) -> Iterator[str]:
    """The answer to several sentences: as to one phrase, or to those that want an answer, or else to the last."""
    if (phrase := _matcher().phrase(asked)) is not None:
        return phrase.sentences
    # People say a sentence twice where nobody answers at once.
    first_said: dict[str, Asked] = {}
    for place, part in enumerate(parts):
        one = _with_text(replace(asked, talk=asked.talk.going_on(parts[:place])), part)
        first_said.setdefault(one.words, one)
    each = list(first_said.values())
    found = [_found(one) for one in each]
    if (first := next((match for match in found if match is not None and match.intent.first), None)) is not None:
        return first.sentences
    heavy = [match for match in found if match is not None and not match.intent.light]
    if heavy:
        return _each_once(heavy[:_MAX_ANSWERED])
    if (whole := _found(asked)) is not None:
        return whole.sentences
    for one, match in zip(each, found, strict=True):
        if match is None:
            return _unknown(one)
    return next(match.sentences for match in reversed(found) if match is not None)


def _each_once(found: Sequence[Understood]) -> Iterator[str]:
    """The sentences of several answers, but for those that an earlier one of them has."""
    said: set[str] = set()
    for match in found:
        here: list[str] = []
        for sentence in match.sentences:
            if sentence not in said:
                here.append(sentence)
                yield sentence
        said.update(here)


def _in_play(asked: Asked) -> str | None:
    """The next line of a riddle or a joke that is under way, or to the answer of a question that was asked back."""
    # Whoever asks for something else has left the game.
    if (line := fun.knocked(asked)) is not None and ((other := _found(asked)) is None or other.intent.light):
        return line
    if (line := fun.replied(asked)) is not None:
        return line
    riddle = fun.riddle_asked(asked.talk)
    return None if riddle is None else fun.solved(asked, riddle)


def _renewed(asked: Asked) -> Understood | None:
    """What "another one" asks for, if the last thing asked for can be had again."""
    if _ANOTHER.fullmatch(asked.words) is None:
        return None
    for heard in reversed(asked.talk.heard):
        one = _with_text(asked, heard)
        if _ANOTHER.fullmatch(one.words) is None:
            match = _found(one)
            if match is None or not match.intent.light:
                return match if match is not None and match.intent.renews else None
    return None


def _joined(asked: Asked) -> list[str]:
    """The two requests that "and" joins, if each fits by itself and the whole does not; else none."""
    parts = _JOINED.split(asked.text)
    if len(parts) != _MAX_ANSWERED or _fitting(asked) is not None:
        return []
    both = [_fitting(_with_text(asked, part)) for part in parts]
    return parts if all(match is not None and not match.intent.light for match in both) else []


def _followed_up(asked: Asked) -> Understood | None:
    """The answer to a follow-up question, such as "And tomorrow?" after "What day is it?"."""
    following = _FOLLOWING.fullmatch(asked.words)
    if following is None:
        return None
    before = (plain_words(heard) for heard in reversed(asked.talk.heard))
    *_, request = requests(next((words for words in before if _FOLLOWING.fullmatch(words) is None), ""))
    question = request.split()
    other = following["rest"].split()
    # As many words at its end are replaced first, then one more, then fewer, and at last none.
    for replaced in (len(other), len(other) + 1, *range(len(other) - 1, -1, -1)):
        if replaced < len(question):
            whole = _with_text(asked, " ".join((*question[: len(question) - replaced], *other)))
            match = _found(whole) if not replaced and other[0] in _PREPOSITIONS else _fitting(whole)
            if match is not None and not match.intent.light:
                return match
    return None


def _found(asked: Asked) -> Understood | None:
    return _matcher().find(asked, without_courtesy(asked.text))


def _fitting(asked: Asked) -> Understood | None:
    return _matcher().fitting(asked, without_courtesy(asked.text))


def _with_text(asked: Asked, text: str) -> Asked:
    return replace(asked, text=_single_spaced(text))


def _unknown(asked: Asked) -> Iterator[str]:
    # The description of pictures is the answer to what is asked about them.
    return iter(()) if asked.pictured else unknown(asked)


def _parts(text: str) -> list[str]:
    """The sentences of a short text; a text to repeat or to spell is one."""
    if len(text) > _MAX_SENTENCES_LETTERS:
        return [text]
    request = text[_courtesy(text) :]
    if REPEAT.match(request) is not None or SPELL.match(request) is not None:
        return [text]
    parts = [part for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part))]
    return parts if len(parts) <= _MAX_SENTENCES else [text]


def _long_answer(plain: str) -> Iterator[str] | None:
    start = _courtesy(plain[:MAX_REQUEST])
    if (repeat := REPEAT.match(plain, start, MAX_REQUEST)) is not None:
        return repeated(plain[repeat.end() :])
    if (spell := SPELL.match(plain, start, MAX_REQUEST)) is not None:
        return spelled(plain[spell.end() :])
    return None


def _single_spaced(text: str) -> str:
    """``text`` with each run of white space made one space, and none at its ends."""
    parts: list[str] = []
    space = False
    for piece in pieces_of(text):
        words = " ".join(piece.split())
        space = space or piece[0].isspace()
        if words:
            parts.append(f" {words}" if space and parts else words)
            space = False
        space = space or piece[-1].isspace()
    return "".join(parts)


def without_courtesy(text: str) -> str:
    """``text`` as it was written, but for courtesies and marks around it."""
    request = text.strip(_TRAILING)
    request = request[_courtesy(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        before = request[: end.start()].rstrip(" ,")
        if not before:
            break
        request = before.strip(_TRAILING)
    return request


def _courtesy(text: str) -> int:
    """Length of the courtesies that begin ``text``; something is left behind them."""
    length = 0
    while (match := _POLITE.match(text, length)) is not None and match.end() < len(text):
        length = match.end()
    return length
