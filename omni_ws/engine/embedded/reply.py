"""What a request sends out: text, and the same text spoken, within the limits that the client set."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_ws.core.chunks import FinishReason, Word
from omni_ws.engine.answer_limit import AnswerLimit, WordCounter
from omni_ws.engine.base import AudioOutput, EngineOutput, GenerationRequest, TextOutput
from omni_ws.engine.clauses import ClauseSplitter
from omni_ws.engine.text_pieces import CooperativePieces
from omni_ws.engine.tts.voice import Voice


class Reply:
    """``writes`` and ``speaks`` say in which forms it goes out."""

    def __init__(self, request: GenerationRequest, voice: Voice, *, writes: bool, speaks: bool) -> None:
        #: Words released so far.
        self._writes = writes
        self._speaks = speaks
        self._voice = voice
        self._voice_name = request.voice
        self._limit = AnswerLimit(request.sampling)
        #: Characters given to the limit and not yet released: speech waits for the end of a word.
        self._held = 0
        self._counter = WordCounter()
        self._unspoken = ClauseSplitter()
        self._spoken_ms = 0.0

    @property
    def audio_ms(self) -> int:
        return round(self._spoken_ms)

    @property
    def reached(self) -> FinishReason | None:
        """Why nothing more goes out; None while something may."""
        return self._limit.reached

    async def say(self, text: str) -> AsyncGenerator[EngineOutput, None]:
        """A sentence, or another piece of the reply that may be spoken by itself. White space between is given too."""
        self._held += len(text)
        async for piece in CooperativePieces(text):
            if self.reached is not None:
                return
            async with aclosing(self._release(self._limit.feed(piece))) as outputs:
                async for output in outputs:
                    yield output

    async def finish(self) -> AsyncGenerator[EngineOutput, None]:
        """What was held back."""
        released = self._limit.finish()
        self._held = len(released)
        async with aclosing(self._release(released)) as outputs:
            async for output in outputs:
                yield output

    @property
    def words(self) -> int:
        """The words of the answer so far."""
        return self._counter.words

    async def _release(self, released: str) -> AsyncGenerator[EngineOutput, None]:
        self._held -= len(released)
        self._counter.feed(released)
        if released and self._writes:
            yield TextOutput(released)
        if not self._speaks:
            return
        clauses = self._unspoken.feed(released)
        if self._held == 0 or self.reached is not None:
            clauses.append(self._unspoken.rest())
        for clause in filter(None, clauses):
            async with aclosing(self._speak(clause)) as outputs:
                async for output in outputs:
                    yield output

    async def _speak(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        start_ms = self._spoken_ms
        sample_rate = 0
        async with aclosing(self._voice.speak(clause, voice=self._voice_name)) as pieces:
            async for piece in pieces:
                # Words that are told after the last sample come without a rate of their own.
                sample_rate = piece.sample_rate or sample_rate
                if not sample_rate:
                    continue
                self._spoken_ms += len(piece.samples) * 1000 / sample_rate
                yield AudioOutput(piece.samples, sample_rate, tuple(_moved(word, start_ms) for word in piece.words))


def _moved(word: Word, by_ms: float) -> Word:
    return Word(word.text, round(word.start_ms + by_ms), round(word.end_ms + by_ms))
