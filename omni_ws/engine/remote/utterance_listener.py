"""UtteranceListener: listens for one request; samples in, transcripts of an upstream out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Final

from omni_ws.audio.pcm import Pcm16, Samples
from omni_ws.core.chunks import Word
from omni_ws.engine.asr.listener import (
    AudioPace,
    UtteranceEnded,
    UtterancePaused,
    UtteranceResumed,
    UtteranceSplitter,
)
from omni_ws.engine.asr.recogniser import SAMPLE_RATE, Utterance, UtteranceLimits
from omni_ws.engine.base import TranscriptGuess, TranscriptOutput
from omni_ws.engine.remote.transcript_task import TranscriptTask
from omni_ws.engine.remote.transcription import TranscriptText
from omni_ws.engine.threads import release_in_thread, run_in_thread

#: What most models read at once is half a minute.
_LIMITS: Final = UtteranceLimits(cut_after=24 * SAMPLE_RATE, longest=29 * SAMPLE_RATE)


class UtteranceListener:
    """Cuts audio into utterances, and has each written down by ``transcribe``.

    With ``speculates``, that begins at each pause of live audio that may be the end of the utterance, and with
    ``tells_guesses`` what comes of it is told while the pause lasts. Texts of an utterance after the first begin with a
    space: put together they are the whole transcript.
    """

    def __init__(
        self,
        transcribe: Callable[[Pcm16], AsyncGenerator[TranscriptText, None]],
        *,
        executor: Executor,
        clock: Callable[[], float],
        speculates: bool,
        tells_guesses: bool = False,
    ) -> None:
        #: The length of the audio so far, in samples.
        self.samples = 0
        self._transcribe = transcribe
        self._executor = executor
        self._pace = AudioPace(clock)
        self._speculates = speculates
        self._tells_guesses = tells_guesses
        self._splitter = UtteranceSplitter(_NotLive(), _LIMITS)
        self._task: TranscriptTask | None = None
        #: Whether a guess was told from ``_task``.
        self._guess_told = False
        self._separator = ""

    async def hear(self, samples: Samples) -> AsyncGenerator[TranscriptOutput | TranscriptGuess, None]:
        """Take the next samples at 16 kHz; yield what changed."""
        self.samples += len(samples)
        is_live = self._pace.is_live(len(samples) * 1000 / SAMPLE_RATE)
        self._splitter.feed(samples)
        while self._splitter.ready:
            event = await run_in_thread(self._executor, self._splitter.advance)
            match event:
                case UtterancePaused(pcm=pcm) if self._speculates and is_live:
                    await self._begin(pcm)
                case UtteranceResumed():
                    if self._guess_told:
                        yield TranscriptGuess("")
                    await self._withdraw()
                case UtteranceEnded():
                    async with aclosing(self._settle(event)) as transcripts:
                        async for transcript in transcripts:
                            yield transcript
        if self._tells_guesses and (text := self._new_guess()):
            yield TranscriptGuess(self._separator + text)

    def _new_guess(self) -> str:
        """Return what was made of a pause, once, when it is settled; empty text otherwise."""
        settled = None if self._task is None else self._task.settled
        if settled is None or self._guess_told:
            return ""
        self._guess_told = bool(settled.recognised.text)
        return settled.recognised.text

    async def end_part(self) -> AsyncGenerator[TranscriptOutput, None]:
        """The audio breaks off; yield the transcript of the utterance that was under way."""
        ended = await run_in_thread(self._executor, self._splitter.end)
        if ended is not None:
            async with aclosing(self._settle(ended)) as transcripts:
                async for transcript in transcripts:
                    yield transcript

    async def close(self) -> None:
        """Release everything. Idempotent."""
        try:
            await self._withdraw()
        finally:
            await release_in_thread(self._executor, self._splitter.close)

    async def _begin(self, pcm: Pcm16) -> None:
        await self._withdraw()
        self._task = TranscriptTask(self._transcribe(pcm), length=len(pcm))

    async def _withdraw(self) -> None:
        task, self._task = self._task, None
        self._guess_told = False
        if task is not None:
            await task.aclose()

    async def _settle(self, ended: UtteranceEnded) -> AsyncGenerator[TranscriptOutput, None]:
        """The transcripts of a whole utterance: nothing where nothing was understood, and nothing to be replaced."""
        if self._task is None or self._task.length != len(ended.pcm):
            await self._begin(ended.pcm)
        assert self._task is not None
        shown = False
        async for text in self._task:
            said, start_ms = text.recognised, ended.start_ms
            if said.text and not text.settled:
                shown = True
                yield TranscriptOutput(self._separator + said.text, interim=True, start_ms=start_ms)
            elif said.text:
                words = tuple(Word(one.text, start_ms + one.start_ms, start_ms + one.end_ms) for one in said.words)
                hearing = None if said.hearing is None else said.hearing.shifted(start_ms)
                yield TranscriptOutput(self._separator + said.text, start_ms=start_ms, words=words, hearing=hearing)
                self._separator = " "
            elif text.settled and shown:
                yield TranscriptOutput("", start_ms=start_ms)
        await self._withdraw()


class _NotLive:
    """A LiveText that reads nothing: an upstream gets utterances whole."""

    def read(self, utterance: Utterance) -> str | None:
        return ""

    def end(self) -> None:
        pass
