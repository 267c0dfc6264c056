"""InputChannel: the input of a request on its way to the engine, measured in bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_ws.core.chunks import InputChunk
from omni_ws.engine.channel import Channel, ChannelClosed


class InputChannel(Channel[InputChunk]):
    """A Channel of chunks, whose ``put_nowait`` and iteration are one call each: every frame of a microphone passes."""

    def __init__(self, capacity: int, *, on_take: Callable[[float], None]) -> None:
        super().__init__(capacity, cost=_size, on_take=on_take)
        self._taken = on_take

    def __len__(self) -> int:
        return len(self._items)

    def __bool__(self) -> bool:
        return True

    def put_nowait(self, item: InputChunk) -> None:
        if self._closed:
            raise ChannelClosed
        self._items.append(item)
        self.queued += len(item.payload)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def __anext__(self) -> InputChunk:
        while not self._items:
            if self._closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        item = self._items.popleft()
        size = len(item.payload)
        self.queued -= size
        self._taken(size)
        return item


def _size(chunk: InputChunk) -> float:
    return len(chunk.payload)
