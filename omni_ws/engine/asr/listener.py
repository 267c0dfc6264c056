"""Listener: listens for one request; samples in, transcripts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass

from omni_ws.audio.samples import Pcm16, Samples
from omni_ws.core.chunks import Word
from omni_ws.engine.asr.pace import AudioPace
from omni_ws.engine.asr.recogniser import Recognised, Recogniser
from omni_ws.engine.asr.seats import Seat, Seats
from omni_ws.engine.asr.utterance import SAMPLE_RATE
from omni_ws.engine.asr.utterance_splitter import (
    InterimText,
    UtteranceEnded,
    UtteranceEvent,
    UtterancePaused,
    UtteranceResumed,
    UtteranceSplitter,
)
from omni_ws.engine.base import TranscriptGuess, TranscriptOutput
from omni_ws.engine.threads import release_in_thread, run_in_thread
from omni_ws.errors import EngineFailed
from omni_ws.profiler import events


@dataclass(frozen=True, slots=True)
class Listening:
    """What all listeners of an engine share. ``executor`` has a thread for every seat."""

    seats: Seats
    recogniser: Recogniser
    executor: Executor

    async def take_seat(self, holder: str | None) -> Seat:
        """Wait for a seat. Raises EngineOverloaded when there is none; see Seats."""
        seat = await self.seats.take(holder)
        self.recogniser.expect(self.seats.taken)
        return seat


@dataclass(slots=True)
class _Guess:
    """A settled text that is being worked out in case that the pause is the end of the utterance."""

    length: int
    work: Future[Recognised]
    told: bool = False


class Listener:
    """Holds ``seat`` until its input is over, at ``close`` at the latest. ``pace`` has watched since the input began.

    Texts of an utterance after the first begin with a space: put together they are the whole transcript. With
    ``tells_guesses``, what is worked out at a pause is told while the pause lasts.
    """

    def __init__(self, listening: Listening, seat: Seat, pace: AudioPace, *, tells_guesses: bool = False) -> None:
        self._listening = listening
        self._seat = seat
        self._recogniser = listening.recogniser
        self._pace = pace
        #: Whether the audio comes as it is spoken.
        self._live = True
        self._splitter = UtteranceSplitter(self._recogniser.live_text(), self._recogniser.limits)
        self._tells_guesses = tells_guesses
        self._guess: _Guess | None = None
        self._stale: Future[Recognised] | None = None
        #: The utterance up to a pause that lasts, while there is no guess at it.
        self._unguessed: Pcm16 | None = None
        self._separator = ""
        self._showing = False
        self._closed = False

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        """Take the next samples at 16 kHz; yield what changed."""
        self._live = self._pace.is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._splitter.live = self._live and not self._listening.seats.crowded
        self._splitter.feed(samples)
        while self._splitter.ready and (event := await self._advance()) is not None:
            match event:
                case InterimText(text=text, start_ms=start_ms):
                    self._showing = True
                    yield TranscriptOutput(self._separator + text, interim=True, start_ms=start_ms)
                case UtterancePaused(pcm=pcm):
                    self._unguessed = pcm
                case UtteranceResumed():
                    if self._guess is not None and self._guess.told:
                        yield TranscriptGuess("")
                    self._drop_guess()
                case UtteranceEnded():
                    if (transcript := await self._settle(event)) is not None:
                        yield transcript
        self._guess_if_free()
        if self._tells_guesses and (text := self._new_guess()):
            yield TranscriptGuess(self._separator + text)

    def _new_guess(self) -> str:
        """Return the text of the guess, once, when it has been worked out; empty text otherwise."""
        guess = self._guess
        if guess is None or guess.told or not guess.work.done():
            return ""
        if guess.work.cancelled() or guess.work.exception() is not None:  # ``_settle`` raises its error
            return ""
        guess.told = True
        return guess.work.result().text

    def input_over(self) -> None:
        """No more audio comes: somebody else may be listened to. Text that is due is still worked out.

        The seat of a request by itself is kept up to its end: a recording is fed faster than it is written down, and
        whoever sends many would have all of them wait.
        """
        if self._seat.holder is not None:
            self._seat.leave()

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """The audio breaks off; yield the text of the utterance that was under way."""
        with _recognising():
            ended = await run_in_thread(self._listening.executor, self._splitter.end)
        if ended is not None and (transcript := await self._settle(ended)) is not None:
            yield transcript

    async def close(self) -> None:
        """Release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop_guess()
        try:
            with events.span("release"):
                await release_in_thread(self._listening.executor, self._splitter.close)
        finally:
            self._seat.leave()

    async def _advance(self) -> UtteranceEvent | None:
        with _recognising():
            return await run_in_thread(self._listening.executor, self._splitter.advance)

    def _guess_if_free(self) -> None:
        # One outdated guess may still run, for it cannot be stopped; a second one would take a core from others.
        pcm = self._unguessed
        if pcm is not None and self._live and (self._stale is None or self._stale.done()):
            self._drop_guess()
            self._guess = _Guess(len(pcm), self._transcribe(pcm))

    def _transcribe(self, pcm: Pcm16) -> Future[Recognised]:
        return self._recogniser.transcribe(pcm, waited_for=self._live)

    def _drop_guess(self) -> None:
        guess, self._guess, self._unguessed = self._guess, None, None
        if guess is not None and not guess.work.cancel():
            self._stale = guess.work

    async def _settle(self, ended: UtteranceEnded) -> TranscriptOutput | None:
        """Return the settled text; None if nothing was understood and no interim text is to be replaced."""
        guess = self._guess
        if guess is None or guess.length != len(ended.pcm):
            self._drop_guess()
            guess = self._guess = _Guess(len(ended.pcm), self._transcribe(ended.pcm))
        with _recognising():
            recognised = await _result_of(guess.work)
        self._guess = None
        showing, self._showing = self._showing, False
        if not recognised.text:
            return TranscriptOutput("", start_ms=ended.start_ms) if showing else None
        separator, self._separator = self._separator, " "
        words = tuple(
            Word(word.text, ended.start_ms + word.start_ms, ended.start_ms + word.end_ms) for word in recognised.words
        )
        hearing = None if recognised.hearing is None else recognised.hearing.shifted(ended.start_ms)
        return TranscriptOutput(separator + recognised.text, start_ms=ended.start_ms, words=words, hearing=hearing)


async def _result_of(work: Future[Recognised]) -> Recognised:
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineFailed("speech recognition has stopped") from None  # the recogniser has dropped what waited


def _recognising() -> AbstractContextManager[None]:
    return events.span("recogniser", "encoder_start", "encoder_end", modality="audio")
