"""The contract between listening and recognition: utterances in, words out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from omni_ws.audio.pcm import Pcm16
from omni_ws.core.chunks import Hearing, Word

#: The sample rate of all audio for recognisers, in Hz.
SAMPLE_RATE: Final = 16_000


@dataclass(frozen=True, slots=True)
class UtteranceLimits:
    """How long an utterance may get, in samples.

    It is cut at the first weak window after ``cut_after``, and in any case at ``longest``.
    """

    cut_after: int
    longest: int


@dataclass(slots=True)
class Utterance:
    """Speech between two silences, which grows while it is spoken.

    ``start_sample`` is its place in the audio of the request.
    """

    start_sample: int
    #: The samples before the speech itself.
    lead: int = 0
    length: int = 0
    #: Whether the speaker pauses just now.
    quiet: bool = False
    _blocks: list[Pcm16] = field(default_factory=list)

    @property
    def start_ms(self) -> int:
        return self.start_sample * 1000 // SAMPLE_RATE

    def append(self, block: Pcm16) -> None:
        self._blocks.append(block)
        self.length += len(block)

    def pcm(self, start: int = 0, end: int | None = None) -> Pcm16:
        """Return the samples from ``start`` to ``end``, counted from the beginning of the utterance."""
        whole = np.concatenate(self._blocks)
        self._blocks = [whole]
        return whole[start:end]


@dataclass(frozen=True, slots=True)
class Recognised:
    """What was understood of an utterance; ``text`` is empty if nothing was. Times count from its first sample."""

    text: str = ""
    words: tuple[Word, ...] = ()
    hearing: Hearing | None = None


class LiveText(Protocol):
    """Reads the utterances of one request while they are spoken. Used by one thread at a time."""

    def read(self, utterance: Utterance) -> str | None:
        """Return what ``utterance``, which has grown, seems to say so far; later audio may change it. May block.

        None if it cannot be read yet; it is offered again as soon as it has grown.
        """
        ...

    def end(self) -> None:
        """Release what was held for the utterance; the next one may follow. Idempotent."""
        ...


class Recogniser(Protocol):
    """Writes utterances down for any number of requests.

    Its own threads do the work: what has been spoken to its end goes before what is still being spoken.
    """

    limits: UtteranceLimits

    def start(self) -> None:
        """Load the model. Blocks; raises EngineFailed where recognition cannot work."""
        ...

    def close(self) -> None:
        """Wait for the utterances under way, drop the waiting ones, and free all. Blocks. Idempotent."""
        ...

    def expect(self, talkers: int) -> None:
        """Prepare for so many requests with speech at the same time. Does not block."""
        ...

    def live_text(self) -> LiveText:
        """Return the reader for a new request."""
        ...

    def transcribe(self, pcm: Pcm16, *, waited_for: bool = True) -> Future[Recognised]:
        """Write a whole utterance down; equal samples give equal words.

        ``waited_for``: a speaker waits for the words, as opposed to whoever sends a recording. Cancelling works until
        the work has begun; after that, the result may be ignored.
        """
        ...


# Interim texts.


@dataclass(slots=True)
class _Reading:
    """A reading under way. Once it is done, another thread sets ``next``: from which length the next one is."""

    work: Future[str]
    next: int | None = None


class StretchedText:
    """A LiveText of a model that reads an utterance from its beginning each time.

    One reading at a time is under way, and none begins while the speaker pauses.

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
