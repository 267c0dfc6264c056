"""Voices that say a clause at a time, as long as it has characters: without words, and with words that vary."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator
from enum import Enum

import numpy as np

from omni_ws.core.chunks import OutputModality, Task, Word
from omni_ws.engine.base import AudioOutput, EngineState, GenerationRequest, OutputWriter
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.engine.tts.speech_engine import clause_by_clause


class ClauseVoice:
    """A Voice that says a clause in 20 ms a character, as a ramp, and tells no words."""

    name = model = "ramp"
    hosts: tuple[str, ...] = ()
    measures_memory = False
    state = EngineState.OK
    capabilities = dataclasses.replace(
        CAPABILITIES,
        tasks=frozenset({Task.SPEECH}),
        output_modalities=frozenset({OutputModality.AUDIO}),
        voices=("ramp",),
    )

    def __init__(self) -> None:
        self.said: list[str] = []

    def describe(self) -> tuple[str, ...]:
        return ()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        await clause_by_clause(request, text, out, self.say)

    async def say(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        self.said.append(clause)
        ramp = np.linspace(0, len(clause) / 400, 480 * len(clause), dtype=np.float32)
        for begin in range(0, len(ramp), 4800):
            yield AudioOutput(ramp[begin : begin + 4800], 24_000)


class Telling(Enum):
    """With which piece of a clause's audio a voice tells a word."""

    ENDED = "in which it ends; the last word with the last"  # as espeak-ng does
    LATE = "behind that in which it ends"
    EARLY = "in which it begins"
    FIRST = "the first"
    LAST = "the last, which is empty"


class WordyVoice(ClauseVoice):
    """A ClauseVoice that tells words, at places that vary by ``vary_ms`` from one clause that it says to the next.

    Each clause ends in silence, about ``tail_ms`` behind the end of a piece of 60 ms, or just before that.
    """

    def __init__(
        self, telling: Telling, *, vary_ms: float = 22, tail_ms: float = 0.4, rate: int = 22_050, seed: int = 0
    ) -> None:
        super().__init__()
        self._telling, self._vary_ms, self._tail_ms, self._rate = telling, vary_ms, tail_ms, rate
        self._random = random.Random(seed)

    async def speak(self, request: GenerationRequest, text: AsyncIterator[str], out: OutputWriter) -> None:
        await clause_by_clause(request, text, out, self.say, tells_words=True)

    async def say(self, clause: str) -> AsyncGenerator[AudioOutput, None]:
        self.said.append(clause)
        words, end_ms, whole_ms = list[Word](), 0.0, self._tail_ms + 120
        for found in re.finditer(r"\w+", clause):
            start_ms, usual_ms = end_ms, 60 * (1 + len(found.group()) // 3)
            whole_ms += usual_ms
            end_ms += usual_ms + self._random.uniform(-self._vary_ms, self._vary_ms) / len(clause.split())
            words.append(Word(found.group(), round(start_ms), round(end_ms)))
        whole_ms += self._random.uniform(-min(1, self._vary_ms), min(1, self._vary_ms))
        pieces = int(whole_ms // 60) + 1
        told: list[list[Word]] = [[] for _ in range(pieces + 1)]
        for word in words:
            told[self._piece(word, pieces, last=word is words[-1])].append(word)
        for number in range(pieces + 1):
            begin_ms = min(whole_ms, 60 * number)
            samples = np.zeros(round(min(60, whole_ms - begin_ms) * self._rate / 1000), np.float32)
            if len(samples) or told[number]:
                yield AudioOutput(samples, self._rate, tuple(told[number]))
                await asyncio.sleep(0)  # so that a session can be saved behind every piece

    def _piece(self, word: Word, pieces: int, *, last: bool) -> int:
        match self._telling:
            case Telling.ENDED:
                return pieces - 1 if last else word.end_ms // 60
            case Telling.LATE:
                return min(pieces, word.end_ms // 60 + 1)
            case Telling.EARLY:
                return word.start_ms // 60
            case Telling.FIRST:
                return 0
            case Telling.LAST:
                return pieces
