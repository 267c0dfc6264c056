"""ThoughtFilter: separates what a reasoning model thinks, written into the text of its answer, from what it answers."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

_OPEN: Final = "<think>"
CLOSING_TAG: Final = "</think>"
#: White space before the first word, in characters, that is held back because a thought may follow it.
_MOST_HELD: Final = 64
#: Text that may be a thought without an opening tag, in characters: what is longer is taken for the answer.
_MOST_UNOPENED: Final = 4 * 1024 * 1024


class _Place(Enum):
    """``BEGINNING`` → ``THOUGHT`` → ``GAP`` → ``ANSWER``; without a thought ``BEGINNING`` → ``ANSWER``.

    Where the opening tag may be missing: ``BEGINNING`` → ``UNOPENED`` → ``GAP``, or at the end of the text ``ANSWER``.
    """

    BEGINNING = auto()
    THOUGHT = auto()
    #: What the closing tag makes a thought, if it comes.
    UNOPENED = auto()
    #: Between the thought and the first word of the answer.
    GAP = auto()
    ANSWER = auto()


class ThoughtFilter:
    """Takes ``<think>…</think>`` at the beginning of a text that arrives in pieces, cut anywhere.

    Later in the text the same words are part of the answer. The white space around the thought goes with it. Takes time
    linear in the length of the text; holds back less than a tag, or ``_MOST_HELD``.

    Templates may end with the opening tag, which is then missing. With ``holds`` all is held back until the closing
    tag, or the end. Without it such a tag is taken out where it begins a line, if ``watches``; what stood before it has
    gone out.
    """

    def __init__(self, *, holds: bool = False, watches: bool = False) -> None:
        self.holds = holds
        #: Whether a thought was closed that had not been opened.
        self.unopened = False
        self._watches = watches
        self._place = _Place.BEGINNING
        self._held = ""
        #: What is UNOPENED, and its size.
        self._pieces: list[str] = []
        self._size = 0
        #: The end of the text before, and whether it ends a line, but for blanks.
        self._border = ""
        self._line_ended = True

    @property
    def waits(self) -> bool:
        """Whether it is not certain yet what the text so far is."""
        return self._place is _Place.UNOPENED

    def feed(self, text: str) -> tuple[str, str]:
        """Return what the next piece adds to the thought and to the answer."""
        if self._place is _Place.ANSWER and not self._watches:
            held, self._held = self._held, ""
            return "", held + text
        text, self._held = self._held + text, ""
        thought = ""
        if self._place is _Place.BEGINNING:
            text = self._begin(text)
        if self._place is _Place.ANSWER:
            return "", self._watch(text)
        if self._place is _Place.THOUGHT:
            thought, text = self._think(text)
        elif self._place is _Place.UNOPENED:
            thought, text = self._wait(text)
        if self._place is _Place.GAP:
            text = text.lstrip()
            if text:
                self._place, self._watches = _Place.ANSWER, False
        return thought, text

    def finish(self) -> tuple[str, str]:
        """Return the rest of the thought and of the answer, at the end of the text."""
        held, self._held = self._held, ""
        if self._place is _Place.THOUGHT:
            return held, ""
        self._place = _Place.ANSWER
        return "", self._let_go() + held

    def _begin(self, text: str) -> str:
        bare = text.lstrip()
        if len(text) - len(bare) <= _MOST_HELD:
            if bare.startswith(_OPEN):
                self._place = _Place.THOUGHT
                return bare[len(_OPEN) :]
            if _OPEN.startswith(bare):
                self._held = text
                return ""
        self._place = _Place.UNOPENED if self.holds else _Place.ANSWER
        return text

    def _think(self, text: str) -> tuple[str, str]:
        end = text.find(CLOSING_TAG)
        if end >= 0:
            self._place = _Place.GAP
            return text[:end], text[end + len(CLOSING_TAG) :]
        kept = _tag_begun(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept], ""

    def _wait(self, text: str) -> tuple[str, str]:
        """Hold ``text`` back; the thought, and what follows it, once it is closed."""
        self._pieces.append(text)
        self._size += len(text)
        closed = CLOSING_TAG in self._border + text
        self._border = (self._border + text)[1 - len(CLOSING_TAG) :]
        if self.holds and self._size <= _MOST_UNOPENED and not closed:
            return "", ""
        whole = self._let_go()
        thought, _, answer = whole.partition(CLOSING_TAG)
        if not closed or _OPEN in thought:
            self._place, self._watches = _Place.ANSWER, False
            return "", whole
        self.unopened, self._place = True, _Place.GAP
        return thought, answer

    def _let_go(self) -> str:
        text, self._pieces, self._size = "".join(self._pieces), [], 0
        return text

    def _watch(self, text: str) -> str:
        """The answer; without a closing tag that begins a line, unless an opening one was there before."""
        if not self._watches or _OPEN in self._border + text:
            self._watches = False
            return text
        place = text.find(CLOSING_TAG)
        if place >= 0:
            self._watches = False
            if self._ends_line(text[:place]):
                behind = text[place + len(CLOSING_TAG) :].lstrip()
                self.unopened, self._place = True, _Place.ANSWER if behind else _Place.GAP
                return text[:place] + behind
            return text
        kept = _tag_begun(text)
        if kept and self._ends_line(text[:-kept]):
            text, self._held = text[:-kept], text[-kept:]
        self._line_ended = self._ends_line(text)
        self._border = (self._border + text)[1 - len(_OPEN) :]
        return text

    def _ends_line(self, text: str) -> bool:
        bare = text.rstrip(" \t")
        return bare.endswith("\n") if bare else self._line_ended


def _tag_begun(text: str) -> int:
    """How many characters at the end of ``text`` may begin a closing tag."""
    return next(size for size in range(len(CLOSING_TAG) - 1, -1, -1) if text.endswith(CLOSING_TAG[:size]))
