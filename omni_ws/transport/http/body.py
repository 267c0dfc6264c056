"""RequestBody: what has come of the body of one request, on its way from the socket to a handler."""

from __future__ import annotations

import asyncio


class PeerGone(ConnectionResetError):
    """The client went away. Its own type, so that a reset of another connection in a handler is not taken for it."""


class RequestBody:
    """Bytes that arrived and were not read yet. Chunk borders carry no meaning in HTTP, so they are not kept."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        #: How much came in all.
        self.received = 0
        self._complete = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def held(self) -> int:
        return len(self._bytes)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come: the body is complete or broken."""
        return self._complete or self._failure is not None

    @property
    def complete(self) -> bool:
        return self._complete

    def feed(self, data: bytes | bytearray) -> None:
        self._bytes += data
        self.received += len(data)
        self._changed.set()

    def finish(self) -> None:
        self._complete = True
        self._changed.set()

    def fail(self, failure: Exception) -> None:
        """Raise ``failure`` in whoever reads past what has arrived. The first failure stays."""
        if not self.ended:
            self._failure = failure
            self._changed.set()

    async def take(self) -> bytes:
        """All bytes at hand, waiting for some where there are none; b"" at the end."""
        while not self._bytes:
            if self._failure is not None:
                raise self._failure
            if self._complete:
                return b""
            self._changed.clear()
            await self._changed.wait()
        taken = bytes(self._bytes)
        self._bytes.clear()
        return taken
