"""Detection of peers that disconnect unnoticed: unread, half-closed, or behind a network that has failed.

A server learns of a disconnect from the socket's end of data or from a reset. Three peers give neither in time:

- One whose socket is not read, for backpressure: its end of data waits behind data. ``HangUpWatch`` asks the kernel.
- One that has closed its sending side: it may still read, or may have closed its socket altogether, and both look the
  same until something is sent. ``HalfCloseProbe`` says when to send something.
- One behind a dead network: ``notice_dead_networks`` has the kernel send keep-alive probes.
"""

from __future__ import annotations

import asyncio
import enum
import select
import socket
from collections.abc import Callable
from typing import Final

from omni_ws.transport.http.deadline import Deadline

#: Seconds after which a socket that is not read is checked first; the interval then doubles up to the second.
FIRST_CHECK_SEC: Final = 1.0
LONGEST_CHECK_SEC: Final = 4.0
#: Reports that the peer closed its sending side, ahead of the data before it; Linux only.
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


class HangUpWatch:
    """Checks at intervals what the kernel knows of a peer, while its socket is not read.

    ``report`` is called with the result of every check.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, report: Callable[[HangUp], None]) -> None:
        self._report = report
        self._interval = FIRST_CHECK_SEC
        self._transport: asyncio.BaseTransport | None = None
        self._deadline = Deadline(loop, self._due)

    def begin(self, transport: asyncio.BaseTransport) -> None:
        """Start: reading has paused."""
        if self._transport is None:
            self._transport = transport
            self._interval = FIRST_CHECK_SEC
            self._deadline.arm(self._interval)

    def end(self) -> None:
        """Stop checking: reading has resumed. The timer runs out by itself, since pauses are frequent and short."""
        self._transport = None

    def stop(self) -> None:
        """Stop for good, timer included."""
        self._transport = None
        self._deadline.disarm()

    def _due(self) -> None:
        if self._transport is None:
            return
        self._interval = min(2 * self._interval, LONGEST_CHECK_SEC)
        self._deadline.arm(self._interval)
        self._report(hang_up(self._transport))


class HalfCloseProbe:
    """Timer that says when to probe a peer that has closed its sending side.

    ``probe`` is called ``first_sec`` after ``begin``, then at intervals that double up to ``longest_sec``. The first
    call comes soon, because most peers that close their sending side have closed the whole socket; later ones are rare,
    because a client may count what they send.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, probe: Callable[[], None], *, first_sec: float, longest_sec: float
    ) -> None:
        self._probe = probe
        self._first_sec = first_sec
        self._longest_sec = longest_sec
        self._interval = first_sec
        self._running = False
        self._deadline = Deadline(loop, self._due)

    def begin(self) -> None:
        """Start probing. Does nothing where the timer runs already."""
        if self._running:
            return
        self._running = True
        self._interval = self._first_sec
        self._deadline.arm(self._interval)

    def stop(self) -> None:
        """Stop probing."""
        self._running = False
        self._deadline.disarm()

    def _due(self) -> None:
        self._interval = min(2 * self._interval, self._longest_sec)
        self._deadline.arm(self._interval)
        self._probe()


def hang_up(transport: asyncio.BaseTransport) -> HangUp:
    """Ask the kernel whether the peer of ``transport`` has hung up, without reading."""
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
