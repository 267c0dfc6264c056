"""Answers by rules. What they understand stands in ``intents/``; what they do not is admitted in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from random import Random
from typing import Final

from omni_ws.core.history import Message
from omni_ws.engine.llm.encyclopedia import Encyclopedia
from omni_ws.engine.llm.intents import told
from omni_ws.engine.llm.intents.letters import REPEAT, SPELL, repeated, spelled
from omni_ws.engine.llm.intents.matcher import Matcher, Understood, catalogue
from omni_ws.engine.llm.plain_words import WORDS, Asked, Talk, courtesies, expanded, plain_words, read, requests

#: Longer texts, in characters, are at most something to repeat or to spell.
MAX_REQUEST: Final = 4096
#: Of longer texts, single sentences are not looked at.
_MAX_SENTENCES_LETTERS: Final = 400
_MAX_SENTENCES: Final = 5
_MAX_ANSWERED: Final = 2

NOTHING_HEARD: Final = "I did not hear anything."
NOTHING_WRITTEN: Final = "The message is empty."
#: By the language (RFC 5646): that rules answer in English alone, and that nothing was heard.
ONLY_ENGLISH: Final[Mapping[str, str]] = {code: said["only_english"] for code, said in read("elsewhere").items()}
NOTHING_HEARD_IN: Final[Mapping[str, str]] = {code: said["nothing_heard"] for code, said in read("elsewhere").items()}
TOO_LONG: Final = "That is more than I can follow."

_SPACE: Final = re.compile(r"\s+")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?;])\s+(?=\S)")
_JOINED: Final = re.compile(rf",? and (?:then |also |please )*(?=(?:{'|'.join(WORDS['requests']['joined'])}) )", re.I)
_ANOTHER: Final = frozenset(expanded(WORDS["requests"]["another"]))
#: A follow-up: the last question, asked about something else.
_FOLLOWING: Final = re.compile(r"(?:and what about|and how about|what about|how about|and|or) (?P<rest>.+)")
_PREPOSITIONS: Final = frozenset(("in", "at", "on", "for"))


@cache
def _matcher() -> Matcher:
    return Matcher(catalogue())


def prepare() -> None:
    """Build what all answers need, which takes a moment."""
    _matcher()


def answer(
    text: str,
    history: Sequence[Message],
    now: datetime,
    *,
    seed: object = None,
    pictured: bool = False,
    encyclopedia: Encyclopedia | None = None,
) -> Iterator[str]:
    """The sentences of the answer to ``text``, one at a time, so that a long one can be spoken while it is made.

    Chance is drawn from ``seed``, or ``now`` where there is none, and from the text and its place in the conversation.
    ``pictured`` says that pictures came with the text and were described. What no rule has comes from ``encyclopedia``.
    """
    plain = _SPACE.sub(" ", text).strip()
    if not plain:
        return iter((NOTHING_WRITTEN,))
    if len(plain) > MAX_REQUEST:
        return iter((_long_answer(plain) or TOO_LONG,))
    return _short_answer(
        replace(_asked(plain, Talk(history), now, seed=seed), pictured=pictured, encyclopedia=encyclopedia)
    )


def answer_in_english_alone(language: str) -> str:
    """The one sentence that somebody gets who speaks ``language`` (RFC 5646): in it, if we have it, else in English."""
    return ONLY_ENGLISH.get(language, told.UNKNOWN["foreign"][0])


def exact_answer(
    text: str,
    history: Sequence[Message],
    now: datetime,
    *,
    seed: object = None,
    of_itself: bool = True,
    encyclopedia: Encyclopedia | None = None,
) -> Iterator[str] | None:
    """The sentences of an answer that rules give exactly, each request in ``text`` for itself; None for all else.

    Nothing is guessed here: misspelled words, or a word that tells enough among others, do not count. ``of_itself``:
    whether the rules may say who answers; instructions may say that it is somebody else. Facts come from
    ``encyclopedia``.
    """
    plain = _SPACE.sub(" ", text).strip()
    if not plain or len(plain) > _MAX_SENTENCES_LETTERS:
        return None
    asked = replace(_asked(plain, Talk(history), now, seed=seed), encyclopedia=encyclopedia)
    parts = _parts(plain)
    parts = (parts if len(parts) > 1 else _joined(asked)) or [plain]
    found = [_matcher().exactly(_with_text(asked, part)) for part in parts]
    exact = [match for match in found if match is not None and match.intent.exact]
    known = all(match is not None and (match.intent.exact or match.intent.light) for match in found)
    if not of_itself and any(match.intent.name == "who are you" for match in exact):
        return None
    if not exact or not known or (exact[0].intent.name == "what is my name" and told.name_told(asked.talk) is None):
        return None
    return _each_once(exact[:_MAX_ANSWERED])


def _asked(plain: str, talk: Talk, now: datetime, *, seed: object) -> Asked:
    drawn_from = f"{now.isoformat() if seed is None else seed} {len(talk.history)} {plain}"
    chance = Random(drawn_from.encode("utf-8", "surrogatepass"))
    return Asked(text=plain, talk=talk, now=now, chance=chance)


def _with_text(asked: Asked, text: str) -> Asked:
    return replace(asked, text=_SPACE.sub(" ", text).strip())


def _short_answer(asked: Asked) -> Iterator[str]:
    if (line := _in_play(asked)) is not None:
        return line
    if (renewed := _renewed(asked)) is not None:
        return renewed.sentences
    parts = _parts(asked.text)
    if len(parts) < 2:
        parts = _joined(asked)
    if len(parts) > 1:
        return _answered_in_parts(asked, parts)
    match = _matcher().find(asked) or _followed_up(asked)
    return match.sentences if match is not None else _unknown(asked)


def _answered_in_parts(asked: Asked, parts: Sequence[str]) -> Iterator[str]:
    """The answer to several sentences: as to one phrase, or to those that want an answer, or else to the last."""
    if (phrase := _matcher().phrase(asked)) is not None:
        return phrase.sentences
    # A speaker who gets no answer at once says the sentence again.
    first_said: dict[str, Asked] = {}
    for place, part in enumerate(parts):
        one = _with_text(replace(asked, talk=Talk(asked.talk.history, said=parts[:place])), part)
        first_said.setdefault(one.words, one)
    found = [(one, _matcher().find(one)) for one in first_said.values()]
    known = [match for _, match in found if match is not None]
    if urgent := [match for match in known if match.intent.first]:
        return urgent[0].sentences
    if heavy := [match for match in known if not match.intent.light]:
        return _each_once(heavy[:_MAX_ANSWERED])
    if (whole := _matcher().find(asked)) is not None:
        return whole.sentences
    unknown = [one for one, match in found if match is None]
    return _unknown(unknown[0]) if unknown else known[-1].sentences


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


def _in_play(asked: Asked) -> Iterator[str] | None:
    """The next line of a riddle or a joke that is under way, or to the answer of a question that was asked back."""
    if (following := _matcher().following(asked)) is not None:
        return following.sentences
    line = told.solved(asked)
    return None if line is None else iter((line,))


def _renewed(asked: Asked) -> Understood | None:
    """What "another one" asks for, if the last thing asked for can be had again."""
    if asked.words in _ANOTHER:
        for heard in reversed(asked.talk.heard):
            one = _with_text(asked, heard)
            match = _matcher().find(one) if one.words not in _ANOTHER else None
            if one.words not in _ANOTHER and (match is None or not match.intent.light):
                return match if match is not None and match.intent.renews else None
    return None


def _joined(asked: Asked) -> list[str]:
    """The two requests that "and" joins, if each fits by itself and the whole does not; else none."""
    parts = _JOINED.split(asked.text)
    if len(parts) != _MAX_ANSWERED or _matcher().fitting(asked) is not None:
        return []
    both = [_matcher().fitting(_with_text(asked, part)) for part in parts]
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
            find = _matcher().find if not replaced and other[0] in _PREPOSITIONS else _matcher().fitting
            if (match := find(whole)) is not None and not match.intent.light:
                return match
    return None


def _unknown(asked: Asked) -> Iterator[str]:
    """The sentence for a request that no rule fits."""
    if not asked.pictured:  # otherwise the description of the pictures is the answer
        yield asked.talk.fresh(told.UNKNOWN[told.kind_of(asked.text)])


def _parts(text: str) -> list[str]:
    """The sentences of a short text; a text to repeat or to spell is one."""
    request = text[courtesies(text) :]
    if len(text) > _MAX_SENTENCES_LETTERS or REPEAT.match(request) is not None or SPELL.match(request) is not None:
        return [text]
    parts = [part for part in _SENTENCE_END.split(text) if any(map(str.isalnum, part))]
    return parts if len(parts) <= _MAX_SENTENCES else [text]


def _long_answer(plain: str) -> str | None:
    start = courtesies(plain[:MAX_REQUEST])
    if (repeat := REPEAT.match(plain, start, MAX_REQUEST)) is not None:
        return repeated(plain[repeat.end() :])
    spell = SPELL.match(plain, start, MAX_REQUEST)
    return None if spell is None else spelled(plain[spell.end() :])
