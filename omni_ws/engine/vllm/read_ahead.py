"""ReadAhead: vLLM's outputs, while something else is waited for that comes from the same model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Final

from omni_ws.errors import EngineFailed

if TYPE_CHECKING:
    from vllm import RequestOutput

#: How long a readout may take to arrive after the engine said that its step is over.
_ARRIVAL_SEC: Final = 10.0


class ReadAhead:
    """vLLM's outputs, read one ahead while something else is waited for: a failure is noticed at once."""

    def __init__(self, outputs: AsyncGenerator[RequestOutput, None]) -> None:
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
        """Raises what the engine fails with meanwhile, EngineFailed for what does not come."""
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
        if self._next is not None:
            self._next.cancel()
            await asyncio.wait([self._next])
        await self._outputs.aclose()


async def _anext(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(outputs, None)
