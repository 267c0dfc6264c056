"""Which part of a spoken text was heard, by how much of its sound was played."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

from omni_ws.core.chunks import Word
from omni_ws.core.history import UNSPACED

#: Characters that may lie between two words that a voice pronounced: it skips what it cannot pronounce.
MAX_SKIPPED_CHARACTERS: Final = 200
#: Characters a second of a voice whose pace is not known: of scripts with blanks, and of those without.
USUAL_PACE: Final = 12.0
USUAL_PACE_UNSPACED: Final = 4.5

_UNSPACED: Final = re.compile(f"[{UNSPACED}]")


class SpokenSpan(NamedTuple):
    """A piece of a text that is read aloud, from ``start`` to ``end``; ``length`` is how long it is when it is read."""

    start: int
    end: int
    length: int


#: The pieces of a text that a voice reads, in order. Code, addresses and marks may be none.
Read: TypeAlias = Callable[[str], Sequence[SpokenSpan]]


class Clause(NamedTuple):
    """The sound from ``start_ms`` to ``end_ms`` is the text from ``start`` to ``end``."""

    start_ms: float
    end_ms: float
    start: int
    end: int


def read_all(text: str) -> Sequence[SpokenSpan]:
    """The pieces of a text that is read as it is written."""
    return [SpokenSpan(0, len(text), len(text))]


def length_of(text: str, read: Read) -> int:
    """The length of a text as it is read aloud, in characters."""
    return sum(piece.length for piece in read(text))


def usual_pace(text: str) -> float:
    """Characters a second at which an unknown voice reads this text."""
    unspaced = sum(1 for _ in _UNSPACED.finditer(text))
    return USUAL_PACE_UNSPACED if unspaced * 2 > len(text) else USUAL_PACE


def end_of_words(text: str, words: Iterable[Word], *, begin: int = 0) -> int:
    """The index in ``text`` where the last of ``words``, which begin behind ``begin``, ends.

    Words that are not found are skipped.
    """
    lowered, end, exact = _lowered(text), begin, False
    for word in words:
        if word.text_end is not None:
            end, exact = max(end, min(word.text_end, len(text))), True
            continue
        spoken = _lowered(word.text.strip())
        found = lowered.find(spoken, end, end + MAX_SKIPPED_CHARACTERS + len(spoken)) if spoken else -1
        if found >= 0:
            end, exact = found + len(spoken), False
    if not exact and end > begin:
        end = _behind_marks(text, end)
    return end


def end_of_clauses(
    text: str, clauses: Sequence[Clause], heard_ms: float, *, whole: bool, pace: float | None, read: Read
) -> int:
    """The index in ``text`` up to which ``clauses``, which are in order, were heard: by whole words, rounded down.

    ``whole`` says that the last one has all its sound; else it lasts at least as long as its text does at ``pace``,
    in characters a second, None where that is not known.
    """
    end = clauses[0].start if clauses else 0
    for number, clause in enumerate(clauses):
        complete = whole or number < len(clauses) - 1
        if complete and clause.end_ms <= heard_ms:
            end = clause.end
            continue
        if clause.start_ms >= heard_ms:
            break
        piece = text[clause.start : clause.end]
        pieces = read(piece)
        length = sum(one.length for one in pieces)
        lasts = clause.end_ms - clause.start_ms
        if not complete:
            lasts = max(lasts, length * 1000 / (pace or usual_pace(piece)))
        share = min(1.0, (heard_ms - clause.start_ms) / lasts) if lasts > 0 else 1.0
        return clause.start + _whole_words(piece, _index_of(piece, pieces, int(length * share)))
    return end


def audible(part: str) -> str:
    """``part`` without what cannot have been heard: what follows its last word, but for the marks that close it.

    Empty where it has no word at all.
    """
    last = len(part)
    while last and not part[last - 1].isalnum():
        last -= 1
    return part[: _behind_marks(part, last)].rstrip(_OPENING_AT_END).rstrip() if last else ""


#: Brackets and quotation marks that only open: what they open was not heard.
_OPENING_AT_END: Final = "([{<¿¡“‘«„‚「『（【《"


def _index_of(text: str, pieces: Sequence[SpokenSpan], length: int) -> int:
    """Return the index in ``text`` behind the first ``length`` characters that are read aloud."""
    end = 0
    for piece in pieces:
        if length < piece.length:
            # A piece that is read longer or shorter than it is written counts in proportion.
            return piece.start + (piece.end - piece.start) * length // piece.length if length else end
        length -= piece.length
        end = piece.end
    return len(text)


def _whole_words(text: str, index: int) -> int:
    """``index``, or the beginning of the word that it cuts."""
    if index >= len(text):
        return len(text)
    end = index
    while end < len(text) and not text[end].isspace():  # is there anything of the word behind the index?
        if text[end].isalnum():
            break
        end += 1
    else:
        return end
    if _UNSPACED.match(text[index]) or (index and _UNSPACED.match(text[index - 1])):
        return index
    while index and not text[index - 1].isspace() and not _UNSPACED.match(text[index - 1]):
        index -= 1
    return index


def _behind_marks(text: str, end: int) -> int:
    """``end``, or the index behind the marks that follow there at once."""
    while end < len(text) and not text[end].isspace() and not text[end].isalnum():
        end += 1
    return end


def _lowered(text: str) -> str:
    """The text in lower case, character for character: "İ" is the only one whose lower case has another length."""
    return text.replace("İ", "i").lower()
