"""The engine of chats that another server answers (``live.backend``): it starts as it is first needed."""

from __future__ import annotations

import asyncio

from omni_ws.engine.base import GenerationRequest, OutputWriter
from omni_ws.engine.remote.engine import RemoteLlmEngine
from omni_ws.engine.remote.settings import RemoteLlmSettings
from omni_ws.errors import EngineFailed


class Backend(RemoteLlmEngine):
    """A RemoteLlmEngine that connects when it is first asked: nobody waits for a server that may never be needed."""

    def __init__(self, settings: RemoteLlmSettings) -> None:
        super().__init__(settings)
        self._starting = asyncio.Lock()

    async def generate(self, request: GenerationRequest, out: OutputWriter) -> None:
        try:
            async with self._starting:
                await self.start()
        except EngineFailed as error:  # a fatal one would end the chat
            raise EngineFailed(error.message) from error
        await super().generate(request, out)
