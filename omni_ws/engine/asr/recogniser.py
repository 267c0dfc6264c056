"""Recogniser, the interface of speech recognisers (utterances in, words out), and the classes that they share."""

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
    """The maximum length of an utterance, in samples.

    An utterance longer than ``cut_after`` is cut at the next window of 32 ms that is probably not speech, and at
    ``longest`` at the latest.
    """

    cut_after: int
    longest: int


@dataclass(slots=True)
class Utterance:
    """A stretch of speech between two silences; it grows while the user speaks.

    ``start_sample`` is its position in the audio of the request.
    """

    start_sample: int
    #: The number of samples before the speech itself.
    lead: int = 0
    length: int = 0
    #: Whether the speaker is pausing now.
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
    """The transcript of an utterance: ``text`` is "" if no words were recognised; times count from the first sample."""

    text: str = ""
    words: tuple[Word, ...] = ()
    hearing: Hearing | None = None


class LiveText(Protocol):
    """A source of interim texts of one request's utterances while they are spoken. Used by one thread at a time."""

    #: How many interim texts were made so far, equal ones included; 0 if that is not known.
    readings: int

    def read(self, utterance: Utterance) -> str | None:
        """Return the preliminary text of ``utterance``, which has grown since the last call. May block.

        Returns None if there is no text yet; the caller tries again when the utterance has grown.
        """
        ...

    def end(self) -> None:
        """Release the resources of the current utterance; another utterance may follow. Idempotent."""
        ...


class Transcriber(Protocol):
    """A recogniser's interface for the utterances of one request. Used on the event loop."""

    limits: UtteranceLimits
    #: Whether to transcribe an utterance at each pause that may be its end: the transcript is ready sooner, but the
    #: work is wasted if the speaker goes on.
    speculates: bool

    def live_text(self) -> LiveText:
        """Return a LiveText for the interim texts of the request."""
        ...

    def transcribe(
        self,
        pcm: Pcm16,
        *,
        waited_for: bool,
        tell: Callable[[str], None],
        tell_untimed: Callable[[Recognised], None],
    ) -> Future[Recognised] | asyncio.Task[Recognised]:
        """Start to transcribe a whole utterance. Equal samples give equal words.

        ``waited_for`` is True for live speech, whose speaker waits for an answer; a recording can wait. ``tell`` is
        called on the event loop with the text so far; ``tell_untimed``, perhaps in another thread, with the whole
        result as soon as only the times of its words are missing. A Future can be cancelled until a thread has begun
        the work, a Task at any time.
        """
        ...


class Recogniser(Protocol):
    """A speech recogniser, which serves any number of requests.

    Complete utterances take precedence over those that are still being spoken.
    """

    name: str
    #: The name of the model; final once started.
    model: str
    #: The names of the other machines that receive the audio.
    hosts: tuple[str, ...]
    #: Limits how many requests are listened to at the same time.
    slots: ListenerSlots

    @property
    def state(self) -> EngineState:
        """The state of the model, after the start."""
        ...

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities, see ``asr_capabilities``; final after the start."""
        ...

    def describe(self) -> tuple[str, ...]:
        """Return lines that describe the recogniser to the operator."""
        ...

    async def start(self) -> None:
        """Load the model. Raises EngineFailed if recognition cannot work."""
        ...

    async def stop(self) -> None:
        """Drop the waiting utterances, and release everything. Idempotent."""
        ...

    def transcriber(self, request: GenerationRequest) -> Transcriber:
        """Return a Transcriber for the utterances of ``request``."""
        ...


def asr_capabilities(
    *,
    sampling: Iterable[str],
    sampling_no_ops: Iterable[str] = (),
    languages: Iterable[str],
    word_times: bool,
    keywords: bool = False,
    transcript_guesses: bool = False,
) -> EngineCapabilities:
    """Return the capabilities of an engine that transcribes speech as it arrives."""
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
        transcript_guesses=transcript_guesses,
    )


# Interim texts.


class _Reading:
    """A running call of ``recognise`` for the interim text of an utterance.

    When the call is done, its thread calls ``length`` and stores the result in ``next``: the length of the utterance,
    in samples, at which the next call is due. Until then ``next`` is None.
    """

    def __init__(self, work: Future[str], length: Callable[[], int]) -> None:
        self.work = work
        self.next: int | None = None
        self._length = length
        work.add_done_callback(self._note)

    def _note(self, _: Future[str]) -> None:
        self.next = self._length()


class StretchedText:
    """A LiveText for models that have to process an utterance from its beginning each time.

    Only one call of ``recognise`` runs at a time, and none begins while the speaker pauses.

    ``recognise`` starts to transcribe the utterance so far; the first call comes after ``first`` samples of speech.
    ``gap`` gets the length of the audio of a call and the duration of that call, both in seconds, and returns by how
    many seconds the utterance must grow before the next call.
    """

    def __init__(
        self,
        recognise: Callable[[Pcm16], Future[str]],
        clock: Callable[[], float],
        *,
        first: int,
        gap: Callable[[float, float], float],
    ) -> None:
        self.readings = 0
        self._recognise = recognise
        self._clock = clock
        self._first = first
        self._gap = gap
        self._reading: _Reading | None = None
        #: A call for an utterance that has ended; the call may still run.
        self._left: Future[str] | None = None
        #: The length from which the next call is due; None before the first call.
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
        if not work.cancelled() and work.exception() is None:  # the final text will report a failure
            self._text = work.result()
            self.readings += 1


# Slots: how many requests may be listened to simultaneously.

RETRY_AFTER_MS: Final = 1000
#: How long a request waits for a slot before it is refused: its speaker waits for an answer.
MAX_WAIT_SEC: Final = 2.0

#: Returns how many speakers the machine can serve now, with interim texts (True) or without (False).
Carried: TypeAlias = Callable[[bool], int]


class ListenerSlots:
    """A limit on the requests whose speech is recognised simultaneously: ``most``, or what the machine can serve now.

    ``carried`` returns how many speakers the machine can serve, with interim texts or without. While more requests hold
    slots than can be served with interim texts, the slots are *crowded*, and no interim texts are made.

    The requests of one ``holder``, such as a session, share a slot: a speaker may go on while the previous turn is
    still being transcribed. Slots are given in the order in which they were requested.
    """

    def __init__(self, most: int, carried: Carried | None = None) -> None:
        self.taken = 0
        self._most = most
        self._carried = carried
        #: The number of requests that share a slot, by holder.
        self._shared: dict[str, int] = {}
        self._waiting: deque[tuple[str | None, asyncio.Future[None]]] = deque()

    @property
    def count(self) -> int:
        """The number of slots: how many speakers the machine can serve without interim texts, at most ``most``."""
        return self._most if self._carried is None else min(self._most, self._carried(False))

    @property
    def crowded(self) -> bool:
        """Whether the machine cannot serve interim texts to all requests that hold a slot."""
        return self._carried is not None and self.taken > self._carried(True)

    async def take(self, holder: str | None = None, *, may_wait: Callable[[], bool] = lambda: False) -> None:
        """Take a slot, or a share of the slot that ``holder`` has.

        Raises EngineOverloaded if no slot becomes free within MAX_WAIT_SEC. While ``may_wait`` returns True, the call
        waits on instead: the speaker expects no answer, but the words are still wanted.
        """
        if not self._shares(holder) and (self._waiting or self.taken >= self.count):
            await self._wait(holder, may_wait)
        else:
            self._grant(holder)

    def leave(self, holder: str | None = None) -> None:
        """Return a slot, or a share of the slot of ``holder``. Call it once for each ``take``."""
        if holder is not None:
            self._shared[holder] -= 1
            if self._shared[holder]:
                return
            del self._shared[holder]
        self.taken -= 1
        while self._waiting and self.taken < self.count:
            self._admit(self._waiting[0][0])

    async def _wait(self, holder: str | None, may_wait: Callable[[], bool]) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (holder, admitted)
        self._waiting.append(waiter)
        try:
            while not (await asyncio.wait([admitted], timeout=MAX_WAIT_SEC))[0]:
                if not may_wait():
                    raise TimeoutError
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
        """Give a slot to the request that has waited longest, shared with all waiting requests of its ``holder``.

        ``holder`` is None for a request that shares no slot.
        """
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
