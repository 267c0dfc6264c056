"""JitterBuffer: puts RTP packets into order, and decides which are lost. Has no socket and no clock.

What it feeds is an ear, not a loudspeaker: nothing has to be bridged by a delay. A packet that is in its place passes
at once, and only a gap makes the packets behind it wait, for as long as the missing one may still be under way. That is
four times the jitter (RFC 3550, 6.4.1), within bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

#: Ticks a second of the RTP time stamps of Opus, whatever its sample rate (RFC 7587, 4.1).
CLOCK_RATE: Final = 48_000
MIN_WAIT_SEC: Final = 0.04
MAX_WAIT_SEC: Final = 0.25
#: Packets that may wait behind a gap: more than a second of them.
CAPACITY: Final = 64
#: A sequence number this far from the expected one begins a new stream (RFC 3550, A.1).
MAX_JUMP: Final = 3000

_SEQUENCES: Final = 1 << 16


class PacketOutcome(StrEnum):
    """What became of a packet."""

    ON_TIME = "on_time"
    REORDERED = "reordered"
    LATE = "late"
    DUPLICATE = "duplicate"
    LOST = "lost"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class MediaPacket:
    """A packet in its place. ``lost`` packets before it did not arrive; ``timestamp`` is in ticks of CLOCK_RATE."""

    timestamp: int
    payload: bytes
    lost: int = 0


class JitterBuffer:
    """``receive`` each packet, and ``pass_over`` the gap when the time of ``get_timer`` has come.

    ``now`` is a monotonic time in seconds.
    """

    def __init__(self) -> None:
        #: Packets by their outcome, until the owner takes them away.
        self.counts: dict[PacketOutcome, int] = {}
        #: The number that is next; counted on beyond 16 bits.
        self._next: int | None = None
        #: By number, the time stamps and payloads behind a gap.
        self._waiting: dict[int, tuple[int, bytes]] = {}
        self._gap_since: float | None = None
        self._jitter = 0.0
        self._transit: float | None = None

    def receive(self, sequence: int, timestamp: int, payload: bytes, *, now: float) -> list[MediaPacket]:
        """A packet has arrived. Returns what is in its place now."""
        self._measure(timestamp, now)
        passed: list[MediaPacket] = []
        if self._next is None:
            self._next = sequence
        ahead = (sequence - self._next + _SEQUENCES // 2) % _SEQUENCES - _SEQUENCES // 2
        if abs(ahead) > MAX_JUMP:
            while self._waiting:
                passed += self._pass_gap(now)
            self._next, ahead = sequence, 0
        number = self._next + ahead
        if ahead < 0:
            self._count(PacketOutcome.LATE)
        elif number in self._waiting:
            self._count(PacketOutcome.DUPLICATE)
        else:
            self._count(PacketOutcome.REORDERED if ahead else PacketOutcome.ON_TIME)
            self._waiting[number] = (timestamp, payload)
            passed += self._take(now)
            while len(self._waiting) > CAPACITY:
                passed += self._pass_gap(now)
        return passed

    def get_timer(self) -> float | None:
        """When to pass over the gap; None without one."""
        return None if self._gap_since is None else self._gap_since + self._wait

    def pass_over(self, now: float) -> list[MediaPacket]:
        """The missing packets are lost, if their time is over. Returns what was behind them."""
        due = self.get_timer()
        return [] if due is None or now < due else self._pass_gap(now)

    @property
    def _wait(self) -> float:
        return min(max(4 * self._jitter, MIN_WAIT_SEC), MAX_WAIT_SEC)

    def _measure(self, timestamp: int, now: float) -> None:
        transit = now - timestamp / CLOCK_RATE
        if self._transit is not None and (step := abs(transit - self._transit)) < 1:
            self._jitter += (step - self._jitter) / 16
        self._transit = transit

    def _take(self, now: float, lost: int = 0) -> list[MediaPacket]:
        """What is in its place, with ``lost`` packets before it."""
        assert self._next is not None
        passed: list[MediaPacket] = []
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            passed.append(MediaPacket(*waiting, lost=lost))
            self._next, lost = self._next + 1, 0
        if passed or not self._waiting:
            self._gap_since = None
        if self._waiting and self._gap_since is None:
            self._gap_since = now
        return passed

    def _pass_gap(self, now: float) -> list[MediaPacket]:
        assert self._next is not None
        first = min(self._waiting)
        lost, self._next = first - self._next, first
        self._count(PacketOutcome.LOST, lost)
        return self._take(now, lost)

    def _count(self, outcome: PacketOutcome, packets: int = 1) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + packets
