"""Registry of a server's open HTTP connections, which bounds and drains them.

websockets' own server knows only connections that were upgraded, and from Python 3.12 on ``asyncio.Server.wait_closed``
waits for every transport: the HTTP connections must be drained before it is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from omni_ws.errors import OmniError

#: Connections over the limit that get a response at the same time; others over the limit are dropped without one.
MAX_TURNED_AWAY: Final = 64


class OpenConnection(Protocol):
    """What the registry calls on a connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being handled."""
        ...

    def close_if_idle(self) -> None:
        """Close the connection if it is between two requests."""

    def interrupt(self, error: OmniError) -> None:
        """End what runs for the request with ``error``."""

    def abort(self) -> None:
        """Drop the connection, which cancels its handler."""


class Connections:
    """Registry of HTTP connections.

    Upgraded connections leave it; one that was lost stays in it while its handler runs. ``max_open`` bounds these and
    the upgraded connections together; None for no bound.
    """

    def __init__(self, *, max_open: int | None = None) -> None:
        self.max_open = max_open
        self._open: set[OpenConnection] = set()
        #: Those of ``_open`` over the limit, while they get their response.
        self._turned_away: set[OpenConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._draining = False
        #: Called when a connection came or went.
        self.changed: Callable[[], None] = lambda: None

    @property
    def draining(self) -> bool:
        """Whether responses from now on close their connection."""
        return self._draining

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> int:
        """How many connections are handling a request."""
        return sum(connection.busy for connection in self._open)

    def add(self, connection: OpenConnection) -> None:
        """Register a connection that was accepted."""
        self._open.add(connection)
        self._none_left.clear()
        self.changed()

    def is_full(self, *, upgraded: int) -> bool:
        """Whether the last connection is one too many, next to ``upgraded`` ones."""
        return self.max_open is not None and len(self._open) - len(self._turned_away) + upgraded > self.max_open

    def turn_away(self, connection: OpenConnection) -> bool:
        """Mark ``connection`` as over the limit. Returns whether it may get a response before it is closed."""
        self._turned_away.add(connection)
        return len(self._turned_away) <= MAX_TURNED_AWAY

    def discard(self, connection: OpenConnection) -> None:
        """Remove a connection that is over, or upgraded."""
        self._open.discard(connection)
        self._turned_away.discard(connection)
        if not self._open:
            self._none_left.set()
        self.changed()

    def close_idle(self) -> None:
        """Start to drain: connections between two requests close now, the others after their response."""
        self._draining = True
        for connection in tuple(self._open):
            connection.close_if_idle()

    async def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no connection is left. Returns False if that takes longer than ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def interrupt_all(self, error: OmniError) -> None:
        """End all requests with ``error``, as far as their clients read it."""
        for connection in tuple(self._open):
            connection.interrupt(error)

    def abort_all(self) -> None:
        """Drop all connections and cancel their handlers; ``wait_idle`` returns when these have ended."""
        for connection in tuple(self._open):
            connection.abort()
