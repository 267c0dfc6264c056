"""Unread: an OutputWriter for requests that only have the model compute their prompt."""

from __future__ import annotations

from typing import Final

from omni_ws.engine.base import EngineOutput

#: What stands for the next words of the user in such a request.
NOTHING_SAID: Final = "…"


class Unread:
    """An OutputWriter that drops all outputs."""

    full = False

    def write(self, output: EngineOutput) -> None:
        pass

    async def drain(self) -> None:
        pass
