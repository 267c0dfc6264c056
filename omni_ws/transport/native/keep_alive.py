"""Keep-alive pings of connections: who is pinged when, and who counts as gone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from omni_ws.config.model import StreamingInputConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAliveSettings:
    """The times of keep-alive pings, in seconds; None turns pings, or their time-out, off."""

    ping_interval: float | None = 20
    ping_timeout: float | None = 20


class KeepAlive:
    """The keep-alive state of one peer: decides when to ping it, and when it counts as gone. Has no clock or socket.

    Any byte that the peer sends shows that it is there, not only a pong. ``listening`` says whether the socket is read.
    While the socket is not read, silence means nothing, but pings are still sent: sending over a broken connection
    reveals that it is broken.
    """

    def __init__(self, settings: KeepAliveSettings, *, now: float) -> None:
        self._settings = settings
        self._last_sign_of_life = now
        self._pinged_at = now
        #: The value of ``_last_sign_of_life`` at the last ping.
        self._silent_since: float | None = None

    def heard(self, when: float) -> None:
        """Note that the last byte from the peer arrived at the time ``when``."""
        self._last_sign_of_life = when

    def get_timer(self, *, listening: bool) -> float | None:
        """Return the time at which to call ``check``; None for never."""
        interval, timeout = self._settings.ping_interval, self._settings.ping_timeout
        if interval is None:
            return None
        if not self._unanswered:
            return self._last_sign_of_life + interval
        return self._pinged_at + (interval if timeout is None or not listening else timeout)

    def check(self, now: float, ping: Callable[[], None], *, listening: bool) -> bool:
        """Call ``ping`` if the peer has been silent too long. Returns False if it has not answered a ping in time."""
        deadline = self.get_timer(listening=listening)
        if deadline is None or now < deadline:
            return True
        if self._unanswered and listening and self._settings.ping_timeout is not None:
            return False
        self._pinged_at, self._silent_since = now, self._last_sign_of_life
        ping()
        return True

    @property
    def _unanswered(self) -> bool:
        return self._silent_since == self._last_sign_of_life


#: A peer is checked late by up to this share of its ping interval or time-out.
_LATE_SHARE: Final = 1 / 20
#: Peers that are checked in one pass of the event loop.
_PEERS_PER_PASS: Final = 32


#: A function that pings the silent peer of one connection, or closes the connection of a peer that is gone. It gets the
#: time, and returns when to call it again; None for never. If it raises, it is not called again.
CheckPeer: TypeAlias = Callable[[float], float | None]


class PeerRounds:
    """A shared timer that checks the peers of all connections of a server, in rounds.

    The time of each check is rounded up, so that many peers share a round. With a timer for each of hundreds of silent
    connections, the wake-ups of the process would cost more than the pings.
    """

    def __init__(self, settings: KeepAliveSettings) -> None:
        self.settings = settings
        times = (settings.ping_interval, settings.ping_timeout)
        self._period = min((time for time in times if time is not None), default=math.inf) * _LATE_SHARE
        #: The peers of each coming round by its number, and the number of each peer's round.
        self._rounds: dict[int, dict[CheckPeer, None]] = {}
        self._number_of: dict[CheckPeer, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: When ``_timer`` is due.
        self._next = math.inf

    @classmethod
    def configured(cls, config: StreamingInputConfig) -> Self:
        """Return the rounds with the times in ``config``, where 0 turns a time off."""
        interval, timeout = config.ping_interval_sec or None, config.ping_timeout_sec or None
        return cls(KeepAliveSettings(ping_interval=interval, ping_timeout=timeout))

    def watch(self, peer: CheckPeer, when: float | None) -> None:
        """Check ``peer`` at ``when``, or a little later; None for never. Replaces an earlier ``when``."""
        self.forget(peer)
        if when is None:
            return
        number = math.ceil(when / self._period)
        self._rounds.setdefault(number, {})[peer] = None
        self._number_of[peer] = number
        self._arm(number * self._period)

    def forget(self, peer: CheckPeer) -> None:
        """Stop checking ``peer``. Idempotent. The timer runs out by itself."""
        number = self._number_of.pop(peer, None)
        if number is not None:
            peers = self._rounds[number]
            del peers[peer]
            if not peers:
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
        checked = 0
        try:
            for number in sorted(self._rounds):
                if number * self._period > now:
                    break
                for peer in tuple(self._rounds.get(number, ())):
                    if peer not in self._number_of:
                        continue  # an earlier check has made it forget this peer
                    checked += 1
                    if checked > _PEERS_PER_PASS:
                        return  # the rest in the next pass: other connections get their share
                    self.forget(peer)
                    self.watch(peer, peer(now))
        finally:  # also if a check fails: the peers are those of all connections
            if self._rounds:
                self._arm(min(self._rounds) * self._period)


#: For peers that are not pinged.
NO_PINGS: Final = PeerRounds(KeepAliveSettings(ping_interval=None, ping_timeout=None))
