"""Peers that go without a word: those that are not being read, and those behind a network that has failed."""

from __future__ import annotations

import asyncio
import enum
import select
import socket
from collections.abc import Callable
from typing import Final

from omni_ws.transport.http.deadline import Deadline

#: How long after the socket was read last it is looked at; then after twice as long each time, up to the second.
FIRST_CHECK_SEC: Final = 1.0
LONGEST_CHECK_SEC: Final = 4.0
#: That the peer closed its sending side, which not every system tells ahead of the data before it.
_END_OF_DATA: Final[int] = getattr(select, "POLLRDHUP", 0)

#: Seconds of silence after which the kernel asks a peer's kernel whether it is there; then between two such questions,
#: and how many may stay without an answer.
_KEEP_ALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


class HangUp(enum.Enum):
    """What has become of the peer."""

    UNKNOWN = "it may be there, or be gone behind more than the kernel can take of it"
    HALF = "it sends nothing any more, and may be gone"
    GONE = "it is gone"


class HangUpWatch:
    """``found`` hears again and again what has become of the peer, for as long as its socket is not read.

    An event loop that does not read a socket does not hear of its end either, and there may be data in front of it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, found: Callable[[HangUp], None]) -> None:
        self._found = found
        self._interval = FIRST_CHECK_SEC
        self._transport: asyncio.BaseTransport | None = None
        self._deadline = Deadline(loop, self._due)

    def begin(self, transport: asyncio.BaseTransport) -> None:
        """The socket is not read from here on."""
        if self._transport is None:
            self._transport = transport
            self._interval = FIRST_CHECK_SEC
            self._deadline.arm(self._interval)

    def end(self) -> None:
        """It is read again. The timer is left to run out: sockets rest often, and briefly."""
        self._transport = None

    def stop(self) -> None:
        """There is nothing to watch any more."""
        self._transport = None
        self._deadline.disarm()

    def _due(self) -> None:
        if self._transport is None:
            return
        self._interval = min(2 * self._interval, LONGEST_CHECK_SEC)
        self._deadline.arm(self._interval)
        self._found(hang_up(self._transport))


def hang_up(transport: asyncio.BaseTransport) -> HangUp:
    """What the kernel knows."""
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
    """Connections that are accepted here end when the network behind them has been dead for half a minute.

    Where the system has the options; what is accepted takes them over from the socket that listens.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
