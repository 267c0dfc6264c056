"""How English words sound, roughly, and how far two sentences are apart: "hell are you" is close to "how are you".

A sound is one character; the sounds of a sentence have no gaps, because recognition misplaces them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, Generic, TypeVar

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
_LOST: Final = {sound: 0.5 if sound in VOWELS + "hjw" else 0.8 for sounds in _CLASSES for sound in sounds}
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
    """Sentences by their sounds, as a tree whose branches share the beginnings of sentences."""

    def __init__(self, sentences: Iterable[tuple[str, T]]) -> None:
        self._root: _Node[T] = _Node()
        for order, (words, found) in enumerate(sentences):
            sounds = sounds_of(words)
            if MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS:
                node = self._root
                for sound in sounds:
                    node = node.next.setdefault(sound, _Node())
                if node.found is None:
                    node.found, node.order = found, order

    def nearest(self, words: str) -> tuple[float, T] | None:
        """How far the sentence is that sounds most like ``words``, for each sound of these, and what belongs to it.

        None where none is near, and for digits, which have no sounds here. Of several sentences that are as far, the
        first one that was added is found.
        """
        sounds = sounds_of(words)
        if not MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS or any(map(str.isdigit, words)):
            return None
        most = _MOST_IN_SHORT if len(sounds) < _SHORT else min(_MOST, NEAR * len(sounds))
        first = [0.0]
        for sound in sounds:
            first.append(first[-1] + _LOST[sound])
        best: tuple[float, int, T] | None = None
        open_nodes = [(self._root, first)]
        while open_nodes:
            node, row = open_nodes.pop()
            limit = most if best is None else best[0]
            if node.found is not None and row[-1] <= limit and (best is None or (row[-1], node.order) < best[:2]):
                best = (row[-1], node.order, node.found)
            for sound, following in node.next.items():
                costs = _next_row(row, sounds, sound)
                if min(costs) <= limit:
                    open_nodes.append((following, costs))
        return None if best is None else (best[0] / len(sounds), best[2])


class _Node(Generic[T]):
    """A place in the tree: what goes on from there, and what belongs to the sentence that ends there."""

    __slots__ = ("found", "next", "order")

    def __init__(self) -> None:
        self.next: dict[str, _Node[T]] = {}
        self.found: T | None = None
        self.order = 0


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
