"""Listening for one request: samples in, transcripts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_ws.audio.samples import Samples
from omni_ws.core.chunks import Word
from omni_ws.engine.base import TranscriptOutput
from omni_ws.engine.embedded.ear import Ear, EarEvent, HearingEnded, HearingResumed, Partial, Paused
from omni_ws.engine.embedded.recogniser import SAMPLE_RATE, RecognisedWord, Recogniser
from omni_ws.engine.embedded.recogniser_pool import Scribes, Seats
from omni_ws.engine.loan_pool import LoanPool
from omni_ws.engine.threads import release_in_thread, run_in_thread
from omni_ws.profiler import events

#: Audio that is this far ahead of the clock comes from a file. More than the jitter of a network, less than it takes to
#: have a first partial text.
AHEAD_MS = 700

#: So much audio at once has waited somewhere, if only for an overloaded machine: no time for partial texts.
BACKLOG_MS = 1500


@dataclass(frozen=True, slots=True)
class Hearing:
    """What all listeners of an engine share. ``executor`` has a thread for every seat, and some more."""

    seats: Seats
    recognisers: LoanPool[Recogniser]
    scribes: Scribes
    executor: Executor

    def take_seat(self) -> None:
        """Raises EngineOverloaded when there is none. Loading for this seat begins before there is speech."""
        self.seats.take()
        if self.recognisers.loaded < self.seats.taken:
            self.executor.submit(self.recognisers.fill, self.seats.taken)


@dataclass(slots=True)
class _Guess:
    """A final text that is being worked out in case that the pause is the end of the utterance."""

    length: int
    work: Future[tuple[RecognisedWord, ...]]


class Listener:
    """Holds a seat from its creation to ``close``; raises EngineOverloaded when there is none.

    Texts of an utterance after the first begin with a space: put together they are the whole transcript.
    """

    def __init__(self, hearing: Hearing, *, clock: Callable[[], float]) -> None:
        hearing.take_seat()
        self._hearing = hearing
        self._clock = clock
        self._ear = Ear(hearing.recognisers)
        self._guess: _Guess | None = None
        self._stale: Future[tuple[RecognisedWord, ...]] | None = None
        self._lead_ms = 0.0
        self._fed_at = clock()
        self._separator = ""
        self._showing = False
        self._closed = False

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput, None]:
        """Takes the next samples at 16 kHz; yields what changed."""
        self._ear.live = self._is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._ear.feed(samples)
        while self._ear.ready and (event := await self._advance()) is not None:
            match event:
                case Partial(text=text, start_ms=start_ms):
                    self._showing = True
                    yield TranscriptOutput(self._separator + text, interim=True, start_ms=start_ms)
                case Paused(pcm=pcm):
                    self._guess_at(pcm)
                case HearingResumed():
                    self._drop_guess()
                case HearingEnded():
                    if (transcript := await self._write_down(event)) is not None:
                        yield transcript

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """The audio breaks off; yields the text of the utterance that was under way."""
        with _recognising():
            ended = await run_in_thread(self._hearing.executor, self._ear.end)
        if ended is not None and (transcript := await self._write_down(ended)) is not None:
            yield transcript

    async def close(self) -> None:
        """Gives back everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop_guess()
        try:
            with events.span("release"):
                await release_in_thread(self._hearing.executor, self._ear.close)
        finally:
            self._hearing.seats.leave()

    async def _advance(self) -> EarEvent | None:
        with _recognising():
            return await run_in_thread(self._hearing.executor, self._ear.advance)

    def _is_live(self, audio_ms: float) -> bool:
        """Whether the audio, ``audio_ms`` more of it included, comes as it is spoken and is dealt with in time."""
        now = self._clock()
        self._lead_ms = max(0.0, self._lead_ms - (now - self._fed_at) * 1000 + audio_ms)
        self._fed_at = now
        return self._lead_ms < AHEAD_MS and audio_ms < BACKLOG_MS

    def _guess_at(self, pcm: NDArray[np.int16]) -> None:
        # One outdated guess may still run, for it cannot be stopped; a second one would take a core from others.
        if self._ear.live and (self._stale is None or self._stale.done()):
            self._drop_guess()
            self._guess = _Guess(len(pcm), self._hearing.scribes.transcribe(pcm))

    def _drop_guess(self) -> None:
        guess, self._guess = self._guess, None
        if guess is not None and not guess.work.cancel():
            self._stale = guess.work

    async def _write_down(self, ended: HearingEnded) -> TranscriptOutput | None:
        """The final text; None where nothing was understood and nothing is being shown that it would replace."""
        guess = self._guess
        if guess is None or guess.length != len(ended.pcm):
            self._drop_guess()
            guess = self._guess = _Guess(len(ended.pcm), self._hearing.scribes.transcribe(ended.pcm))
        with _recognising():
            recognised = await asyncio.wrap_future(guess.work)
        self._guess = None
        showing, self._showing = self._showing, False
        if not recognised:
            return TranscriptOutput("", start_ms=ended.start_ms) if showing else None
        separator, self._separator = self._separator, " "
        text = separator + " ".join(word.text for word in recognised)
        words = tuple(
            Word(word.text, ended.start_ms + word.start_ms, ended.start_ms + word.end_ms) for word in recognised
        )
        return TranscriptOutput(text, start_ms=ended.start_ms, words=words)


def _recognising() -> AbstractContextManager[None]:
    return events.span("recogniser", "encoder_start", "encoder_end", modality="audio")
