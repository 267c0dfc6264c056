"""StretchedText: interim texts of a model that reads an utterance from its beginning each time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from omni_ws.audio.samples import Pcm16
from omni_ws.engine.asr.utterance import SAMPLE_RATE, Utterance


class StretchedText:
    """A LiveText. One reading at a time is under way, and none begins while the speaker pauses.

    ``recognise`` writes an utterance down that is still being spoken, for the first time when ``first`` samples of
    speech are there. After a reading of so many seconds, which took so many, ``gap`` tells how many more there must be.
    """

    def __init__(
        self,
        recognise: Callable[[Pcm16], Future[str]],
        clock: Callable[[], float],
        *,
        first: int,
        gap: Callable[[float, float], float],
    ) -> None:
        self._recognise = recognise
        self._clock = clock
        self._first = first
        self._gap = gap
        self._work: Future[str] | None = None
        #: What is done, with the length from which the utterance is read again. Set by another thread, and only for
        #: what is under way: what was left may end at the same time, after what followed it.
        self._done: tuple[Future[str], int] | None = None
        #: Of an utterance that has ended; it may still run.
        self._left: Future[str] | None = None
        #: The length from which the utterance is read; None before the first time.
        self._next: int | None = None
        self._text = ""

    def read(self, utterance: Utterance) -> str:
        if self._done is not None and self._done[0] is self._work:
            self._take(*self._done)
        due = utterance.lead + self._first if self._next is None else self._next
        idle = self._work is None and (self._left is None or self._left.done())
        if idle and not utterance.quiet and utterance.length >= due:
            self._begin(utterance)
        return self._text

    def end(self) -> None:
        work, self._work = self._work, None
        if work is not None and not work.cancel():
            self._left = work
        self._next, self._text = None, ""

    def _begin(self, utterance: Utterance) -> None:
        began, length = self._clock(), utterance.length

        def note(work: Future[str]) -> None:
            if work is not self._work:
                return
            gap = self._gap(length / SAMPLE_RATE, self._clock() - began)
            self._done = work, length + round(gap * SAMPLE_RATE)

        self._work = self._recognise(utterance.pcm())
        self._work.add_done_callback(note)

    def _take(self, work: Future[str], next_length: int) -> None:
        self._work, self._next = None, next_length
        if not work.cancelled() and work.exception() is None:  # the settled text will report a failure
            self._text = work.result()
