"""HibariReader: turns a text into the phonemes that hibari's network speaks, and keeps where each word is in them."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from importlib import resources
from typing import Final, NamedTuple

from omni_ws.engine.tts.hibari_dictionaries import hibari_g2p

#: Phonemes that the network speaks at once: some 13 s, which bounds the memory for them.
MAX_PHONEMES: Final = 200
#: The package reads no more letters than this of a word that it does not know.
_MAX_LETTERS: Final = 24
#: The digits of a longer number are read one by one: it is no quantity, and the package breaks on the longest.
_MAX_DIGITS: Final = 15
_MAX_WORD: Final = 48
_LONG_LETTERS: Final = re.compile(rf"[^\W\d_]{{{_MAX_LETTERS + 1},}}")
_LONG_DIGITS: Final = re.compile(rf"\d{{{_MAX_DIGITS + 1},}}")
_REPEATED_MARKS: Final = re.compile(r"([^\w\s])\1{3,}")
#: Brackets mean phonemes to the package.
_BRACKETS: Final = str.maketrans("[]{}’‘", "()()''")
#: The beginning and the end of a text are silent phonemes.
_SILENCE: Final = 0
_MARKS: Final = frozenset(';:,.!?—…"“”() ')
_PAUSES: Final = frozenset(";:,.!?—…")
#: What a word is told without.
_AROUND: Final = "\"'`.,:;!?…()[]{}“”‘’«»–—"


class ReadWord(NamedTuple):
    """A word as it is written; ``first`` and ``last`` are the places of its phonemes."""

    text: str
    first: int
    last: int


class ReadPiece(NamedTuple):
    """Phonemes by their numbers, and the words in them."""

    ids: list[int]
    words: list[ReadWord]


class _Word(NamedTuple):
    """``written`` is "" where the word before goes on, and None where nothing is written for it."""

    written: str | None
    ids: list[int]
    sounds: list[int]
    pauses: bool


class HibariReader:
    """Uses the rules and the dictionary of the package hibari-tts."""

    def __init__(self, *, british: bool = False) -> None:
        from hibari.g2p.normalize import normalize

        self._g2p = hibari_g2p(british=british)
        self._normalize = normalize
        vocabulary = (resources.files("hibari") / "assets" / "vocab.json").read_text(encoding="utf-8")
        self._ids: dict[str, int] = json.loads(vocabulary)

    def pieces(self, text: str) -> Iterator[ReadPiece]:
        """Yield ``text`` in pieces of MAX_PHONEMES or one word, nothing where nothing in it can be spoken."""
        written, plain = _plain_words(text)
        # It joins what marks part.
        normal = [part for word in self._normalize(" ".join(plain)).split() for part in _parts(word, _MAX_WORD)]
        words, silent = list[_Word](), ""
        for told, phonemes in zip(_told_as(written, plain, normal), self._pronounced(normal), strict=True):
            word = self._word(silent if told == "" and silent else told, phonemes)
            silent = "" if word.sounds else word.written or ""
            if word.ids:
                words.append(word)
        for piece in _cut(words):
            if any(word.sounds for word in piece):
                yield self._joined(piece)

    def _pronounced(self, words: Sequence[str]) -> list[str]:
        """Return the phonemes of each word."""
        try:
            return self._phonemes(words)
        except Exception:
            # The package breaks on some that are no words. It has to meet each alone to leave out those only.
            return [self._alone(word) for word in words]

    def _alone(self, word: str) -> str:
        try:
            return self._phonemes([word])[0]
        except Exception:
            return ""

    def _phonemes(self, words: Sequence[str]) -> list[str]:
        """Raises what the package raises, and ValueError where it makes other words of these."""
        spoken, current = [], ""
        for token in self._g2p.phonemize_tokens(self._g2p.tokenize(" ".join(words))):
            current += token.phonemes or ""
            if token.whitespace:
                spoken.append(current.strip())
                current = ""
        if words:
            spoken.append(current.strip())
        if len(spoken) != len(words):
            raise ValueError(f"{len(words)} words are read as {len(spoken)}")
        return spoken

    def _word(self, written: str | None, phonemes: str) -> _Word:
        known = [phoneme for phoneme in phonemes if phoneme in self._ids]
        sounds = [place for place, phoneme in enumerate(known) if phoneme not in _MARKS]
        ids = [self._ids[phoneme] for phoneme in known]
        return _Word(written, ids, sounds, bool(known) and known[-1] in _PAUSES)

    def _joined(self, words: Sequence[_Word]) -> ReadPiece:
        ids, placed = [_SILENCE], list[ReadWord]()
        for word in words:
            if len(ids) > 1:
                ids.append(self._ids[" "])
            if word.sounds:
                first, last = len(ids) + word.sounds[0], len(ids) + word.sounds[-1]
                if word.written == "" and placed:
                    placed[-1] = placed[-1]._replace(last=last)
                elif word.written and (text := word.written.strip(_AROUND)):
                    placed.append(ReadWord(text, first, last))
            ids += word.ids
        return ReadPiece([*ids, _SILENCE], placed)


def _plain_words(text: str) -> tuple[list[str], list[str]]:
    """Return the words as they are written and as the package is to read them.

    One that is cut up has its whole written form at its first part, and "" at the others.
    """
    written, plain = [], []
    for word in text.split():
        parts = _plain(word).split()
        written += [word, *([""] * (len(parts) - 1))][: len(parts)]
        plain += parts
    return written, plain


def _plain(word: str) -> str:
    """Return ``word`` without what takes the package long, or breaks it."""
    word = "".join(filter(str.isprintable, unicodedata.normalize("NFC", word))).translate(_BRACKETS)
    word = _REPEATED_MARKS.sub(r"\1\1\1", word)
    word = _LONG_DIGITS.sub(lambda found: " ".join(found[0]), word)
    word = _LONG_LETTERS.sub(lambda found: " ".join(_parts(found[0], _MAX_LETTERS)), word)
    return " ".join(" ".join(_parts(part, _MAX_WORD)) for part in word.split())


def _parts(word: str, length: int) -> list[str]:
    return [word[start : start + length] for start in range(0, len(word), length)]


def _told_as(written: Sequence[str], plain: Sequence[str], normal: Sequence[str]) -> list[str | None]:
    """Return for each word of ``normal``, which ``plain`` became, what is written for it."""
    if plain == normal:
        return list(written)
    told: list[str | None] = [None] * len(normal)
    for kind, start, end, first, last in SequenceMatcher(None, plain, normal, autojunk=False).get_opcodes():
        if kind == "equal":
            told[first:last] = written[start:end]
        elif kind == "replace":
            # "7:30" is read as "seven thirty": which of several words is which is not known.
            told[first:last] = [" ".join(filter(None, written[start:end])), *([""] * (last - first - 1))]
    return told


def _cut(words: Sequence[_Word]) -> Iterator[Sequence[_Word]]:
    """Cut at pauses, where there are any, into pieces that the network can speak."""
    begin, pause, length = 0, 0, 0
    for place, word in enumerate(words):
        if length + len(word.ids) > MAX_PHONEMES and place > begin:
            end = pause if pause > begin else place
            yield words[begin:end]
            begin, length = end, sum(len(before.ids) + 1 for before in words[end:place])
        length += len(word.ids) + 1
        if word.pauses:
            pause = place + 1
    if words[begin:]:
        yield words[begin:]
