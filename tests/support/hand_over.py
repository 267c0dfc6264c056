"""A client of an engine that takes outputs in both ways: those that it is offered, and those that are yielded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from omni_ws.engine.base import EngineOutput


class HandOver:
    """Takes what it is offered, except at the turns at which ``refusals`` says so."""

    def __init__(self, refusals: Iterable[bool] = ()) -> None:
        self.outputs: list[EngineOutput] = []
        #: The number of outputs that were offered and taken.
        self.taken = 0
        self._refusals = iter(refusals)

    def offer(self, output: EngineOutput) -> bool:
        if next(self._refusals, False):
            return False
        self.taken += 1
        self.outputs.append(output)
        return True

    async def read(self, outputs: AsyncIterator[EngineOutput]) -> None:
        async for output in outputs:
            self.outputs.append(output)
