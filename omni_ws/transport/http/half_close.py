"""HalfCloseProbe: when to ask a peer that closed its sending side whether it still listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_ws.transport.http.deadline import Deadline


class HalfCloseProbe:
    """``ask`` is called ``first_sec`` after the probe began, and again after twice as long each time, up to
    ``longest_sec``.

    A closed socket and a half-closed one look the same until something is sent, which makes the former's kernel say no.
    Nearly all that close do so at once, hence the first question comes soon; the others come seldom, since a client may
    count them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ask: Callable[[], None], *, first_sec: float, longest_sec: float
    ) -> None:
        self._ask = ask
        self._first_sec = first_sec
        self._longest_sec = longest_sec
        self._interval = first_sec
        self._running = False
        self._deadline = Deadline(loop, self._due)

    def begin(self) -> None:
        """Does nothing where it has begun."""
        if self._running:
            return
        self._running = True
        self._interval = self._first_sec
        self._deadline.arm(self._interval)

    def stop(self) -> None:
        self._running = False
        self._deadline.disarm()

    def _due(self) -> None:
        self._interval = min(2 * self._interval, self._longest_sec)
        self._deadline.arm(self._interval)
        self._ask()
