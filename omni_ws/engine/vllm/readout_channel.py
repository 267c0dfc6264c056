"""ReadoutChannel: receives readouts from vLLM's workers on a Unix socket and assigns them to requests."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

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


class ReadoutChannel:
    """The socket, on which a readout has ``width`` values per position.

    ``address`` is valid between ``start`` and ``stop``.
    """

    def __init__(self, width: int) -> None:
        self.address = ""
        #: The number of positions received so far.
        self.positions = 0
        self._width = width
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._collectors: dict[str, ReadoutCollector] = {}

    async def start(self) -> None:
        """Open the socket."""
        # In a private folder, which other users cannot enter.
        self._folder = Path(tempfile.mkdtemp(prefix="omni-ws-readouts-"))
        self.address = str(self._folder / "socket")
        self._server = await asyncio.start_unix_server(self._receive, self.address)

    async def stop(self) -> None:
        """Close the socket. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @contextmanager
    def collect(self, key: str) -> Iterator[ReadoutCollector]:
        """Collect the readouts of the request ``key`` within the block."""
        collector = self._collectors[key] = ReadoutCollector()
        try:
            yield collector
        finally:
            del self._collectors[key]

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    key_bytes, first, count = FRAME.unpack(await reader.readexactly(FRAME.size))
                    key = (await reader.readexactly(key_bytes)).decode()
                    data = await reader.readexactly(count * self._width * _NUMBER_BYTES)
                    self.positions += count
                    collector = self._collectors.get(key)
                    if collector is not None:  # the request may have been cancelled
                        collector.add(first, np.frombuffer(data, np.float32).reshape(count, self._width))
        finally:
            writer.close()
