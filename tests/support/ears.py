"""An ASR that hears what a test says, turn by turn, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeAlias

from support.part_engines import ActingEngine

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Task, Usage
from omni_ws.engine.base import EngineCapabilities, EngineOutput, Finished, GenerationRequest, TranscriptOutput
from omni_ws.errors import OmniError

#: What is done at the end of a turn: text that is settled, an output, a wait, or a failure.
Step: TypeAlias = str | EngineOutput | Callable[[], Awaitable[object]] | OmniError


class Ears(ActingEngine):
    """Hears in the n-th turn what the n-th of ``turns`` says, once its input is whole, and nothing in later ones."""

    def __init__(self, *turns: Sequence[Step]) -> None:
        super().__init__("ears")
        self.turns = list(turns)
        self._able = EngineCapabilities(
            input_modalities=frozenset({Modality.AUDIO}),
            output_modalities=frozenset({OutputModality.TEXT, OutputModality.TRANSCRIPT}),
            tasks=frozenset({Task.TRANSCRIBE}),
            extend=True,
            languages=frozenset({"en"}),
        )

    async def act(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        steps = self.turns.pop(0) if self.turns else ()
        async for _ in request.input:
            pass
        separator = ""
        for step in steps:
            if isinstance(step, OmniError):
                raise step
            if isinstance(step, str):
                yield TranscriptOutput(separator + step)
                separator = " "
            elif callable(step):
                await step()
            else:
                yield step
        yield Finished(FinishReason.STOP, Usage(input_audio_ms=100))


def takes(seconds: float) -> Callable[[], Awaitable[object]]:
    """A step of recognition that takes so long."""
    return lambda: asyncio.sleep(seconds)


def interim(text: str) -> TranscriptOutput:
    return TranscriptOutput(text, interim=True)
