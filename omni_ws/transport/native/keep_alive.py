"""Keep-alive pings of connections, and the timing of acknowledgements of their input."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from omni_ws.config.model import StreamingInputConfig
from omni_ws.core.input_stream import InputStream

# Keep-alive: pings to a silent peer.


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


# Acknowledgements of input.

ACK_EVERY_CHUNKS: Final = 16
ACK_DELAY_SEC: Final = 0.1
#: A chunk that arrives this long before the acknowledgement is due brings it forward: a wake-up for the acknowledgement
#: alone costs as much as a chunk.
ACK_EARLY_SEC: Final = 0.025


class Acknowledgements:
    """Decides when one connection acknowledges its input: delayed and grouped, as in RFC 9000, section 13.2.

    An acknowledgement is sent after ACK_EVERY_CHUNKS accepted chunks, or ACK_DELAY_SEC after the first of them,
    whichever is first. Some events are acknowledged immediately: a duplicate, a filled gap, an end of the input, and
    chunks that were discarded.

    ``send`` is called when an acknowledgement is due. After each acknowledgement that is sent, for whatever reason,
    ``sent`` must be called. ``wait`` must call ``acknowledge`` at the given time, if ``due_at`` is still that time: see
    AcknowledgementClock.
    """

    __slots__ = ("_acknowledged", "_reorder", "_reported", "_send", "_stream", "_wait", "due_at")

    def __init__(
        self, stream: InputStream, wait: Callable[[float, Acknowledgements], None], send: Callable[[], None]
    ) -> None:
        self._stream = stream
        self._reorder = stream.reorder
        self._wait = wait
        self._send = send
        self.due_at = math.inf
        #: ``next_sequence_id`` and ``notable_events`` of the stream at the last acknowledgement.
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = stream.notable_events

    def received(self, now: float) -> None:
        """Acknowledge the frame that the stream processed at ``now``: immediately, or later together with others."""
        chunks = self._reorder.next_sequence_id - self._acknowledged
        if (
            chunks >= ACK_EVERY_CHUNKS
            or self._stream.notable_events != self._reported
            or now + ACK_EARLY_SEC >= self.due_at
        ):
            self.acknowledge()
        elif chunks and self.due_at == math.inf:
            self.due_at = now + ACK_DELAY_SEC
            self._wait(self.due_at, self)

    @property
    def pending(self) -> bool:
        """Whether there is anything to acknowledge."""
        return self._reorder.next_sequence_id != self._acknowledged or self._stream.notable_events != self._reported

    def acknowledge(self) -> None:
        """Send an acknowledgement now, if there is anything to acknowledge."""
        self.due_at = math.inf
        if self.pending:
            self._send()

    def sent(self) -> None:
        """Note that an acknowledgement of everything that the stream has received was sent."""
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = self._stream.notable_events

    def stop(self) -> None:
        """Cancel the acknowledgement that is due, as the connection has ended."""
        self.due_at = math.inf


#: The interval at which sessions in a store acknowledge, so that they share the commits before their acknowledgements.
KEPT_ACK_STEP_SEC: Final = ACK_DELAY_SEC


class GroupedAcknowledgements(Acknowledgements):
    """Acknowledgements that all sessions send at the same moments.

    Input is committed to the store before it is acknowledged. Sessions that acknowledge together share a commit.
    """

    __slots__ = ()

    def received(self, now: float) -> None:
        chunks = self._reorder.next_sequence_id - self._acknowledged
        if chunks >= ACK_EVERY_CHUNKS or self._stream.notable_events != self._reported:
            self.acknowledge()
        elif chunks and self.due_at == math.inf:
            self.due_at = math.ceil(now / KEPT_ACK_STEP_SEC) * KEPT_ACK_STEP_SEC
            self._wait(self.due_at, self)


class AcknowledgementClock:
    """A shared timer that sends the delayed acknowledgements of all connections of a server.

    The delay is the same for all connections, so that the first to wait is the first to be due. Nearly every
    acknowledgement is sent earlier, with a chunk, and no timer is cancelled or armed for that: an entry whose time has
    changed is skipped.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Acknowledgements]] = deque()
        self._armed = False

    def wait(self, when: float, waiting: Acknowledgements) -> None:
        """Call ``waiting.acknowledge`` at ``when``, unless its ``due_at`` has changed by then."""
        self._waiting.append((when, waiting))
        if not self._armed:
            self._arm(when)

    def _arm(self, when: float) -> None:
        self._armed = True
        asyncio.get_running_loop().call_at(when, self._on_timer, when)

    def _on_timer(self, due: float) -> None:
        self._armed = False
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(asyncio.get_running_loop().time(), due)
        while self._waiting:
            when, waiting = self._waiting[0]
            if waiting.due_at == when:
                if when > now:
                    self._arm(when)
                    return
                waiting.acknowledge()
            self._waiting.popleft()
