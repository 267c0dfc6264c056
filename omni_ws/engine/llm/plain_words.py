"""What somebody said, as rules read it: in plain words, after the talk so far, and by its sound."""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from importlib import resources
from typing import Any, Final, Generic, TypeVar

import numpy as np

from omni_ws.core.history import Message

_NAME: Final = re.compile(r"{([a-z_]+)}")
_LINE_END: Final = re.compile(r"\n *|^ +")


@cache
def read(name: str) -> dict[str, Any]:
    """The tables of a file beside the intents, which is read once."""
    file = resources.files("omni_ws.engine.llm.intents").joinpath(f"{name}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def inserted(text: str, words: dict[str, str]) -> str:
    """A ``text`` of such a file on one line, with each ``{name}`` replaced by what ``words`` has for it."""
    return _NAME.sub(lambda found: inserted(words[found[1]], words), _LINE_END.sub("", text))


# Plain words: what was written or heard, in one spelling, and without courtesies around it

WORDS: Final = read("words")
_QUOTES: Final = str.maketrans("’‘ʼ`´", "'''''")
_SIGNS: Final = re.compile(r"°\s?[cf]\b|[%°&]")
_MINUS: Final = re.compile(r"(?<![\w)])[-−](?=\d)")
_IS: Final = re.compile(rf"\b({'|'.join(WORDS['before_is'])})'s\b")
_CONTRACTED: Final = re.compile(r"\bwon't\b|\bcan't\b|\blet's\b|n't\b|'re\b|'ve\b|'ll\b|'m\b|'d\b")
_TOKEN: Final = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?|[^\W\d_]+(?:'[^\W\d_]+)*")
_LEADING: Final = re.compile(rf"^(?:{'|'.join(WORDS['courtesies']['before'])}) (?=.)")
_TRAILING: Final = re.compile(rf"(?<=.) (?:{'|'.join(WORDS['courtesies']['behind'])})$")
#: Courtesies that are taken away at most, before and behind.
_MOST_COURTESIES: Final = 6
#: Around a request as it was written.
_POLITE: Final = re.compile(rf"(?:{'|'.join(WORDS['courtesies']['written_before'])})[\s,.!]+", re.I)
_POLITE_END: Final = re.compile(rf"(?:{'|'.join(WORDS['courtesies']['written_behind'])})$", re.I)
_LONGEST_POLITE_END: Final = len(", could you please tell me")
_MARKS: Final = " \t\r\n.!?,;"


def plain_words(text: str) -> str:
    """``text`` in small letters, without punctuation and contractions, a space between words: "what's" → "what is"."""
    text = unicodedata.normalize("NFKC", text).translate(_QUOTES).lower()
    text = _MINUS.sub(" minus ", text)
    text = _SIGNS.sub(lambda sign: f" {WORDS['signs'][sign[0].replace(' ', '')]} ", text)
    text = _CONTRACTED.sub(lambda found: WORDS["contractions"][found[0]], _IS.sub(r"\1 is", text))
    return " ".join(WORDS["spellings"].get(word, word) for word in _TOKEN.findall(text))


def requests(words: str) -> Iterator[str]:
    """Yield plain ``words``, and what is left of them with fewer and fewer courtesies; what has none comes last."""
    yield words
    yield from _stripped(_LEADING, words)
    for shorter in _stripped(_TRAILING, words):
        yield shorter
        words = shorter
    yield from _stripped(_LEADING, words)


def _stripped(courtesy: re.Pattern[str], words: str) -> Iterator[str]:
    """Yield ``words`` without the first courtesy, without the second one too, and so on."""
    for _ in range(_MOST_COURTESIES):
        shorter = courtesy.sub("", words, count=1)
        if shorter == words:
            return
        yield shorter
        words = shorter


def without_courtesies(text: str) -> str:
    """``text`` as it was written, but for courtesies and marks around it."""
    request = text.strip(_MARKS)
    request = request[courtesies(request) :]
    while (end := _POLITE_END.search(request, max(0, len(request) - _LONGEST_POLITE_END))) is not None:
        shorter = request[: end.start()].rstrip(" ,")
        if not shorter:
            break
        request = shorter.strip(_MARKS)
    return request


def courtesies(text: str) -> int:
    """Length of the courtesies that begin ``text``; something is left behind them."""
    length = 0
    while (match := _POLITE.match(text, length)) is not None and match.end() < len(text):
        length = match.end()
    return length


# The conversation so far

#: Of how many messages of each side the texts are looked at, and how many characters of each.
RECENT: Final = 64
_LOOKED_AT: Final = 2048


class Talk:
    """The conversation so far, as rules read it: what both sides said, the newest last."""

    def __init__(self, history: Sequence[Message], *, said: Sequence[str] = ()) -> None:
        self._history = history
        answers, heard = _said(history, "assistant"), _said(history, "user")
        #: The last answer, whole; empty before the first. The same of what was heard.
        self.last_answer = answers[-1].strip() if answers else ""
        self.last_heard = heard[-1].strip() if heard else ""
        self.answers = tuple(answer[:_LOOKED_AT] for answer in answers)
        self.heard = tuple(words[:_LOOKED_AT] for words in (*heard, *said))

    def going_on(self, said: Sequence[str]) -> Talk:
        """Return the same talk a few sentences later in the message that is being answered."""
        return Talk(self._history, said=said)

    @property
    def position(self) -> int:
        """The number of messages before this one."""
        return len(self._history)

    def all_heard(self) -> list[str]:
        """What was heard in the whole conversation, without empty texts: the oldest first."""
        texts = (message.text.strip()[:_LOOKED_AT] for message in self._history if message.role == "user")
        return [text for text in texts if text]

    def has_said(self, sentence: str) -> bool:
        """Whether any answer contained ``sentence``."""
        return any(message.role == "assistant" and sentence in message.text for message in self._history)

    def fresh(self, wordings: Sequence[str]) -> str:
        """Return the first of ``wordings`` that was not said yet; where all were, the one said longest ago."""
        return min(wordings, key=self._last_said)

    def _last_said(self, wording: str) -> int:
        """The place of the newest answer with ``wording``; -1 for none."""
        return max((place for place, answer in enumerate(self.answers) if wording in answer), default=-1)


def _said(history: Sequence[Message], role: str) -> list[str]:
    """The newest texts of one side, whole, in their order."""
    texts: list[str] = []
    for message in reversed(history):
        if len(texts) == RECENT:
            break
        if message.role == role and message.text and not message.text.isspace():
            texts.append(message.text)
    return texts[::-1]


# How English words sound, roughly, and how far two sentences are apart: "hell are you" is close to "how are you".
#
# A sound is one character; the sounds of a sentence have no gaps, because recognition misplaces them.

T = TypeVar("T")

_SPELLED: Final[dict[str, str]] = WORDS["sounds"]["spelled"]
_LETTERS: Final = re.compile("|".join([*_SPELLED, "."]))
_LONG: Final = re.compile(r"([aiou])([bcdfgklmnprstvz])e$")
_LONG_VOWELS: Final = {"a": "ay", "i": "igh", "o": "oa", "u": "oo"}
_DOUBLE: Final = re.compile(r"(.)\1+")

VOWELS: Final = "aeiouIWYR"
#: Sounds within a class are often taken for one another. Those of weak classes get lost more easily.
_WEAK: Final = (VOWELS, "jw", "h")
_CLASSES: Final = (*_WEAK, "pb", "td", "kg", "fv", "szSCJ", "mn", "lr", "D")
_CLASS: Final = {sound: number for number, sounds in enumerate(_CLASSES) for sound in sounds}
_KIN: Final = 0.4
_OTHER: Final = 1.0
_LOST: Final = {sound: 0.5 if number < len(_WEAK) else 0.8 for sound, number in _CLASS.items()}
#: What a sound too many or too few of a class costs at least: two of them may be one that is taken for another.
_LEAST: Final = 0.5
#: How much two sentences that count as one may differ, for each sound and at most; in short ones, a little is much.
NEAR: Final = 0.18
_MOST_APART: Final = 1.6
_FEW_SOUNDS: Final = 6
_MOST_APART_IN_FEW: Final = 0.35
#: In fewer sounds than these, too much of a sentence would have to be guessed. Longer ones are seldom misheard whole.
MIN_SOUNDS: Final = 4
MAX_SOUNDS: Final = 30
_MAX_LETTERS: Final = 30


@lru_cache(maxsize=4096)
def sounds_of_word(word: str) -> str:
    """The sounds of an English word in small letters; letters of other alphabets have none."""
    if (irregular := WORDS["sounds"]["irregular"].get(word)) is not None:
        return str(irregular)
    word = word[:_MAX_LETTERS]
    word = _LONG.sub(lambda found: _LONG_VOWELS[found[1]] + found[2], word)
    if len(word) > 3 and word[-1] == "e" and word[-2] not in "aeiouy":
        word = word[:-1]
    start = {"y": "j"}.get(word[0], "")
    sounds = start + "".join(_SPELLED.get(found, found) for found in _LETTERS.findall(word[len(start) :]))
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
        self._sentences = list(kept)
        #: For each of them its place among all that were added, and what belongs to it.
        self._found = list(kept.values())
        self._counts = np.array([_counts(sounds) for sounds in kept], np.int8).reshape(-1, len(_CLASSES))

    def nearest(self, words: str) -> tuple[float, T] | None:
        """How far the sentence is that sounds most like ``words``, for each sound of these, and what belongs to it.

        None where none is near, and for digits, which have no sounds here. Of several sentences that are as far, the
        first one that was added is found.
        """
        sounds = sounds_of(words)
        if not MIN_SOUNDS <= len(sounds) <= MAX_SOUNDS or any(map(str.isdigit, words)):
            return None
        limit = _MOST_APART_IN_FEW if len(sounds) < _FEW_SOUNDS else min(_MOST_APART, NEAR * len(sounds))
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
        least = _LEAST * np.abs(self._counts - np.array(_counts(sounds), np.int8)).sum(axis=1)
        places = np.flatnonzero(least <= limit)
        nearest_first = places[np.argsort(least[places], kind="stable")]
        return list(zip(least[nearest_first].tolist(), nearest_first.tolist(), strict=True))


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
        costs = [row[0] + _LOST[sound]]
        for place, heard in enumerate(sounds):
            kin = _KIN if _CLASS[sound] == _CLASS[heard] else _OTHER
            changed = row[place] + (0 if heard == sound else kin)
            costs.append(min(changed, row[place + 1] + _LOST[sound], costs[place] + _LOST[heard]))
        row = costs
        if min(row) > limit:
            return None
    return row[-1] if row[-1] <= limit else None
