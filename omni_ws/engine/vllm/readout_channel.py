"""ReadoutChannel: receives readouts from vLLM's workers on a Unix socket and assigns them to requests."""

from __future__ import annotations

import asyncio
import struct
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.vllm.worker_channel import WorkerChannel

#: The header of a worker's message: the length of the key, the first position, the number of positions. The key and
#: float32 numbers of shape (positions, layers, concepts) follow.
FRAME: Final = struct.Struct("<IQI")
_NUMBER_BYTES: Final = 4


class ReadoutCollector:
    """The readouts of one request, by position."""

    def __init__(self) -> None:
        self._values: dict[int, NDArray[np.float32]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def add(self, first: int, rows: NDArray[np.float32]) -> None:
        """Add the readouts of consecutive positions from ``first``.

        A request that vLLM preempts and recomputes sends positions twice, with the same numbers.
        """
        for position, row in enumerate(rows, first):
            self._values[position] = row
            waiting = self._waiting.pop(position, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def arrival(self, position: int) -> asyncio.Future[None]:
        """Return a future that is done once the readout of ``position`` has arrived."""
        if position not in self._waiting:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            if position in self._values:
                future.set_result(None)
                return future
            self._waiting[position] = future
        return self._waiting[position]

    def take(self, position: int) -> NDArray[np.float32]:
        """Remove and return the readout of ``position``, which has arrived."""
        return self._values.pop(position)


class ReadoutChannel(WorkerChannel[ReadoutCollector]):
    """The channel, on which a readout has ``width`` values per position."""

    def __init__(self, width: int) -> None:
        super().__init__()
        #: The number of positions received so far.
        self.positions = 0
        self._width = width

    def collect(self, key: str) -> AbstractContextManager[ReadoutCollector]:
        """Collect the readouts of the request ``key`` within the block."""
        return self._receiving(key, ReadoutCollector())

    async def read_message(self, reader: asyncio.StreamReader) -> None:
        key_bytes, first, count = FRAME.unpack(await reader.readexactly(FRAME.size))
        key = (await reader.readexactly(key_bytes)).decode()
        data = await reader.readexactly(count * self._width * _NUMBER_BYTES)
        self.positions += count
        if (collector := self.receivers.get(key)) is not None:
            collector.add(first, np.frombuffer(data, np.float32).reshape(count, self._width))
