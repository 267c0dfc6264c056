"""JitterBuffer: puts RTP packets into order, and decides which are lost. Has no socket and no clock.

What it feeds is an ear, not a loudspeaker: nothing has to be bridged by a delay. A packet that is in its place passes
at once, and only a gap makes the packets behind it wait, for as long as the missing one may still be under way. That is
four times the jitter (RFC 3550, 6.4.1), within bounds.

A sender may begin anew at any time, with other numbers and time stamps. That is a new stream, and not a late packet:
another source (SSRC) says so at once; numbers that do not go on say so with the second packet in sequence (RFC 3550,
A.1), unless their time stamps are those of packets that are late.
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
#: No packet is overtaken by so much.
MAX_LATE_SEC: Final = 2.0
#: So many packets in sequence that are all late are a stream, whatever their time stamps.
MAX_LATE_RUN: Final = 50

_SEQUENCES: Final = 1 << 16
_TIMESTAMPS: Final = 1 << 32


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
    """A packet in its place. ``lost`` packets before it did not arrive; ``timestamp`` is in ticks of CLOCK_RATE.

    A packet of padding alone has no payload. ``begins`` means that it is the first of a stream.
    """

    timestamp: int
    payload: bytes
    lost: int = 0
    begins: bool = False


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
        self._source: int | None = None
        #: The source before it, and until when its packets are merely late.
        self._former: tuple[int, float] | None = None
        #: Whether the next packet is the first of its stream.
        self._begins = True
        #: The time stamp of the last packet that passed.
        self._passed_timestamp = 0
        #: The transit time of the last packet that was not behind its place, on no known clock.
        self._usual_transit: float | None = None
        #: The fewest ticks from one packet to the next, in this stream; 0 before there are two.
        self._ticks = 0
        #: The last packet whose number does not go on, and how many were in sequence with it.
        self._astray: tuple[int, int, bytes] | None = None
        self._astray_run = 0

    def receive(
        self, sequence: int, timestamp: int, payload: bytes, *, now: float, source: int = 0
    ) -> list[MediaPacket]:
        """A packet of the sender ``source`` has arrived. Returns what is in its place now."""
        passed: list[MediaPacket] = []
        if source != self._source:
            if self._former is not None and self._former[0] == source and now < self._former[1]:
                self._count(PacketOutcome.LATE)
                return []
            if self._source is not None:
                self._former = self._source, now + MAX_WAIT_SEC
            self._source = source
            passed += self._begin(sequence, now)
        assert self._next is not None
        ahead = self._ahead(sequence)
        if ahead < 0 and (first := self._restart(sequence, timestamp, payload, now)) is not None:
            passed += self._begin(first[0], now)
            passed += self._place(0, first[1], first[2], now)
            ahead = self._ahead(sequence)
        elif abs(ahead) > MAX_JUMP:
            passed += self._begin(sequence, now)
            ahead = 0
        if payload:
            self._measure(timestamp, now)
            if ahead >= 0:
                self._usual_transit = self._transit
        return passed + self._place(ahead, timestamp, payload, now)

    def _ahead(self, sequence: int) -> int:
        assert self._next is not None
        return (sequence - self._next + _SEQUENCES // 2) % _SEQUENCES - _SEQUENCES // 2

    def _begin(self, sequence: int, now: float) -> list[MediaPacket]:
        """A new stream begins. Returns what waited of the one before."""
        passed: list[MediaPacket] = []
        while self._waiting:
            passed += self._pass_gap(now)
        self._next, self._begins = sequence, True
        self._transit = self._usual_transit = None
        self._jitter, self._ticks = 0.0, 0
        self._astray, self._astray_run = None, 0
        return passed

    def _restart(self, sequence: int, timestamp: int, payload: bytes, now: float) -> tuple[int, int, bytes] | None:
        """The first packet of a new stream, if this one, behind its place, is the second."""
        before, self._astray = self._astray, (sequence, timestamp, payload)
        if before is None or sequence != (before[0] + 1) % _SEQUENCES:
            self._astray_run = 1
            return None
        self._astray_run += 1
        if self._is_late(sequence, timestamp, now) and self._astray_run < MAX_LATE_RUN:
            return None
        return before

    def _is_late(self, sequence: int, timestamp: int, now: float) -> bool:
        """Whether the time stamp is that of the packet of this stream with the number ``sequence``, which is late."""
        age = (self._passed_timestamp - timestamp) % _TIMESTAMPS
        packets = -1 - self._ahead(sequence)  # before the last one that passed
        if age >= _TIMESTAMPS // 2 or age < packets * self._ticks // 2 or self._usual_transit is None:
            return False
        sent = self._passed_timestamp - age
        return now - sent / CLOCK_RATE - self._usual_transit < MAX_LATE_SEC

    def _place(self, ahead: int, timestamp: int, payload: bytes, now: float) -> list[MediaPacket]:
        """Put a packet into its place. Returns what is in its place now."""
        assert self._next is not None
        passed: list[MediaPacket] = []
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
            passed.append(MediaPacket(*waiting, lost=lost, begins=self._begins))
            self._next += 1
            ticks = (waiting[0] - self._passed_timestamp) % _TIMESTAMPS
            if not (lost or self._begins) and ticks and (ticks < self._ticks or not self._ticks):
                self._ticks = ticks
            lost, self._begins, self._passed_timestamp = 0, False, waiting[0]
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
