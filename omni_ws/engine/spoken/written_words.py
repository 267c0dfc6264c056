"""WrittenWords: finds the written word that a spoken one stands for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from omni_ws.core.chunks import Word
from omni_ws.engine.spoken.speakable_text import Spoken

#: Characters that may lie between two words that a voice pronounced: it skips what it cannot pronounce.
MAX_SKIPPED: Final = 200
#: Characters that are kept for a voice that tells no times of words, or tells them late.
MAX_KEPT: Final = 1 << 14
#: What a word is told without.
_AROUND: Final = "\"'`.,:;!?…()[]{}“”‘’«»。，、：；！？"


class WrittenWords:
    """Turns what a voice has read into what the answer's text has: words with their times, or where a clause ends.

    A written word that is read as several ("$20") lasts from the first to the last of them, and is returned with the
    last. What is read and not written is returned as it is read. Each word returned has its place in the text.
    """

    def __init__(self) -> None:
        #: What the voice has been given, from the piece on that it reads now; and how far it has read in its text.
        self._pieces: deque[Spoken] = deque()
        self._unread = ""
        self._read = 0
        #: Where these begin in all that the voice has been given, and where what stands before them ends in the text.
        self._begin = 0
        self._written = 0
        #: The written word that is being read, and when it began and was last heard.
        self._open: tuple[Spoken, int, int] | None = None

    def add(self, pieces: Iterable[Spoken]) -> None:
        """The voice is given these."""
        for piece in pieces:
            self._pieces.append(piece)
            self._unread += piece.text
        while len(self._unread) > MAX_KEPT:
            self._drop_first()

    def place(self, words: Iterable[Word]) -> tuple[Word, ...]:
        """Return the written words that ``words``, the next ones of the voice, complete."""
        placed: list[Word] = []
        for word in words:
            piece = self._piece_of(word.text.strip().lower())
            if piece is None:
                placed += [*self.rest(), word]
                continue
            if self._open is not None and self._open[0] is not piece:
                placed += self.rest()
            if not piece.written:
                placed.append(Word(word.text, word.start_ms, word.end_ms, piece.end))
                continue
            start_ms = word.start_ms if self._open is None else self._open[1]
            self._open = (piece, start_ms, word.end_ms)
            if not any(map(str.isalnum, self._unread[self._read : len(piece.text)])):
                placed += self.rest()
        return tuple(placed)

    def written_end(self, end: int) -> int:
        """Return where in the text ends what the voice has been given up to ``end``, which never decreases."""
        while self._pieces and self._begin + len(self._pieces[0].text) <= end:
            self._drop_first()
        return self._written

    def rest(self) -> tuple[Word, ...]:
        """Return the word that is being read: the voice has gone on, or ended."""
        if self._open is None:
            return ()
        (piece, start_ms, end_ms), self._open = self._open, None
        return (Word(piece.written.strip(_AROUND) or piece.written, start_ms, end_ms, piece.end),)

    def _piece_of(self, word: str) -> Spoken | None:
        """Return the piece that holds ``word``, the next one that is read; None where it is not found."""
        found = self._unread[self._read : self._read + MAX_SKIPPED + len(word)].lower().find(word) if word else -1
        if found < 0:
            return None
        self._read += found
        while self._read >= len(self._pieces[0].text):
            self._drop_first()
        self._read += len(word)
        return self._pieces[0]

    def _drop_first(self) -> None:
        piece = self._pieces.popleft()
        length = len(piece.text)
        self._begin += length
        self._written = piece.end
        self._unread = self._unread[length:]
        self._read = max(0, self._read - length)
