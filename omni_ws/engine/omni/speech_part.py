"""SpeechPart: lets an answer go on as text when its voice fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni_ws.engine.base import PartFailed
from omni_ws.engine.channel import Channel
from omni_ws.engine.pipeline import Outputs, Stage
from omni_ws.errors import EngineFailed, EngineOverloaded, OmniError


class SpeechPart:
    """A Stage around one that speaks: without its process, or a slot there, an answer loses its sound, not its text.

    The client is told by a PartFailed.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.name = stage.name
        self._stage = stage

    async def run(self, source: AsyncIterator[Any], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Run the stage. If it cannot go on, the rest of ``source`` is read and dropped."""
        try:
            await self._stage.run(source, sink, outputs)
        except (EngineFailed, EngineOverloaded) as error:
            told: OmniError
            if isinstance(error, EngineOverloaded):
                told = EngineOverloaded(error.message, param=error.param, retry_after_ms=error.retry_after_ms)
            else:
                told = EngineFailed(error.message, param=error.param)
            await outputs.put(PartFailed(told))
            # A stage that returns has those before it cancelled, and with them the text.
            async for _ in source:
                pass
