"""TurnWords: what a recogniser tells of the words of the current turn, for turn detection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from omni_ws.audio.speech_watch import PauseWords, Unfinished
from omni_ws.core.chunks import other_readings
from omni_ws.engine.base import EngineCapabilities, TranscriptGuess, TranscriptOutput
from omni_ws.service.conversation.unfinished import READ, dictates, goes_on, how_unfinished

#: So many interim transcripts without a new word, over so long, say that no words come any more.
_STALE_INTERIMS: Final = 3
_STALE_SEC: Final = 3.0
#: A turn of so long in which the recogniser has found no word is none that typed text waits for.
_WORDLESS_SEC: Final = 2.0


class TurnWords(PauseWords):
    """The words of the current turn as the recogniser tells them, for turn detection.

    ``able`` returns what the engine can do, ``heard`` whether it has the request of the turn, and ``asked`` what the
    assistant has said last. ``on_told`` is called each time that words are told. ``now`` is the clock. Changed on the
    event loop; other threads read.
    """

    def __init__(
        self,
        able: Callable[[], EngineCapabilities],
        *,
        heard: Callable[[], bool] = lambda: True,
        asked: Callable[[], str] = str,
        on_told: Callable[[], None] = lambda: None,
        now: Callable[[], float] = lambda: asyncio.get_running_loop().time(),
    ) -> None:
        self._able = able
        self._heard = heard
        self._asked = asked
        self._on_told = on_told
        self._now = now
        self._settled = ""
        #: When the turn began, and whether the recogniser has read it and has found a word.
        self._began_at = 0.0
        self._has_word: bool | None = None
        #: The most words of an interim transcript, when it first had them, and how many were no longer since then.
        self._most_words = 0
        self._news_at = 0.0
        self._without_news = 0

    @property
    def expected(self) -> bool:
        """See ``PauseWords``; called by other threads."""
        return self._heard() and self._able().transcript_guesses

    def begin(self) -> None:
        """Forget the words: another turn begins."""
        now = self._now()
        self._settled, self.in_groups = "", False
        self._began_at, self._has_word = now, None
        self._expect_news(now)

    def wordless(self) -> bool:
        """Return whether the recogniser has found no word in the turn, which has lasted for a while."""
        return self._has_word is False and self._now() - self._began_at >= _WORDLESS_SEC

    def hear(self, words: TranscriptOutput | TranscriptGuess, *, language: str | None) -> None:
        """Take what the recogniser tells; ``language`` is that of the words, if it is known."""
        now, text = self._now(), words.text
        if isinstance(words, TranscriptOutput) and words.interim:
            self._take_interim(len(text.split()), now)
        elif text.strip():  # otherwise a guess is withdrawn
            languages = self._able().languages
            code = language or (next(iter(languages)) if len(languages) == 1 else "")
            said = f"{self._settled} {text}"[-READ:]
            asked = self._asked()
            open_ = any(goes_on(other, code) for other in other_readings(words.hearing))
            # At once: another thread may look between two steps.
            self.unfinished = Unfinished.YES if open_ else how_unfinished(said, code, asked=asked)
            self.in_groups = self.in_groups or dictates(said, code, asked=asked)
            self._has_word = True
            if isinstance(words, TranscriptOutput):
                self._settled = said
                self._expect_news(now)
            self.told += 1  # last, as other threads look at this first
            self._on_told()

    def _take_interim(self, words: int, now: float) -> None:
        self._has_word = self._has_word or words > 0
        if words > self._most_words:
            self._expect_news(now)
            self._most_words = words
            return
        self._without_news += 1
        self.stalled = self._without_news >= _STALE_INTERIMS and now - self._news_at >= _STALE_SEC

    def _expect_news(self, now: float) -> None:
        self._most_words, self._news_at, self._without_news, self.stalled = 0, now, 0, False
