"""WorkerChannel: a Unix socket on which vLLM's workers send what they compute, to the requests that wait for it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_SEND_BUFFER_BYTES: Final = 4 << 20


def connect_worker(address: str) -> socket.socket:
    """Return a connection to the channel at ``address``, for a worker."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    connection.connect(address)
    return connection


class WorkerChannel(ABC, Generic[T]):
    """The socket, and who waits for messages. ``address`` is valid between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self.address = ""
        #: By the key that a request has in the worker.
        self.receivers: dict[str, T] = {}
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None

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

    @contextmanager
    def _receiving(self, key: str, receiver: T) -> Iterator[T]:
        """Give the messages of the request ``key`` to ``receiver`` within the block."""
        self.receivers[key] = receiver
        try:
            yield receiver
        finally:
            del self.receivers[key]

    @abstractmethod
    async def read_message(self, reader: asyncio.StreamReader) -> None:
        """Read a message and give it to its receiver; there is none if the request was cancelled."""

    def worker_left(self) -> None:
        """Note that a worker has ended, or will send nothing more."""

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    await self.read_message(reader)
        finally:
            writer.close()
            self.worker_left()
