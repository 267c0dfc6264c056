"""StretchedText: interim texts of a model that reads an utterance from its beginning each time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from omni_ws.audio.samples import Pcm16
from omni_ws.engine.asr.utterance import SAMPLE_RATE, Utterance


@dataclass(slots=True)
class _Reading:
    """A reading under way. Once it is done, another thread sets ``next``: from which length the next one is."""

    work: Future[str]
    next: int | None = None


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
        self._reading: _Reading | None = None
        #: Of an utterance that has ended; it may still run.
        self._left: Future[str] | None = None
        #: The length from which the utterance is read; None before the first time.
        self._next: int | None = None
        self._text = ""

    def read(self, utterance: Utterance) -> str:
        if self._reading is not None and self._reading.next is not None:
            self._take(self._reading.work, self._reading.next)
        due = utterance.lead + self._first if self._next is None else self._next
        idle = self._reading is None and (self._left is None or self._left.done())
        if idle and not utterance.quiet and utterance.length >= due:
            self._begin(utterance)
        return self._text

    def end(self) -> None:
        reading, self._reading = self._reading, None
        if reading is not None and not reading.work.cancel():
            self._left = reading.work
        self._next, self._text = None, ""

    def _begin(self, utterance: Utterance) -> None:
        began, length = self._clock(), utterance.length

        def note(_: Future[str]) -> None:
            gap = self._gap(length / SAMPLE_RATE, self._clock() - began)
            reading.next = length + round(gap * SAMPLE_RATE)

        reading = self._reading = _Reading(self._recognise(utterance.pcm()))
        reading.work.add_done_callback(note)

    def _take(self, work: Future[str], next_length: int) -> None:
        self._reading, self._next = None, next_length
        if not work.cancelled() and work.exception() is None:  # the settled text will report a failure
            self._text = work.result()
