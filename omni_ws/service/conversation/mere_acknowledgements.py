"""What a listener says who wants the speaker to go on: "yeah", "I see", "mm-hm"; and whether the speaker has asked."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from typing import Final

#: Whoever says more has something to say.
MOST_WORDS: Final = 6
#: A sentence of which fewer words were heard is not what the listener answers: that takes a moment.
_LEAST_HEARD_WORDS: Final = 3

_BETWEEN_WORDS: Final = re.compile(r"[^\w']+|_")
_SENTENCE: Final = re.compile(r"[^.!?…。？！]*(?:[.!?…。？！]+|$)", re.DOTALL)
_QUESTION_MARKS: Final = re.compile(r"[?？؟]")


def is_acknowledgement(text: str) -> bool:
    """Whether a text consists of phrases of acknowledgements.txt alone, such as "yeah, I see"."""
    words = _words(text)
    if not words or len(words) > MOST_WORDS:
        return False
    known, longest = _known()
    begins = {0}  # the places up to which phrases of the list can stand behind one another
    for place in range(len(words)):
        if place in begins:
            ends = range(place + 1, min(place + longest, len(words)) + 1)
            begins |= {end for end in ends if words[place:end] in known}
    return len(words) in begins


def asks(text: str, heard: int) -> bool:
    """Whether the last sentence that was heard of ``text``, up to the place ``heard``, is a question."""
    sentences = [found for found in _SENTENCE.finditer(text) if found[0].strip() and found.start() < heard]
    if len(sentences) > 1:
        last = sentences[-1]
        if last.end() > heard and len(text[last.start() : heard].split()) < _LEAST_HEARD_WORDS:
            sentences.pop()  # it has only just begun
    return bool(sentences) and _QUESTION_MARKS.search(sentences[-1][0]) is not None


def _words(text: str) -> tuple[str, ...]:
    return tuple(_BETWEEN_WORDS.sub(" ", text.replace("’", "'").lower()).split())


@lru_cache(maxsize=1)
def _known() -> tuple[frozenset[tuple[str, ...]], int]:
    """The phrases by their words, and the most words of one."""
    lines = files(__package__).joinpath("acknowledgements.txt").read_text(encoding="utf-8").splitlines()
    phrases = frozenset(_words(line) for line in lines if line.strip() and not line.startswith("#"))
    return phrases, max(map(len, phrases))
