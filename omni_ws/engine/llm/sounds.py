"""How English words sound, roughly, and how far two sentences are apart: "hell are you" is close to "how are you".

A sound is one character; the sounds of a sentence have no gaps, because recognition misplaces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Generic, TypeVar

import numpy as np

T = TypeVar("T")

#: Words that are not spoken as they are spelled, and are in every second sentence.
_IRREGULAR: Final = {
    "you": "ju", "your": "jor", "are": "ar", "who": "hu", "how": "hW", "one": "wan", "two": "tu", "to": "tu",
    "too": "tu", "do": "du", "does": "daz", "done": "dan", "the": "Da", "is": "iz", "was": "waz", "what": "wat",
    "here": "hir", "hear": "hir", "there": "Der", "their": "Der", "where": "wer", "know": "no", "no": "no",
    "have": "hav", "give": "giv", "some": "sam", "come": "kam", "time": "tIm", "my": "mI", "by": "bI", "bye": "bI",
    "buy": "bI", "why": "wI", "i": "I", "eye": "I", "said": "sed", "says": "sez", "of": "av", "four": "for",
    "eight": "et", "ate": "et", "hi": "hI", "high": "hI", "he": "hi", "she": "Si", "we": "wi", "me": "mi",
    "be": "bi", "so": "so", "go": "go", "love": "lav", "a": "a", "right": "rIt", "write": "rIt", "mother": "maDR",
    "other": "aDR", "love's": "lavz", "any": "eni", "many": "meni", "people": "pipl", "friend": "frend",
    "great": "gret", "good": "gud", "would": "wud", "could": "kud",
}  # fmt: skip
_SPELLED: Final = (
    ("eigh", "e"), ("ough", "o"), ("augh", "o"), ("tion", "San"), ("sion", "San"), ("igh", "I"), ("tch", "C"),
    ("dge", "J"), ("sch", "sk"), ("ch", "C"), ("sh", "S"), ("th", "D"), ("ph", "f"), ("gh", ""), ("ck", "k"),
    ("qu", "kw"), ("wh", "w"), ("wr", "r"), ("kn", "n"), ("ng", "n"), ("ce", "se"), ("ci", "si"), ("cy", "sI"),
    ("ee", "i"), ("ea", "i"), ("ie", "i"), ("ei", "i"), ("oo", "u"), ("ew", "u"), ("ue", "u"), ("ui", "u"), ("ou", "W"),
    ("ow", "W"), ("oa", "o"), ("oe", "o"), ("ai", "e"), ("ay", "e"), ("ey", "i"), ("au", "o"), ("aw", "o"), ("oi", "Y"),
    ("oy", "Y"), ("er", "R"), ("ir", "R"), ("ur", "R"), ("x", "ks"), ("c", "k"), ("q", "k"), ("j", "J"), ("y", "i"),
)  # fmt: skip
_LETTERS: Final = re.compile("|".join([spelled for spelled, _ in _SPELLED] + ["."]))
_SOUNDS: Final = dict(_SPELLED)
_LONG: Final = re.compile(r"([aiou])([bcdfgklmnprstvz])e$")
_LONG_VOWELS: Final = {"a": "ay", "i": "igh", "o": "oa", "u": "oo"}
_DOUBLE: Final = re.compile(r"(.)\1+")

VOWELS: Final = "aeiouIWYR"
#: Sounds within a class are often taken for one another.
_CLASSES: Final = (VOWELS, "pb", "td", "kg", "fv", "szSCJ", "mn", "lr", "jw", "h", "D")
_CLASS: Final = {sound: number for number, sounds in enumerate(_CLASSES) for sound in sounds}
_KIN: Final = 0.4
_OTHER: Final = 1.0
_LOST_WEAK: Final = 0.5
_LOST_FIRM: Final = 0.8
_IS_WEAK: Final = tuple(sounds in (VOWELS, "jw", "h") for sounds in _CLASSES)
_LOST: Final = {
    sound: _LOST_WEAK if weak else _LOST_FIRM
    for sounds, weak in zip(_CLASSES, _IS_WEAK, strict=True)
    for sound in sounds
}
#: Classes as factors of the number of sounds in each.
_WEAK: Final = np.array(_IS_WEAK, np.int16)
_FIRM: Final = 1 - _WEAK
#: Added costs may differ by so much from those in another order.
_ROUNDING: Final = 1e-9
#: How much two sentences that count as one may differ, for each sound and at most; in short ones, a little is much.
NEAR: Final = 0.18
_MOST: Final = 1.6
_SHORT: Final = 6
_MOST_IN_SHORT: Final = 0.35
#: In fewer sounds than these, too much of a sentence would have to be guessed. Longer ones are seldom misheard whole.
MIN_SOUNDS: Final = 4
MAX_SOUNDS: Final = 30
_MAX_LETTERS: Final = 30


@lru_cache(maxsize=4096)
def sounds_of_word(word: str) -> str:
    """The sounds of an English word in small letters; letters of other alphabets have none."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    word = word[:_MAX_LETTERS]
    word = _LONG.sub(lambda found: _LONG_VOWELS[found[1]] + found[2], word)
    if len(word) > 3 and word[-1] == "e" and word[-2] not in "aeiouy":
        word = word[:-1]
    start = {"y": "j"}.get(word[0], "")
    sounds = start + "".join(_SOUNDS.get(found, found) for found in _LETTERS.findall(word[len(start) :]))
    return _DOUBLE.sub(r"\1", "".join(sound for sound in sounds if sound in _CLASS))


def sounds_of(words: str) -> str:
    """The sounds of plain words."""
    return "".join(map(sounds_of_word, words.split()))


class SoundIndex(Generic[T]):
    """Sentences by their sounds.

    Few are compared sound by sound: how many sounds of each class a sentence has already tells for most that they are
    too far.
    """

    def __init__(self, sentences: Iterable[tuple[str, T]]) -> None:
        kept: dict[str, tuple[int, T]] = {}
        for order, (words, found) in enumerate(sentences):
            sounds = sounds_of(words)
            if MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS:
                kept.setdefault(sounds, (order, found))
        #: The shortest first.
        self._sentences = sorted(kept, key=len)
        #: For each of them its place among all that were added, and what belongs to it.
        self._found = [kept[sounds] for sounds in self._sentences]
        self._lengths = np.array([len(sounds) for sounds in self._sentences], np.int16)
        self._counts = np.array([_counts(sounds) for sounds in self._sentences], np.int16).reshape(-1, len(_CLASSES))

    def nearest(self, words: str) -> tuple[float, T] | None:
        """How far the sentence is that sounds most like ``words``, for each sound of these, and what belongs to it.

        None where none is near, and for digits, which have no sounds here. Of several sentences that are as far, the
        first one that was added is found.
        """
        sounds = sounds_of(words)
        if not MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS or any(map(str.isdigit, words)):
            return None
        limit = _MOST_IN_SHORT if len(sounds) < _SHORT else min(_MOST, NEAR * len(sounds))
        best: tuple[float, int, T] | None = None
        for least, place in self.candidates(sounds, limit):
            if least > limit:
                break
            far = distance(self._sentences[place], sounds, limit)
            if far is not None and (best is None or (far, self._found[place][0]) < best[:2]):
                best = (far, *self._found[place])
                limit = far
        return None if best is None else (best[0] / len(sounds), best[2])

    def candidates(self, sounds: str, limit: float) -> list[tuple[float, int]]:
        """At least how far each sentence is that may be as near as ``limit``, and its place: the nearest first."""
        longest_gap = int(limit / min(_LOST.values()))
        start, end = np.searchsorted(self._lengths, [len(sounds) - longest_gap, len(sounds) + longest_gap + 1])
        more = self._counts[start:end] - np.array(_counts(sounds), np.int16)
        missing, surplus = np.maximum(-more, 0), np.maximum(more, 0)
        # By class at best: two firm sounds for one another, then a firm and a weak one; the rest is lost.
        weak_missing, weak_surplus = missing @ _WEAK, surplus @ _WEAK
        firm_missing, firm_surplus = missing @ _FIRM, surplus @ _FIRM
        firm_left = firm_surplus - firm_missing
        mixed = np.minimum(np.abs(firm_left), np.where(firm_left > 0, weak_missing, weak_surplus))
        least = _LOST_WEAK * (weak_missing + weak_surplus) + _LOST_FIRM * (firm_missing + firm_surplus)
        least -= (2 * _LOST_FIRM - _OTHER) * np.minimum(firm_missing, firm_surplus)
        least -= (_LOST_FIRM + _LOST_WEAK - _OTHER) * mixed + _ROUNDING
        places = np.flatnonzero(least <= limit)
        nearest_first = places[np.argsort(least[places], kind="stable")]
        return list(zip(least[nearest_first].tolist(), (nearest_first + int(start)).tolist(), strict=True))


def _counts(sounds: str) -> list[int]:
    """How many of ``sounds`` belong to each class."""
    counts = [0] * len(_CLASSES)
    for sound in sounds:
        counts[_CLASS[sound]] += 1
    return counts


def distance(sentence: str, sounds: str, limit: float) -> float | None:
    """What it costs to turn ``sounds`` into those of a ``sentence``; None for more than ``limit``."""
    row = [0.0]
    for sound in sounds:
        row.append(row[-1] + _LOST[sound])
    for sound in sentence:
        row = _next_row(row, sounds, sound)
        if min(row) > limit:
            return None
    return row[-1] if row[-1] <= limit else None


def _next_row(row: list[float], sounds: str, sound: str) -> list[float]:
    """What each beginning of ``sounds`` costs against a sentence that goes on with ``sound`` where ``row`` was."""
    lost, kind = _LOST[sound], _CLASS[sound]
    costs = [row[0] + lost]
    for place, heard in enumerate(sounds):
        changed = row[place]
        if heard != sound:
            changed += _KIN if kind == _CLASS[heard] else _OTHER
        costs.append(min(changed, row[place + 1] + lost, costs[place] + _LOST[heard]))
    return costs
