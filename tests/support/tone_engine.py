"""Engines for the HTTP routes: one that speaks, and ones that lack something."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace

import numpy as np

from omni_ws.audio.samples import Samples
from omni_ws.core.chunks import FinishReason, Modality, Usage, Word
from omni_ws.engine.base import AudioOutput, EngineCapabilities, EngineOutput, Finished, GenerationRequest, TextOutput
from omni_ws.engine.fake import CAPABILITIES, EchoEngine, ScriptedEngine

SAMPLE_RATE = 24_000
WORD_MS = 20


class ToneEngine(EchoEngine):
    """Says every word of the text as a tone of 20 ms as soon as the word is complete, while the text still arrives.

    The pitch is the length of the word in hundreds of hertz. ``fail_at`` words the engine breaks.
    """

    def __init__(self, *, fail_at: int | None = None) -> None:
        super().__init__()
        self.name = self.model = "tone"
        self.fail_at = fail_at
        self.requests: list[GenerationRequest] = []
        #: How often a request ended before its Finished.
        self.aborted = 0

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, voices=("tone", "bell"))

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        self.active_requests += 1
        self.requests.append(request)
        words = 0
        finished = False
        try:
            async for word in _words(request):
                if words == self.fail_at:
                    raise RuntimeError("secret: the reed is broken")
                words += 1
                yield TextOutput(word + " ")
                yield AudioOutput(tone(100 * len(word)), SAMPLE_RATE)
            finished = True
            yield Finished(FinishReason.STOP, Usage(input_tokens=words, output_tokens=words))
        finally:
            self.aborted += not finished
            self.active_requests -= 1


class ReadingEngine(ToneEngine):
    """A ToneEngine whose voice reads English alone, and that tells the times of its words."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(super().capabilities, voice_languages={"tone": "en", "bell": "de"})

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        word, start_ms = "", 0
        async with aclosing(super().generate(request)) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                if isinstance(output, TextOutput):
                    word = output.text.strip()
                elif isinstance(output, AudioOutput):
                    timed = Word(word, start_ms, start_ms + WORD_MS)
                    start_ms += WORD_MS
                    yield AudioOutput(output.samples, output.sample_rate, (timed,))
                else:
                    yield output


class SnapshotEngine(EchoEngine):
    """An EchoEngine that takes no input after the start."""

    @property
    def capabilities(self) -> EngineCapabilities:
        return replace(CAPABILITIES, extend=False)


class TextOnlyEngine(ScriptedEngine):
    """A ScriptedEngine that cannot speak, and takes text alone."""

    @property
    def capabilities(self) -> EngineCapabilities:
        modalities = frozenset(one for one in CAPABILITIES.output_modalities if one != "audio")
        return replace(
            CAPABILITIES, output_modalities=modalities, input_modalities=frozenset({Modality.TEXT}), voices=()
        )


class CountingEngine(EchoEngine):
    """Takes its input in, as far as ``gate`` lets it, and answers with the number of bytes."""

    def __init__(self, *, gate: asyncio.Event | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.taken_bytes = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        self.active_requests += 1
        try:
            async for chunk in request.input:
                self.taken_bytes += len(chunk.payload)
                if self.gate is not None:
                    await self.gate.wait()
            yield TextOutput(str(self.taken_bytes))
            yield Finished(FinishReason.STOP, Usage())
        finally:
            self.active_requests -= 1


def tone(frequency: float) -> Samples:
    time = np.arange(SAMPLE_RATE * WORD_MS // 1000) / SAMPLE_RATE
    return (0.5 * np.sin(2 * np.pi * frequency * time)).astype(np.float32)


async def _words(request: GenerationRequest) -> AsyncIterator[str]:
    rest = ""
    async for chunk in request.input:
        rest += chunk.payload.decode()
        *whole, rest = rest.split(" ")
        for word in filter(None, whole):
            yield word
    if rest:
        yield rest
