"""The contract between listening and recognition: utterances in, words out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeAlias

import numpy as np

from omni_ws.audio.pcm import Pcm16
from omni_ws.core.chunks import Hearing, Modality, OutputModality, Task, Word
from omni_ws.engine.base import EngineCapabilities, EngineState, GenerationRequest
from omni_ws.errors import EngineOverloaded

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


class Transcriber(Protocol):
    """Writes the utterances of one request down; used on the event loop."""

    limits: UtteranceLimits
    #: Whether an utterance is written down at each pause that may be its end: it is there sooner, or made in vain.
    speculates: bool

    def live_text(self) -> LiveText:
        """Return what reads utterances while they are spoken."""
        ...

    def transcribe(
        self, pcm: Pcm16, *, waited_for: bool, tell: Callable[[str], None]
    ) -> Future[Recognised] | asyncio.Task[Recognised]:
        """Write a whole utterance down; equal samples give equal words.

        ``waited_for``: a speaker waits for the words; a recording can wait. ``tell`` is called on the event loop with
        the words so far. Cancelling a Future works until a thread has begun; after that, the result
        may be ignored. A Task is withdrawn by it.
        """
        ...


class Recogniser(Protocol):
    """What writes speech down for any number of requests, and what is known of it.

    What has been spoken to its end goes before what is still being spoken.
    """

    name: str
    #: The name of the model; final once started.
    model: str
    #: The names of the other machines that do the work.
    hosts: tuple[str, ...]
    #: How many requests may be listened to at once.
    slots: ListenerSlots

    @property
    def state(self) -> EngineState:
        """The state of the model, once started."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities:
        """See ``asr_capabilities``; final once started."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines for the operator."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineFailed where recognition cannot work."""
        ...

    async def stop(self) -> None:
        """Drop the utterances that wait, and free all. Idempotent."""
        ...

    def transcriber(self, request: GenerationRequest) -> Transcriber:
        """Return what writes the utterances of ``request`` down."""
        ...


def asr_capabilities(
    *,
    sampling: Iterable[str],
    sampling_no_ops: Iterable[str] = (),
    languages: Iterable[str],
    word_times: bool,
    keywords: bool = False,
) -> EngineCapabilities:
    """Return the capabilities of an engine that writes speech down as it arrives."""
    return EngineCapabilities(
        input_modalities=frozenset({Modality.AUDIO}),
        output_modalities=frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT}),
        tasks=frozenset({Task.TRANSCRIBE}),
        extend=True,
        sampling=frozenset(sampling),
        sampling_no_ops=frozenset(sampling_no_ops),
        languages=frozenset(languages),
        word_times=word_times,
        keywords=keywords,
    )


# Interim texts.


class _Reading:
    """A reading under way.

    ``next`` is None until it is done: then another thread asks ``length`` for the utterance's length at the next one.
    """

    def __init__(self, work: Future[str], length: Callable[[], int]) -> None:
        self.work = work
        self.next: int | None = None
        self._length = length
        work.add_done_callback(self._note)

    def _note(self, _: Future[str]) -> None:
        self.next = self._length()


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

        def next_length() -> int:
            gap = self._gap(length / SAMPLE_RATE, self._clock() - began)
            return length + round(gap * SAMPLE_RATE)

        self._reading = _Reading(self._recognise(utterance.pcm()), next_length)

    def _take(self, work: Future[str], next_length: int) -> None:
        self._reading, self._next = None, next_length
        if not work.cancelled() and work.exception() is None:  # the settled text will report a failure
            self._text = work.result()


# Slots: how many requests may be listened to at once.

RETRY_AFTER_MS: Final = 1000
#: How long a request waits for a slot. Longer, and it is refused: its speaker waits for an answer.
MAX_WAIT_SEC: Final = 2.0

#: How many talkers are carried just now, with interim texts or without.
Carried: TypeAlias = Callable[[bool], int]


class ListenerSlots:
    """Limits how many requests are listened to at once: to ``most``, and to what the machine carries just now.

    ``carried`` tells that number, with interim texts or without. While more requests are listened to than it carries
    with interim texts, the slots are *crowded*: then there are no such texts.

    Requests of one ``holder`` share a slot, such as those of a session whose speaker goes on while the turn before is
    still being written down. Slots are given in the order in which they were asked for.
    """

    def __init__(self, most: int, carried: Carried | None = None) -> None:
        self.taken = 0
        self._most = most
        self._carried = carried
        #: Requests on the slots that have a holder, by holder.
        self._shared: dict[str, int] = {}
        self._waiting: deque[tuple[str | None, asyncio.Future[None]]] = deque()

    @property
    def count(self) -> int:
        """How many there are without interim texts."""
        return self._most if self._carried is None else min(self._most, self._carried(False))

    @property
    def crowded(self) -> bool:
        """Whether interim texts would be too much."""
        return self._carried is not None and self.taken > self._carried(True)

    async def take(self, holder: str | None = None) -> None:
        """Wait for a slot, MAX_WAIT_SEC at most. Raises EngineOverloaded when there is none by then."""
        if not self._shares(holder) and (self._waiting or self.taken >= self.count):
            await self._wait(holder)
        else:
            self._grant(holder)

    def leave(self, holder: str | None = None) -> None:
        """Give back the slot of one request of ``holder``, once for each ``take``."""
        if holder is not None:
            self._shared[holder] -= 1
            if self._shared[holder]:
                return
            del self._shared[holder]
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self._admit(self._waiting[0][0])

    async def _wait(self, holder: str | None) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (holder, admitted)
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(MAX_WAIT_SEC):
                await admitted
        except BaseException as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif admitted.done() and not admitted.cancelled():
                self.leave(holder)  # it was given in the same moment
            if isinstance(error, TimeoutError):
                refusal = f"all {self.count} recognisers are in use"
                raise EngineOverloaded(refusal, retry_after_ms=RETRY_AFTER_MS) from None
            raise

    def _admit(self, holder: str | None) -> None:
        """Give a slot to the one who has waited longest, and to all who share it."""
        first = self._waiting.popleft()
        others = [one for one in self._waiting if holder is not None and one[0] == holder]
        for waiter in (first, *others):
            if waiter is not first:
                self._waiting.remove(waiter)
            self._grant(holder)
            if not waiter[1].done():
                waiter[1].set_result(None)
            else:
                self.leave(holder)  # cancelled, and about to say so

    def _shares(self, holder: str | None) -> bool:
        return holder is not None and holder in self._shared

    def _grant(self, holder: str | None) -> None:
        self.taken += not self._shares(holder)
        if holder is not None:
            self._shared[holder] = self._shared.get(holder, 0) + 1
