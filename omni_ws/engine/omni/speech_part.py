"""SpeechPart: lets an answer go on as text when its voice fails."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from omni_ws.engine.base import PartFailed
from omni_ws.engine.channel import Channel
from omni_ws.engine.pipeline import Outputs, Stage
from omni_ws.errors import EngineFailed


class SpeechPart:
    """A Stage around one that speaks: what that loses with its process costs the answer its sound, and not its text.

    The client is told by a PartFailed.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        self.name = stage.name
        self._stage = stage

    async def run(self, source: AsyncIterator[Any], sink: Channel[Any] | None, outputs: Outputs) -> None:
        """Run the stage. If its process dies, the rest of ``source`` is read and dropped."""
        try:
            await self._stage.run(source, sink, outputs)
        except EngineFailed as error:
            told = EngineFailed(error.message, param=error.param, request_id=error.request_id)
            await outputs.put(PartFailed(told))
            # A stage that returns has those before it cancelled, and with them the text.
            async for _ in source:
                pass
