"""ReadAhead: vLLM's outputs, with failures noticed even while waiting for something else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from omni_ws.engine.vllm.model_outputs import ModelOutputs
from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm import RequestOutput

#: How long a readout may take to arrive after vLLM has reported its step, in seconds.
_ARRIVAL_SEC: Final = 10.0


class ReadAhead:
    """Iterates over vLLM's outputs; ``until`` reads one ahead while it waits for something else."""

    def __init__(self, outputs: ModelOutputs) -> None:
        self._outputs = outputs
        self._next: asyncio.Task[RequestOutput | None] | None = None

    async def __aiter__(self) -> AsyncGenerator[RequestOutput, None]:
        while True:
            if self._next is None:
                output = await _anext(self._outputs)
            else:
                await asyncio.wait([self._next])
                output = self._next.result()
                self._next = None
            if output is None:
                return
            yield output

    async def until(self, arrival: asyncio.Future[None]) -> None:
        """Wait for ``arrival``. Raises vLLM's failure meanwhile, or EngineFailed if nothing arrives."""
        if arrival.done():
            return
        if self._next is None:
            self._next = asyncio.create_task(_anext(self._outputs), name="tokens of vLLM")
        await asyncio.wait({self._next, arrival}, return_when=asyncio.FIRST_COMPLETED)
        if arrival.done():
            return
        self._next.result()
        try:
            async with asyncio.timeout(_ARRIVAL_SEC):
                await arrival
        except TimeoutError:
            raise EngineFailed("a readout did not arrive") from None

    async def aclose(self) -> None:
        """Abort the request."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._outputs.aclose()


async def _anext(outputs: ModelOutputs) -> RequestOutput | None:
    return await anext(outputs, None)
