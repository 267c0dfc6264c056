"""What short speech over an answer means, by its words and its sound; and questions of the speaker.

The lists of words are in ``short_words``, a file a language; ``any.toml`` counts in every language.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from importlib.resources import files
from typing import Final, TypeAlias

from omni_ws.core.ledger import Ledger
from omni_ws.core.ledger_entry import LedgerEntry

#: Those that have lists of words.
LANGUAGES: Final = frozenset({"de", "en", "es", "fr", "it", "pt"})
#: A text of more words is no mere acknowledgement, and no mere "stop".
MOST_WORDS: Final = 6
#: More words are not made of a hum.
_MOST_WORDS_OF_A_HUM: Final = 4
#: If fewer words of a sentence were heard, the listener answers the sentence before it: to react takes a moment.
_LEAST_HEARD_WORDS: Final = 3

#: Without known words, a sound is a backchannel from the first probability on, and an interruption up to the second.
#: The sound of "yeah" and "okay" tells little, and words are known soon: so only clear cases are decided early.
SURE_BACKCHANNEL: Final = 0.85
SURE_WORDS: Final = 0.1
#: From here on a text that recognisers make of hums counts as a hum.
_RATHER_BACKCHANNEL: Final = 0.5
#: Sound that lasts longer is no backchannel, unless its words are.
LONGEST_BACKCHANNEL_MS: Final = 800

_BETWEEN_WORDS: Final = re.compile(r"[^\w']+|_")
_SENTENCE: Final = re.compile(r"[^.!?…。？！]*(?:[.!?…。？！]+|$)", re.DOTALL)
_QUESTION_MARKS: Final = re.compile(r"[?？؟]")

_Words: TypeAlias = tuple[str, ...]


class Verdict(Enum):
    """What speech over an answer is."""

    #: It wants the speaker to go on, or says nothing.
    BACKCHANNEL = "backchannel"
    INTERRUPTION = "interruption"
    #: An interruption that wants silence and no answer.
    STOP = "stop"
    #: More has to be known.
    UNSURE = "unsure"


def judged(
    text: str | None,
    probability: float | None,
    language: str | None,
    *,
    voiced_ms: int,
    after_question: bool,
    others: Sequence[str] = (),
) -> Verdict:
    """Return what speech over an answer is. It has paused, unless the verdict that counts is an interruption.

    ``text`` is what is recognised so far, None as long as nothing is known, "" if there are no words. ``probability``
    is that of ``backchannel_probability``. ``after_question``: the speaker has just asked something, and "yeah" answers
    it. ``others`` are readings that are almost as likely as ``text``. Known words are always enough for a verdict.
    """
    sure = probability is not None and probability >= SURE_BACKCHANNEL and voiced_ms <= LONGEST_BACKCHANNEL_MS
    if text is not None and _words(text):
        rather = probability is not None and probability >= _RATHER_BACKCHANNEL
        language = language or "en"
        verdict = _judged_by_words(text, language, sure=sure, rather=rather, after_question=after_question)
        surely_words = probability is not None and probability <= SURE_WORDS
        if verdict is Verdict.INTERRUPTION and not (after_question or surely_words):
            return Verdict.BACKCHANNEL if _is_misspelled([text, *others], language) else verdict
        return verdict
    if text is not None:
        # recognisers miss short words, and a loud "stop" is one
        surely_words = probability is not None and probability <= SURE_WORDS
        return Verdict.INTERRUPTION if surely_words else Verdict.BACKCHANNEL
    if voiced_ms > LONGEST_BACKCHANNEL_MS or (probability is not None and probability <= SURE_WORDS):
        return Verdict.INTERRUPTION
    return Verdict.BACKCHANNEL if sure and not after_question else Verdict.UNSURE


def _judged_by_words(text: str, language: str, *, sure: bool, rather: bool, after_question: bool) -> Verdict:
    """Return the verdict on known words; ``sure`` and ``rather``: how much they sounded like a backchannel.

    Of a hum a recogniser makes any words, "The moment." or "Lambda": the sound says that it was one, unless the words
    are those that interrupt. Some words are so often written for hums that less of the sound will do.
    """
    if is_stop_word(text, language):
        return Verdict.STOP
    if after_question:
        return Verdict.INTERRUPTION
    if is_acknowledgement(text, language):
        return Verdict.BACKCHANNEL
    words, known = _words(text), _list_of(language)
    hum = sure and len(words) <= _MOST_WORDS_OF_A_HUM and not begins_with_stop_word(text, language)
    misheard = rather and _divides(words, (known.misheard, known.acknowledgements))
    return Verdict.BACKCHANNEL if hum or misheard else Verdict.INTERRUPTION


def _is_misspelled(readings: Sequence[str], language: str) -> bool:
    """Return whether one of some readings is an acknowledgement ("Got it", not "God it"), and none interrupts.

    Where one has too many words for that, another has left some of them out.
    """
    if any(len(_words(reading)) > MOST_WORDS for reading in readings):
        return False
    return any(is_acknowledgement(reading, language) for reading in readings) and not any(
        begins_with_stop_word(reading, language) or is_stop_word(reading, language) for reading in readings
    )


def is_acknowledgement(text: str, language: str = "en") -> bool:
    """Return whether a text consists of phrases alone that want the speaker to go on, such as "yeah, I see"."""
    return _divides(_words(text), (_list_of(language).acknowledgements,))


def is_stop_word(text: str, language: str = "en") -> bool:
    """Return whether a whole utterance means stop: "wait", "okay, stop please"."""
    words, known = _words(text), _list_of(language)
    around = (known.stop, known.beside_stop, known.acknowledgements)
    return _divides(words, around) and not _divides(words, around[1:])


def begins_with_stop_word(text: str, language: str = "en") -> bool:
    """Return whether a text that may go on begins with words that interrupt, acknowledgements before them left out."""
    words, known = _words(text), _list_of(language)
    places = _ends(words, (known.acknowledgements,))
    if len(words) in places:  # "no way", "ach was"
        return False
    return any(ends for place in places for ends in known.stop.ends(words, place) + known.interrupts.ends(words, place))


def asks(text: str, heard: int) -> bool:
    """Return whether the last sentence of ``text`` that was heard is a question; ``heard`` characters were heard."""
    sentences = [found for found in _SENTENCE.finditer(text) if found[0].strip() and found.start() < heard]
    if len(sentences) > 1:
        last = sentences[-1]
        if last.end() > heard and len(text[last.start() : heard].split()) < _LEAST_HEARD_WORDS:
            sentences.pop()  # it has only just begun
    return bool(sentences) and _QUESTION_MARKS.search(sentences[-1][0]) is not None


def has_asked(ledger: Ledger, answer: LedgerEntry, now: float) -> bool:
    """Return whether the last sentence that was heard of an answer until ``now`` is a question."""
    return asks(answer.said.joined(), len(ledger.answer_if_cut(answer, now).text))


# Lists of phrases


@dataclass(frozen=True, slots=True)
class _Phrases:
    known: frozenset[_Words]
    longest: int

    def ends(self, words: _Words, place: int) -> list[int]:
        """Return where phrases end that begin at a place."""
        last = min(place + self.longest, len(words))
        return [end for end in range(place + 1, last + 1) if words[place:end] in self.known]


@dataclass(frozen=True, slots=True)
class _ShortWords:
    acknowledgements: _Phrases
    misheard: _Phrases
    stop: _Phrases
    beside_stop: _Phrases
    interrupts: _Phrases


def _ends(words: _Words, lists: tuple[_Phrases, ...]) -> set[int]:
    """Return the places up to which the words can be divided into phrases of the lists."""
    begins = {0}
    for place in range(len(words)):
        if place in begins:
            begins.update(end for phrases in lists for end in phrases.ends(words, place))
    return begins


def _divides(words: _Words, lists: tuple[_Phrases, ...]) -> bool:
    """Return whether words can be divided into phrases of the lists, and are not too many."""
    return 0 < len(words) <= MOST_WORDS and len(words) in _ends(words, lists)


def _words(text: str) -> _Words:
    return tuple(_BETWEEN_WORDS.sub(" ", text.replace("’", "'").lower()).split())


def _list_of(language: str) -> _ShortWords:
    """Return the phrases of a language, by its name as a client may write it: "en", "pt-BR"."""
    plain = re.split("[-_]", language.lower(), maxsplit=1)[0]
    return _read(plain if plain in LANGUAGES else "any")


@cache
def _read(language: str) -> _ShortWords:
    every, own = _file("any"), _file(language) if language != "any" else {}
    return _ShortWords(
        *(
            _Phrases(frozenset(phrases), max(map(len, phrases), default=0))
            for name in _ShortWords.__annotations__
            for phrases in [[_words(each) for each in every.get(name, []) + own.get(name, [])]]
        )
    )


def _file(language: str) -> dict[str, list[str]]:
    file = files(__package__).joinpath("short_words", f"{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))
