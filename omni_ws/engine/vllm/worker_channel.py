"""WorkerChannel: a channel on which vLLM's workers send hidden states or readouts to the server.

A row is the result of a step for one token: its hidden state, or the readout of this state.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.child import receive_message

T = TypeVar("T")


class WorkerChannel:
    """A Unix socket on which workers send the results of steps to the receivers of these results.

    Messages have the form of ``child_main``, with headers of the type ``header``, SentRows or SentReadouts. Messages
    for unknown keys are dropped. When a worker's connection ends, ``worker_left`` of all receivers is called.
    ``address`` is valid between ``start`` and ``stop``.
    """

    def __init__(self, header: type[SentRows | SentReadouts]) -> None:
        self.address = ""
        #: The TalkerFeed or ReadoutCollector of each request, by the request's key in the worker.
        self.receivers: dict[str, Any] = {}
        #: The number of rows received so far.
        self.rows = 0
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._headers = msgspec.json.Decoder(header)

    async def start(self) -> None:
        """Open the socket, in a new private folder."""
        # In a private folder, which other users cannot enter.
        self._folder = Path(tempfile.mkdtemp(prefix="omni-ws-worker-"))
        self.address = str(self._folder / "socket")
        self._server = await asyncio.start_unix_server(self._receive, self.address)

    async def stop(self) -> None:
        """Close the socket, and remove its folder. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    @contextmanager
    def receiving(self, key: str, receiver: T) -> Iterator[T]:
        """Pass the messages of the request with the key ``key`` to ``receiver`` within the block."""
        self.receivers[key] = receiver
        try:
            yield receiver
        finally:
            del self.receivers[key]

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    header, body = await receive_message(reader, self._headers)
                    self.rows += header.count
                    if (receiver := self.receivers.get(header.key)) is not None:  # not cancelled
                        receiver.receive(header, body)
        finally:
            writer.close()
            for receiver in self.receivers.values():
                receiver.worker_left()


class SentRows(msgspec.Struct, frozen=True):
    """The header of a worker's message: ``count`` rows of the request ``key``, of ``width`` numbers each.

    The body has three arrays: the places of the rows in the request's tokens, (count,) int64; their M-RoPE positions,
    (3, count) int64; and the rows, (count, width) float32 or bfloat16.
    """

    key: str
    count: int
    width: int
    bfloat16: bool


#: Rows (n, width), as float32 or as the bits of bfloat16.
Rows: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]


def as_float32(rows: Rows) -> NDArray[np.float32]:
    """Return ``rows`` in float32: the same array if it has this type already."""
    if rows.dtype == np.float32:
        return rows.astype(np.float32, copy=False)
    return (rows.astype(np.uint32) << 16).view(np.float32)


class SentReadouts(msgspec.Struct, frozen=True):
    """The header of a worker's message: the readouts of ``count`` positions of the request ``key``, from ``first``.

    The body is float32, of shape (count, layers, concepts).
    """

    key: str
    first: int
    count: int


class ReadoutCollector:
    """A receiver of one request's readouts, which stores them by position; a readout has ``width`` values."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._values: dict[int, NDArray[np.float32]] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}

    def receive(self, header: SentReadouts, body: bytes) -> None:
        """Store the readouts of consecutive positions.

        For a request that vLLM preempts and recomputes, positions arrive twice, with the same numbers.
        """
        rows = np.frombuffer(body, np.float32).reshape(header.count, self._width)
        for position, row in enumerate(rows, header.first):
            self._values[position] = row
            waiting = self._waiting.pop(position, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def worker_left(self) -> None:
        """Do nothing: a caller that waits for a readout also waits for vLLM's outputs, which fail."""

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
