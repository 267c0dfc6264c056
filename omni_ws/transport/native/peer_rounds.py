"""PeerRounds: looks after the silent peers of all connections of a server, many at a time."""

from __future__ import annotations

import asyncio
import math
from typing import Final, Protocol

from omni_ws.transport.native.keep_alive import KeepAliveSettings

#: A peer is looked at late by up to this share of the time that it was given.
_LATE_SHARE: Final = 1 / 20
#: Peers that are looked at in one pass of the event loop.
_PEERS_PER_PASS: Final = 32


class Peer(Protocol):
    """One connection's peer."""

    def check_peer(self, now: float) -> float | None:
        """Ping the peer or give it up, as its silence demands; returns when to look again, None for never.

        It may not raise.
        """
        ...


class PeerRounds:
    """Calls each peer at its time, rounded up so that many have the same.

    A timer for each connection would wake the process for each ping, and to find that a pong has come. With hundreds of
    silent connections these wake-ups cost more than the pings.
    """

    def __init__(self, settings: KeepAliveSettings) -> None:
        times = (settings.ping_interval, settings.ping_timeout)
        self._period = min((time for time in times if time is not None), default=math.inf) * _LATE_SHARE
        #: The peers of each round that is to come, by its number; and the number of each peer's.
        self._rounds: dict[int, dict[Peer, None]] = {}
        self._number_of: dict[Peer, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: The time of the timer.
        self._next = math.inf

    def watch(self, peer: Peer, when: float | None) -> None:
        """Look at ``peer`` at ``when``, or a little later; None for never. Replaces what was said before."""
        self.forget(peer)
        if when is None:
            return
        number = math.ceil(when / self._period)
        self._rounds.setdefault(number, {})[peer] = None
        self._number_of[peer] = number
        self._arm(number * self._period)

    def forget(self, peer: Peer) -> None:
        """Look at it no more. Idempotent. The timer runs out by itself."""
        number = self._number_of.pop(peer, None)
        if number is not None:
            of_the_round = self._rounds[number]
            del of_the_round[peer]
            if not of_the_round:
                del self._rounds[number]

    def _arm(self, when: float) -> None:
        if when < self._next:
            if self._timer is not None:
                self._timer.cancel()
            self._next = when
            self._timer = asyncio.get_running_loop().call_at(when, self._go_round)

    def _go_round(self) -> None:
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(asyncio.get_running_loop().time(), self._next)
        self._timer, self._next = None, math.inf
        looked_at = 0
        for number in sorted(self._rounds):
            if number * self._period > now:
                break
            for peer in tuple(self._rounds.get(number, ())):
                if peer not in self._number_of:
                    continue  # it has gone since
                looked_at += 1
                if looked_at > _PEERS_PER_PASS:
                    self._arm(now)  # the rest in the next pass: other connections get their share
                    return
                self.watch(peer, peer.check_peer(now))
        if self._rounds:
            self._arm(min(self._rounds) * self._period)
