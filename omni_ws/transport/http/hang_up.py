"""Deadlines, the detection of peers that disconnect unnoticed, and the registry of open HTTP connections."""

from __future__ import annotations

import asyncio
import enum
import select
import socket
from collections.abc import Callable
from typing import Final, Protocol

from omni_ws.errors import OmniError


class Deadline:
    """A timer that is cheap to move: calls ``expired`` once, the given number of seconds after ``arm`` was called last.

    Moving a deadline to a later time is an assignment: the loop's timer wakes up early and is scheduled again. A new
    timer for each packet of a body would leave thousands of cancelled ones in the loop's heap.
    """

    __slots__ = ("_due", "_expired", "_handle", "_loop", "_scheduled")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._due: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._scheduled = 0.0

    def arm(self, seconds: float | None) -> None:
        """Expire ``seconds`` from now, instead of at the time set before; None disarms."""
        if seconds is None:
            self.disarm()
            return
        self._due = self._loop.time() + seconds
        if self._handle is not None and self._scheduled <= self._due:
            return
        self._schedule(self._due)

    def disarm(self) -> None:
        """Cancel the deadline. Does nothing if it is not armed."""
        self._due = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._scheduled = when
        self._handle = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._handle = None
        if self._due is None:
            return
        if self._loop.time() < self._due:
            self._schedule(self._due)
            return
        self._due = None
        self._expired()


# Peers that disconnect unnoticed: a server learns of a disconnect from the socket's end of data or from a reset, and
# peers that are unread, half-closed or behind a dead network give neither in time.

#: Seconds after which a socket that is not read is checked first; the interval then doubles up to the second.
FIRST_CHECK_SEC: Final = 1.0
LONGEST_CHECK_SEC: Final = 4.0
#: The poll event of a peer that closed its sending side, reported before the data in front of it is read. Linux only.
_END_OF_DATA: Final[int] = getattr(select, "POLLRDHUP", 0)

#: Seconds of silence before the kernel's first keep-alive probe, seconds between two probes, and how many may stay
#: unanswered.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class PeerGone(ConnectionResetError):
    """The client of this connection has disconnected.

    A type of its own, so that a reset of another connection, raised in a handler, is not mistaken for it.
    """


class HangUp(enum.Enum):
    """What the kernel knows of the peer's end of a connection."""

    UNKNOWN = "nothing: the peer may be connected, or gone behind more data than the kernel can buffer"
    HALF = "the peer has closed its sending side, and perhaps its socket"
    GONE = "the peer has disconnected"


class Recheck:
    """A timer that calls ``check`` after ``first_sec``, then at intervals that double up to ``longest_sec``.

    The default times suit ``hang_up``: checks of a peer that is not read, whose end of data waits behind other data.
    """

    def __init__(
        self, check: Callable[[], None], first_sec: float = FIRST_CHECK_SEC, longest_sec: float = LONGEST_CHECK_SEC
    ) -> None:
        self._check = check
        self._first_sec = first_sec
        self._longest_sec = longest_sec
        self._interval = first_sec
        self._running = False
        self._deadline = Deadline(asyncio.get_running_loop(), self._due)

    def begin(self) -> None:
        """Start checking. Does nothing if it has started already."""
        if not self._running:
            self._running = True
            self._interval = self._first_sec
            self._deadline.arm(self._interval)

    def end(self) -> None:
        """Stop checking, but let the timer run out by itself: pauses in reading are frequent and short."""
        self._running = False

    def stop(self) -> None:
        """Stop checking, and cancel the timer."""
        self._running = False
        self._deadline.disarm()

    def _due(self) -> None:
        if not self._running:
            return
        self._interval = min(2 * self._interval, self._longest_sec)
        self._deadline.arm(self._interval)
        self._check()


def hang_up(transport: asyncio.BaseTransport) -> HangUp:
    """Return what the kernel knows of the peer of ``transport``, without reading from the socket."""
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return HangUp.GONE
    poll = select.poll()
    poll.register(descriptor, _END_OF_DATA)
    events = sum(mask for _, mask in poll.poll(0))
    if events & (select.POLLHUP | select.POLLERR):
        return HangUp.GONE
    return HangUp.HALF if events & _END_OF_DATA else HangUp.UNKNOWN


def notice_dead_networks(listening: socket.socket) -> None:
    """Have the kernel drop connections accepted by ``listening`` when their network has been dead for half a minute.

    Accepted sockets inherit the options of the listening one. Systems without these options ignore this.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# The registry

#: Connections over the limit that get a response at the same time; others over the limit are dropped without one.
MAX_TURNED_AWAY: Final = 64


class OpenConnection(Protocol):
    """The methods that the registry calls on a connection."""

    @property
    def busy(self) -> bool:
        """Whether a request is being handled."""
        ...

    def close_if_idle(self) -> None:
        """Close the connection if it is between two requests."""

    def interrupt(self, error: OmniError) -> None:
        """End the work on the current request with ``error``, which the client receives."""

    def abort(self) -> None:
        """Drop the connection, which cancels its handler."""


class Connections:
    """Registry of a server's open HTTP connections, which limits their number and drains them.

    websockets' own server knows only connections that were upgraded, and from Python 3.12 on
    ``asyncio.Server.wait_closed`` waits for every transport: these must be drained before it is called.

    Upgraded connections leave the registry; one that was lost stays in it while its handler runs. ``max_open`` limits
    the registered and the upgraded connections together; None for no limit.
    """

    def __init__(self, *, max_open: int | None = None) -> None:
        self.max_open = max_open
        self._open: set[OpenConnection] = set()
        #: The connections of ``_open`` that are over the limit, while they get their response.
        self._turned_away: set[OpenConnection] = set()
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._draining = False
        self._changed: Callable[[], None] = lambda: None

    def report_to(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called when a connection comes or goes."""
        self._changed = changed

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
        self._changed()

    def is_full(self, *, upgraded: int) -> bool:
        """Return whether the newest connection is over the limit, given the number of ``upgraded`` connections."""
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
        self._changed()

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
        """End the work on all requests with ``error``, which their clients receive."""
        for connection in tuple(self._open):
            connection.interrupt(error)

    def abort_all(self) -> None:
        """Drop all connections and cancel their handlers; ``wait_idle`` returns when these have ended."""
        for connection in tuple(self._open):
            connection.abort()
