"""Requests to an engine made of parts, and what they are answered with."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from support.engine_answers import AUDIO, BOTH, TEXT, Answer, Input, open_input, request_of
from support.engine_answers import text as typed

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.engine.base import Engine, EngineOutput, GenerationRequest, PartFailed

__all__ = ["AUDIO", "BOTH", "IMAGE", "TEXT", "Input", "Result", "Sink", "open_input", "request_of", "typed"]

IMAGE = InputChunk(Modality.IMAGE, b"a picture")


class Sink:
    """Takes every output at once."""

    def __init__(self) -> None:
        self.taken: list[EngineOutput] = []

    def offer(self, output: EngineOutput) -> bool:
        self.taken.append(output)
        return True


@dataclass
class Result(Answer):
    """An answer that may be looked at while it comes."""

    @property
    def failures(self) -> list[PartFailed]:
        return [output for output in self.outputs if isinstance(output, PartFailed)]

    @property
    def spoken_words(self) -> int:
        """The number of words that a ToneEngine has said."""
        return len(self.audio)


def whole_input(*chunks: InputChunk) -> Input:
    channel = open_input(*chunks)
    channel.close()
    return channel


async def ask(engine: Engine, *chunks: InputChunk, **fields: Any) -> Result:
    return await collect(engine, request_of(whole_input(*chunks), **fields))


async def collect(engine: Engine, request: GenerationRequest, into: Result | None = None) -> Result:
    result = into or Result()
    async with aclosing(engine.generate(request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            result.outputs.append(output)
    return result
