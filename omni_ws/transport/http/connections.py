"""The open HTTP connections of a server, and how they end when it drains.

websockets' own server knows only connections that were upgraded, and from Python 3.12 on ``asyncio.Server.wait_closed``
waits for every transport: so the HTTP side must be drained first.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from omni_ws.errors import OmniError

#: Connections over the limit that are told so at a time; those beyond are dropped without a word.
MAX_TURNED_AWAY: Final = 64


class OpenConnection(Protocol):
    """What the registry asks of a connection."""

    @property
    def busy(self) -> bool: ...

    def close_if_idle(self) -> None: ...

    def interrupt(self, error: OmniError) -> None: ...

    def abort(self) -> None: ...


class Connections:
    """Registry of HTTP connections. An upgraded connection leaves it; one whose handler still runs stays in it.

    ``max_open`` bounds those and the upgraded ones together; None for no bound.
    """

    def __init__(self, *, max_open: int | None = None) -> None:
        self.max_open = max_open
        self._open: set[OpenConnection] = set()
        #: Of these, the ones that are being told that there are too many.
        self._turned_away: set[OpenConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._draining = False

    @property
    def draining(self) -> bool:
        """Whether answers from now on end their connection."""
        return self._draining

    def __len__(self) -> int:
        return len(self._open)

    @property
    def busy(self) -> int:
        """How many connections are in the middle of a request."""
        return sum(connection.busy for connection in self._open)

    def add(self, connection: OpenConnection) -> None:
        self._open.add(connection)
        self._none_left.clear()

    def is_full(self, *, upgraded: int) -> bool:
        """Whether there are too many, with those that have been upgraded."""
        return self.max_open is not None and len(self._open) - len(self._turned_away) + upgraded > self.max_open

    def turn_away(self, connection: OpenConnection) -> bool:
        """Whether there is time to tell a connection that is too much why; otherwise it is to be dropped."""
        self._turned_away.add(connection)
        return len(self._turned_away) <= MAX_TURNED_AWAY

    def discard(self, connection: OpenConnection) -> None:
        self._open.discard(connection)
        self._turned_away.discard(connection)
        if not self._open:
            self._none_left.set()

    def close_idle(self) -> None:
        """Begin to drain: connections between two requests end now, the others after their answer."""
        self._draining = True
        for connection in tuple(self._open):
            connection.close_if_idle()

    async def wait_idle(self, timeout: float | None) -> bool:
        """Wait until no connection is left; False when ``timeout`` seconds were not enough."""
        try:
            async with asyncio.timeout(timeout):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def interrupt_all(self, error: OmniError) -> None:
        """Answers under way end with ``error``, as far as their clients read them."""
        for connection in tuple(self._open):
            connection.interrupt(error)

    def abort_all(self) -> None:
        """Drop what is left. Their handlers are cancelled; ``wait_idle`` tells when they are done."""
        for connection in tuple(self._open):
            connection.abort()
