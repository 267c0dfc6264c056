"""Engines that play a script: one that can do all that few engines can, and two that hear."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from inspect import isawaitable
from typing import Any

import numpy as np
from support.part_engines import ASR, ActingEngine

from omni_ws.core.chunks import (
    FinishReason,
    InputChunk,
    Modality,
    OutputModality,
    TokenLogprob,
    ToolCallFragment,
    Usage,
    Word,
)
from omni_ws.engine.base import (
    AudioOutput,
    EngineOutput,
    Finished,
    GenerationRequest,
    OutputWriter,
    TextOutput,
    ToolCallOutput,
    TranscriptOutput,
)
from omni_ws.engine.fake import CAPABILITIES
from omni_ws.media import MediaLimits

#: What an engine can that tells what it has heard.
HEARS = {"output_modalities": CAPABILITIES.output_modalities | {OutputModality.TRANSCRIPT}}


class PlayingEngine(ActingEngine):
    """Plays its script for each request, once its input has ended; ``inputs`` has what each brought.

    A step is an output, an exception, which is raised, or a callable, whose result is awaited if it can be. Without a
    Finished the answer ends with ``stop``. ``changes`` are what it can do unlike an echo.
    """

    def __init__(self, script: Iterable[Any] = (), **changes: Any) -> None:
        super().__init__("scripted", **changes)
        self.script = tuple(script)
        self.inputs: list[list[InputChunk]] = []

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        return self.script

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        taken = [chunk async for chunk in request.input]
        self.inputs.append(taken)
        for step in self.steps(request, taken):
            if isinstance(step, Exception):
                raise step
            if callable(step):
                if isawaitable(result := step()):
                    await result
            elif isinstance(step, Finished):
                out.write(step)
                return
            else:
                out.write(step)
                await out.drain()
        out.write(Finished(FinishReason.STOP, Usage()))


class CapableEngine(PlayingEngine):
    """Has every capability, but for ``changes``."""

    def __init__(self, script: Iterable[Any] = (), **changes: Any) -> None:
        able = dict.fromkeys(("tools", "logprobs", "structured_output", "choices", "priority", "raw_prompts"), True)
        able |= dict.fromkeys(("template_arguments", "translates", "word_times", "keywords", "lexicon"), True)
        limits = frozenset(field.name for field in fields(MediaLimits))
        super().__init__(script, **{**able, "languages": frozenset({"en", "de"}), "media_limits": limits, **changes})


class HearingEngine(PlayingEngine):
    """Answers typed input by its script, and speech by ``heard``, in the same notation.

    ``heard_in_turn``, where it is set, has what is heard in one turn after the other.
    """

    def __init__(self, script: Iterable[Any] = (), *, heard: Iterable[Any] = (), **changes: Any) -> None:
        super().__init__(script, **{**HEARS, "transcribes_first": True, **changes})
        self.heard = tuple(heard)
        self.heard_in_turn: Iterator[Iterable[Any]] | None = None

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        heard = self.heard if self.heard_in_turn is None else next(self.heard_in_turn)
        return heard if any(chunk.modality is Modality.AUDIO for chunk in taken) else self.script


class Ears(PlayingEngine):
    """An ASR: it hears in the n-th turn what the n-th of ``turns`` says, and nothing in later ones.

    A text in it is settled, and stands behind those before it.
    """

    def __init__(self, *turns: Sequence[Any]) -> None:
        super().__init__(**ASR)
        self.turns = iter(turns)
        self._heard: dict[str, Sequence[Any]] = {}
        #: How many turns it has begun with.
        self.begun = 0

    async def act(self, request: GenerationRequest, out: OutputWriter) -> None:
        self.begun += 1
        self._heard[request.request_id] = next(self.turns, ())  # it may end after one that began later
        await super().act(request, out)

    def steps(self, request: GenerationRequest, taken: list[InputChunk]) -> Iterable[Any]:
        separator = ""
        for step in self._heard.pop(request.request_id):
            yield TranscriptOutput(separator + step) if isinstance(step, str) else step
            separator = " " if isinstance(step, str) else separator
        yield Finished(FinishReason.STOP, Usage(input_audio_ms=100))


def long_answer() -> list[EngineOutput]:
    """Two hundred words, a tenth of a second each."""
    script: list[EngineOutput] = [TextOutput(" ".join(f"word{number}" for number in range(200)))]
    for number in range(200):
        word = Word(f"word{number}", number * 100, number * 100 + 90)
        script.append(AudioOutput(np.full(2400, 0.1, np.float32), 24_000, (word,)))
    return script


def read_aloud(*words: str, milliseconds: int = 300) -> list[Any]:
    """The outputs of an answer of these words, each so long, with their times."""
    sound = (0.3 * np.sin(np.arange(24 * milliseconds) / 10)).astype(np.float32)
    starts = range(0, milliseconds * len(words), milliseconds)
    times = [Word(word, start, start + milliseconds) for word, start in zip(words, starts, strict=True)]
    return [TextOutput(" ".join(words)), *(AudioOutput(sound, 24_000, (word,)) for word in times)]


def takes(seconds: float) -> Callable[[], Awaitable[None]]:
    """A step that takes so long."""
    return lambda: asyncio.sleep(seconds)


def interim(text: str) -> TranscriptOutput:
    return TranscriptOutput(text, interim=True)


def tool_call(name: str, *arguments: str, index: int = 0, choice: int = 0) -> list[ToolCallOutput]:
    """A call as engines give it: its head, then its arguments in pieces."""
    head = ToolCallFragment(index, id=f"call_{name}_{index}", name=name)
    pieces = [ToolCallFragment(index, arguments=piece) for piece in arguments]
    return [ToolCallOutput(one, choice=choice) for one in (head, *pieces)]


def token(text: str, logprob: float = -0.5, *others: str) -> TokenLogprob:
    """A token with itself and ``others`` as the likeliest."""
    top = tuple(TokenLogprob(one, one.encode(), logprob - rank) for rank, one in enumerate((text, *others)))
    return TokenLogprob(text, text.encode(), logprob, top if others else ())


def said(text: str, *, choice: int = 0, logprobs: bool = False) -> TextOutput:
    return TextOutput(text, logprobs=(token(text),) if logprobs else (), choice=choice)


def finished(reason: FinishReason = FinishReason.STOP, *reasons: FinishReason) -> Finished:
    return Finished(reason, Usage(input_tokens=3, output_tokens=5), reasons)
