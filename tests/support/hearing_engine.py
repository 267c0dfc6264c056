"""An engine that hears what a test says that it hears."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

from omni_ws.core.chunks import FinishReason, Modality, OutputModality, Usage
from omni_ws.engine.base import EngineCapabilities, EngineOutput, Finished, GenerationRequest
from omni_ws.engine.fake import CAPABILITIES, ScriptedEngine


class HearingEngine(ScriptedEngine):
    """Answers typed input by its script, and speech by ``heard``, in the same notation.

    ``heard_in_turn``, where it is set, has what is heard in one turn after the other.
    """

    def __init__(self, script: Sequence[Any] = (), *, heard: Sequence[Any] = (), **changes: Any) -> None:
        self.typed = tuple(script)
        self.heard = tuple(heard)
        self.heard_in_turn: Iterator[Sequence[Any]] | None = None
        super().__init__(())
        modalities = CAPABILITIES.output_modalities | {OutputModality.TRANSCRIPT}
        self._able = replace(CAPABILITIES, **{"output_modalities": modalities, "transcribes_first": True, **changes})

    @property
    def capabilities(self) -> EngineCapabilities:
        return self._able

    async def generate(self, request: GenerationRequest) -> AsyncIterator[EngineOutput]:
        self.active_requests += 1
        self.requests.append(request)
        try:
            speech = [chunk.modality is Modality.AUDIO async for chunk in request.input]
            heard = self.heard if self.heard_in_turn is None else next(self.heard_in_turn)
            for step in heard if any(speech) else self.typed:
                if isinstance(step, Exception):
                    raise step
                if callable(step):
                    await step()
                elif not request.sink.offer(step):
                    yield step
            yield Finished(FinishReason.STOP, Usage())
        finally:
            self.active_requests -= 1
