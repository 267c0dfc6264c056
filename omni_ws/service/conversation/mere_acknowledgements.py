"""Recognises mere acknowledgements of a listener ("yeah", "I see", "mm-hm"), and questions of the speaker."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib.resources import files
from typing import Final

#: A text of more words is no mere acknowledgement.
MOST_WORDS: Final = 6
#: If fewer words of a sentence were heard, the listener answers the sentence before it: to react takes a moment.
_LEAST_HEARD_WORDS: Final = 3

_BETWEEN_WORDS: Final = re.compile(r"[^\w']+|_")
_SENTENCE: Final = re.compile(r"[^.!?…。？！]*(?:[.!?…。？！]+|$)", re.DOTALL)
_QUESTION_MARKS: Final = re.compile(r"[?？؟]")


def is_acknowledgement(text: str) -> bool:
    """Return whether a text consists of phrases of acknowledgements.txt alone, such as "yeah, I see"."""
    words = _words(text)
    if not words or len(words) > MOST_WORDS:
        return False
    known, longest = _known()
    begins = {0}  # the places up to which the words can be divided into phrases of the list
    for place in range(len(words)):
        if place in begins:
            ends = range(place + 1, min(place + longest, len(words)) + 1)
            begins |= {end for end in ends if words[place:end] in known}
    return len(words) in begins


def asks(text: str, heard: int) -> bool:
    """Return whether the last sentence of ``text`` that was heard is a question; ``heard`` characters were heard."""
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
    """Return the phrases of acknowledgements.txt, each as a tuple of words, and the number of words of the longest."""
    lines = files(__package__).joinpath("acknowledgements.txt").read_text(encoding="utf-8").splitlines()
    phrases = frozenset(_words(line) for line in lines if line.strip() and not line.startswith("#"))
    return phrases, max(map(len, phrases))
