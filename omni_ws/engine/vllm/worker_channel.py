"""Channels on which vLLM's workers send hidden states and readouts to the server, and StepWatch, for the workers.

A row is what a step computes for one token: its hidden state, or the readout of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from omni_ws.engine.child import receive_message

T = TypeVar("T")


class WorkerChannel(ABC, Generic[T]):
    """A Unix socket on which workers send the results of steps, and the receivers of these results.

    Messages have the form of ``child_main``, with headers of the type ``header``. ``address`` is valid between
    ``start`` and ``stop``.
    """

    def __init__(self, header: type[msgspec.Struct]) -> None:
        self.address = ""
        #: The receiver of each request's messages, by the request's key in the worker.
        self.receivers: dict[str, T] = {}
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._headers = msgspec.json.Decoder(header)

    async def start(self) -> None:
        """Open the socket."""
        # In a private folder, which other users cannot enter.
        self._folder = Path(tempfile.mkdtemp(prefix="omni-ws-worker-"))
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

    @abstractmethod
    def take(self, header: Any, body: bytes) -> None:
        """Give a message to the receiver of its request; drop the message of a request that was cancelled."""

    def worker_left(self) -> None:
        """Note that a worker has ended, or will send nothing more."""

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    self.take(*await receive_message(reader, self._headers))
        finally:
            writer.close()
            self.worker_left()


class SentRows(msgspec.Struct, frozen=True):
    """The header of a worker's message: ``count`` rows of the request ``key``, of ``width`` numbers each.

    The body is the places of the rows in the request's tokens (count,; int64), their M-RoPE positions (3, count;
    int64), and the rows (count, width): float32, or bfloat16, the higher halves of that.
    """

    key: str
    count: int
    width: int
    bfloat16: bool


#: Rows (n, width), as float32 or as the bits of bfloat16.
Rows: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]


class RowsChannel(WorkerChannel[Any]):
    """The channel of the Thinker's hidden states, for answers that are spoken; a TalkerFeed receives each request's."""

    def __init__(self) -> None:
        super().__init__(SentRows)

    def take(self, header: SentRows, body: bytes) -> None:
        if (receiver := self.receivers.get(header.key)) is not None:
            count = header.count
            places = np.frombuffer(body, np.int64, count)
            positions = np.frombuffer(body, np.int64, 3 * count, 8 * count).reshape(3, count)
            kind: Any = np.uint16 if header.bfloat16 else np.float32
            rows: Rows = np.frombuffer(body, kind, offset=4 * 8 * count).reshape(count, header.width)
            receiver.take_rows(places, positions, rows)

    def worker_left(self) -> None:
        for receiver in self.receivers.values():
            receiver.worker_left()


def as_float32(rows: Rows) -> NDArray[np.float32]:
    """Return ``rows`` in float32."""
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
    """The channel of readouts, which have ``width`` values per position."""

    def __init__(self, width: int) -> None:
        super().__init__(SentReadouts)
        #: The number of positions received so far.
        self.positions = 0
        self._width = width

    @contextmanager
    def collect(self, key: str) -> Iterator[ReadoutCollector]:
        """Collect the readouts of the request ``key`` within the block."""
        collector = self.receivers[key] = ReadoutCollector()
        try:
            yield collector
        finally:
            del self.receivers[key]

    def take(self, header: SentReadouts, body: bytes) -> None:
        self.positions += header.count
        if (collector := self.receivers.get(header.key)) is not None:
            collector.add(header.first, np.frombuffer(body, np.float32).reshape(header.count, self._width))


_SEND_BUFFER_BYTES: Final = 4 << 20


def connect_worker(address: str) -> socket.socket:
    """Return a connection to the channel at ``address``, for a worker."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    connection.connect(address)
    return connection


@dataclass(frozen=True, slots=True)
class AskedRows:
    """Consecutive rows of one request in a step: ``count`` rows of the step from ``first_row``.

    They belong to the tokens from position ``begins`` in the prompt and answer of the request.
    """

    #: The value in ``extra_args`` with which the request asks.
    asked: Any
    #: The index of the request in the runner's batch.
    index: int
    first_row: int
    begins: int
    count: int


class StepWatch:
    """Watches the steps of vLLM's model ``runner`` for requests that ask for their rows.

    A request asks with the key ``name`` in the ``extra_args`` of its sampling parameters. Other requests cost one
    look-up.
    """

    def __init__(self, runner: Any, name: str) -> None:
        self._runner = runner
        self._name = name
        self._scheduled: Any = None
        execute = runner.execute_model

        def execute_model(scheduled: Any, *arguments: Any, **options: Any) -> Any:
            self._scheduled = scheduled
            return execute(scheduled, *arguments, **options)

        runner.execute_model = execute_model

    def asked(self) -> Iterator[AskedRows]:
        """Yield the rows of the step that is about to run. To be called once, where the model's forward is called.

        Only there, after input preparation, are the rows in the order in which the model gets them. A forward outside
        a step, as when the runner warms up, has no rows.
        """
        scheduled, self._scheduled = self._scheduled, None
        if scheduled is None:
            return
        batch, row = self._runner.input_batch, 0
        for index, request_id in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request_id, 0)
            sampling = self._runner.requests[request_id].sampling_params
            asked = ((sampling and sampling.extra_args) or {}).get(self._name)
            if asked is not None:
                yield AskedRows(asked, index, row, int(batch.num_computed_tokens_cpu[index]), count)
            row += count
