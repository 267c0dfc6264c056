"""Buffers that restore an order: of chunks by number, of input by position, of RTP packets by number and time.

``ReorderBuffer`` and ``OffsetBuffer`` treat chunks as RFC 9000 (2.2) treats the bytes of a stream: they wait for
missing chunks, and lose nothing. ``JitterBuffer`` waits for a short time only, and reports lost packets. ``Lateness``
and ``SpokenTimes`` tell from the times of arrival when live sound was made.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, Generic, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.request_input import InputEvent, RequestInput
from omni_ws.errors import (
    InvalidValue,
    OmniError,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
)

# The events that an InputStream returns for received chunks.


@dataclass(frozen=True, slots=True)
class RequestOpened:
    """The event that a chunk opened a request; the events that follow are about this request, until its InputEnded."""

    session: RequestInput
    #: Whether the chunk is audio in which speech was detected.
    by_speech: bool = False


class Diverted(Struct, frozen=True):
    """The event that ``chunk`` is next in order, and waits to be assigned to a request; None for a bare end of input.

    The bytes of the chunk count as held until ``InputStream.admit`` takes the chunk, or the owner releases them.
    """

    chunk: InputChunk | None


@dataclass(frozen=True, slots=True)
class TextRefused:
    """The event that text is not UTF-8. ``error`` names the chunk; all of it, or its last character, is dropped."""

    error: InvalidValue


@dataclass(frozen=True, slots=True)
class InputRefused:
    """The event that the open request's input exceeds its limit in bytes. The rest of the input is discarded."""

    error: PayloadTooLarge


StreamEvent: TypeAlias = RequestOpened | Diverted | TextRefused | InputRefused | InputEvent


# Chunks by number.

T = TypeVar("T")

MAX_SEQUENCE_ID = 2**32 - 1


class Arrival(Enum):
    """The place of a sequence number relative to the items that have been released.

    - NEXT: the number that follows the last one released.
    - AHEAD: beyond a gap, inside the window.
    - DUPLICATE: released before, or waiting already.
    - BEYOND_WINDOW: too far ahead to be kept.
    """

    NEXT = "next"
    AHEAD = "ahead"
    DUPLICATE = "duplicate"
    BEYOND_WINDOW = "beyond_window"


@dataclass(frozen=True, slots=True)
class ReorderStatistics:
    """Totals since the buffer was created; times are in seconds.

    ``items`` is the number of items that arrived early and were released since, ``waited`` the sum of their waiting
    times, ``gaps`` the total time during which there was a gap that was filled later.
    """

    items: int = 0
    waited: float = 0
    gaps: float = 0


NONE_REORDERED: Final = ReorderStatistics()


class ReorderBuffer(Generic[T]):
    """Holds items that arrive early until the gap before them is filled.

    Sequence numbers start at 0 and are contiguous. A number is inside the window if it is lower than ``next_sequence_id
    + window``, so the buffer holds fewer than ``window`` items. The caller classifies an item and then holds, releases
    or drops it: the buffer stays unchanged until the caller knows that the item can be accepted.

    ``now``, in seconds of any monotonic clock, is for the statistics only; the caller enforces the time-out of a gap.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: The lowest number that has not been released.
        self.next_sequence_id = 0
        self.statistics = NONE_REORDERED
        #: The items that wait, by number, with their times of arrival.
        self._ahead: dict[int, tuple[T, float]] = {}
        self._gap_since = 0.0

    def __len__(self) -> int:
        """The number of items that wait behind a gap."""
        return len(self._ahead)

    @property
    def missing(self) -> range | None:
        """The first gap: the numbers that have to arrive before any waiting item is released; None without a gap."""
        if not self._ahead:
            return None
        return range(self.next_sequence_id, min(self._ahead))

    @property
    def highest(self) -> int | None:
        """The highest number that waits, or None if none does."""
        return max(self._ahead, default=None)

    def behind(self, sequence_id: int) -> list[tuple[int, T]]:
        """Return the waiting items with a number above ``sequence_id``, unordered."""
        return [(number, item) for number, (item, _) in self._ahead.items() if number > sequence_id]

    def restore(self, next_sequence_id: int, statistics: ReorderStatistics) -> None:
        """Set the next number and totals of a saved buffer. The caller then calls ``hold`` for each waiting item."""
        self.next_sequence_id, self.statistics = next_sequence_id, statistics

    def classify(self, sequence_id: int) -> Arrival:
        """Return the place of a number, as an Arrival. Changes nothing."""
        if sequence_id == self.next_sequence_id:
            return Arrival.NEXT
        if sequence_id < self.next_sequence_id or sequence_id in self._ahead:
            return Arrival.DUPLICATE
        if sequence_id < self.next_sequence_id + self.window:
            return Arrival.AHEAD
        return Arrival.BEYOND_WINDOW

    def hold(self, sequence_id: int, item: T, *, now: float) -> None:
        """Keep an item whose number is AHEAD until the gap before it is filled."""
        if not self._ahead:
            self._gap_since = now
        self._ahead[sequence_id] = (item, now)

    def release(self, item: T, *, now: float) -> list[T]:
        """Advance past the item whose number is NEXT, and return it with the waiting items that directly follow it."""
        self.next_sequence_id += 1
        if not self._ahead:
            return [item]
        run = [item]
        waited = 0.0
        while (waiting := self._ahead.pop(self.next_sequence_id, None)) is not None:
            run.append(waiting[0])
            waited += now - waiting[1]
            self.next_sequence_id += 1
        if len(run) > 1:
            before = self.statistics
            self.statistics = ReorderStatistics(
                before.items + len(run) - 1, before.waited + waited, before.gaps + (now - self._gap_since)
            )
            self._gap_since = now
        return run

    def pass_over(self) -> None:
        """Advance past the item whose number is NEXT, like ``release``, but for a buffer in which no item waits."""
        self.next_sequence_id += 1

    def discard(self) -> list[T]:
        """Remove and return the waiting items, in order. The number after the highest of them is then the next one."""
        if not self._ahead:
            return []
        dropped = [self._ahead[sequence_id][0] for sequence_id in sorted(self._ahead)]
        self.next_sequence_id = max(self._ahead) + 1
        self._ahead.clear()
        return dropped


# Input by position.


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of the input with its content: bytes, or str if offsets count characters.

    ``chunk`` is the chunk from which it was cut, with an empty payload; it supplies the other fields.
    """

    start: int
    content: bytes | str
    chunk: InputChunk

    @property
    def end(self) -> int:
        """The position after the last byte or character."""
        return self.start + len(self.content)

    def to_chunk(self) -> InputChunk:
        """Return the piece as a chunk without an offset, for input that is ordered by arrival."""
        content = self.content
        payload = content.encode() if isinstance(content, str) else content
        return replace(self.chunk, payload=payload, offset=None, end_of_input=False)


class SavedOffsets(Struct, kw_only=True):
    """The contents of an OffsetBuffer, for serialisation. The waiting chunks include their offsets."""

    next_offset: int
    end: int | None
    kind: tuple[Modality, bool] | None
    waiting: list[InputChunk]


class OffsetBuffer:
    """Reassembles the input of one request, of one modality, by positions in one unit (bytes or characters).

    If chunks overlap, the content that arrived first wins. At most ``window`` pieces wait for missing input.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: The position up to which everything has been passed on.
        self.next_offset = 0
        #: The length of the input, once it is known.
        self.end: int | None = None
        #: The waiting pieces, sorted and disjoint.
        self._waiting: list[Piece] = []
        #: The modality, and whether offsets count characters; set by the first chunk with content.
        self._kind: tuple[Modality, bool] | None = None

    def __len__(self) -> int:
        """The number of pieces that wait behind a gap."""
        return len(self._waiting)

    @property
    def complete(self) -> bool:
        """Whether the end of the input is known, and all of it has been passed on."""
        return self.end == self.next_offset

    @property
    def highest(self) -> int:
        """The highest position received so far."""
        return self._waiting[-1].end if self._waiting else self.next_offset

    @property
    def missing(self) -> range | None:
        """The first gap, including one before a known end of the input; None if there is none."""
        if self._waiting:
            return range(self.next_offset, self._waiting[0].start)
        return range(self.next_offset, self.end) if self.end is not None and self.end > self.next_offset else None

    @property
    def unit(self) -> str:
        """The unit of offsets, ``character`` or ``byte``, for error messages."""
        return "character" if self._kind is not None and self._kind[1] else "byte"

    def gap_error(self) -> SequenceGap:
        """Return the error for a gap that was not filled in time. There must be a gap."""
        gap = self.missing
        assert gap is not None
        return SequenceGap(f"{len(gap)} {self.unit}s from offset {gap.start} did not arrive", param="offset")

    def receive(self, chunk: InputChunk, *, in_order: bool, hold: Callable[[int], None]) -> bool:
        """Add a chunk, whose content ``pass_on`` yields in order. Return whether all of its content had arrived before.

        ``in_order``: refuse the chunk if it would have to wait. ``hold`` is called with the number of bytes to be kept,
        and may raise.

        Raises InvalidValue for another modality or unit than before, SessionConflict for input beyond the end,
        OutOfOrder, and ReorderWindowExceeded. After any error the buffer is unchanged: the client may send the chunk
        again.
        """
        kind_before = self._kind
        try:
            piece = self._read(chunk)
            fresh = self._fresh(piece)
            if fresh and fresh[0].start > self.next_offset:
                self._check_window(fresh, in_order=in_order)
            # Account for every piece before passing on any: a chunk is accepted whole or refused whole.
            hold(sum(len(one.to_chunk().payload) for one in fresh))
        except OmniError:
            self._kind = kind_before  # a refused chunk does not determine what the others may be
            raise
        for one in fresh:
            insort(self._waiting, one, key=_start)
        if chunk.end_of_input:
            self.end_at(piece.end)
        return bool(piece.content) and not fresh

    def pass_on(self) -> Iterator[InputChunk]:
        """Yield the waiting pieces without a gap before them. If the caller raises, the latest piece still waits."""
        while self._waiting and self._waiting[0].start <= self.next_offset:
            piece = self._waiting[0]
            yield piece.to_chunk()
            self.next_offset = piece.end
            del self._waiting[0]

    def end_at(self, end: int) -> None:
        """Set the length of the input; only the first call counts. Input before the end may still be missing."""
        self.end = end if self.end is None else self.end

    def discard(self) -> None:
        """Discard the waiting pieces; reassembly resumes after the highest position received."""
        self.next_offset = self.highest
        self._waiting = []

    def saved(self) -> SavedOffsets:
        """Return the contents of the buffer, for ``restore``."""
        return SavedOffsets(
            next_offset=self.next_offset,
            end=self.end,
            kind=self._kind,
            waiting=[
                replace(one.to_chunk(), offset=one.chunk.offset and replace(one.chunk.offset, start=one.start))
                for one in self._waiting
            ],
        )

    def restore(self, saved: SavedOffsets) -> int:
        """Continue from the saved contents of another buffer. Return the number of bytes that wait.

        Raises InvalidValue if the waiting chunks overlap or are out of order.
        """
        self.next_offset, self.end, self._kind = saved.next_offset, saved.end, saved.kind
        for chunk in saved.waiting:
            if chunk.offset is None or chunk.offset.start < self.highest:
                raise InvalidValue("waiting pieces must be in order", param="offset")
            self._waiting.append(self._read(chunk))
        return sum(len(chunk.payload) for chunk in saved.waiting)

    def _read(self, chunk: InputChunk) -> Piece:
        """Convert the chunk to a piece. Raises InvalidValue if its modality or unit differs from those before."""
        offset = chunk.offset
        assert offset is not None
        content = _content(chunk)
        if content:
            kind = (chunk.modality, offset.in_characters)
            if self._kind is None:
                self._kind = kind
            elif self._kind[0] is not chunk.modality:
                raise InvalidValue("chunks with offsets must all have the same modality", param="modality")
            elif self._kind != kind:
                raise InvalidValue(
                    "offsets must count either bytes of payloads or characters of text, not both", param="offset"
                )
        # Drop the payload, so that a short piece does not keep a long one alive.
        return Piece(offset.start, content, replace(chunk, payload=b""))

    def _fresh(self, piece: Piece) -> list[Piece]:
        """Return the parts of ``piece`` that have not been received before, in order.

        Raises SessionConflict for content beyond the end, and for an end before content already received.
        """
        if self.end is None and piece.chunk.end_of_input and piece.end < self.highest:
            raise SessionConflict(
                f"the input cannot end at {piece.end}: it was already received up to {self.highest}", param="offset"
            )
        parts = [part for part in self._uncovered(piece) if part.content]
        if self.end is not None and parts and parts[-1].end > self.end:
            raise SessionConflict(f"the input has already ended, at {self.end}", param="offset")
        return parts

    def _check_window(self, pieces: Sequence[Piece], *, in_order: bool) -> None:
        """Check that ``pieces`` may wait. Raises OutOfOrder or ReorderWindowExceeded."""
        if in_order:
            raise OutOfOrder(f"expected {self.unit} {self.next_offset}", param="offset")
        if len(self._waiting) + len(pieces) > self.window:
            raise ReorderWindowExceeded(
                f"{self.unit} {self.next_offset} is missing; at most {self.window} later chunks can wait for it",
                param="offset",
            )

    def _uncovered(self, piece: Piece) -> Iterator[Piece]:
        """Yield the parts of ``piece`` that no earlier piece covers; some may be empty."""
        position = max(piece.start, self.next_offset)
        for other in self._waiting[bisect_right(self._waiting, position, key=_end) :]:
            if other.start >= piece.end:
                break
            yield _cut(piece, position, other.start)
            position = other.end
        yield _cut(piece, position, piece.end)


def offset_end(chunk: InputChunk) -> int:
    """Return the position after the last byte, or character, of a chunk that has an offset."""
    assert chunk.offset is not None
    return chunk.offset.start + len(_content(chunk))


def _content(chunk: InputChunk) -> bytes | str:
    in_characters = chunk.offset is not None and chunk.offset.in_characters
    return str(chunk.payload, "utf-8") if in_characters else chunk.payload


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    if (start, stop) == (piece.start, piece.end):
        return piece
    return Piece(start, piece.content[max(0, start - piece.start) : max(0, stop - piece.start)], piece.chunk)


def _start(piece: Piece) -> int:
    return piece.start


def _end(piece: Piece) -> int:
    return piece.end


# RTP packets.

#: The RTP clock rate of Opus in ticks a second, whatever the sample rate (RFC 7587, 4.1).
CLOCK_RATE: Final = 48_000
MIN_WAIT_SEC: Final = 0.04
MAX_WAIT_SEC: Final = 0.25
#: The most packets that may wait for a missing one: more than a second of them.
CAPACITY: Final = 64
#: A sequence number this far from the expected one begins a new stream (RFC 3550, A.1).
MAX_JUMP: Final = 3000
#: No packet arrives later than this after one that was sent after it.
MAX_LATE_SEC: Final = 2.0
#: This many consecutive late packets form a new stream, whatever their time stamps.
MAX_LATE_RUN: Final = 50

_SEQUENCES: Final = 1 << 16
_TIMESTAMPS: Final = 1 << 32


class PacketOutcome(StrEnum):
    """The fate of a received or missing packet."""

    ON_TIME = "on_time"
    REORDERED = "reordered"
    LATE = "late"
    DUPLICATE = "duplicate"
    LOST = "lost"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class MediaPacket:
    """An RTP packet in order. ``lost`` packets before it did not arrive; ``timestamp`` is in ticks of CLOCK_RATE.

    A packet that consists of padding only has no payload. ``begins``: it is the first packet of a stream.
    """

    timestamp: int
    payload: bytes
    lost: int = 0
    begins: bool = False


class JitterBuffer:
    """Puts RTP packets into order, and decides which are lost. Has no socket and no clock.

    Pass each packet to ``receive``, and call ``pass_over`` at the time that ``get_timer`` returns; ``now`` is a
    monotonic time in seconds.

    The packets go to a recogniser and not to a loudspeaker, so no delay is needed to bridge pauses. A packet in order
    passes immediately; only a missing packet makes later ones wait, for as long as it may still be under way: four
    times the jitter (RFC 3550, 6.4.1), within bounds.

    A sender may start a new stream at any time, with other numbers and time stamps. A packet with a new source (SSRC)
    begins a new stream; so do two packets in sequence after a jump of the numbers (RFC 3550, A.1), unless their time
    stamps are those of late packets.
    """

    def __init__(self) -> None:
        #: The number of packets by outcome, until the owner takes the counts away.
        self.counts: dict[PacketOutcome, int] = {}
        #: The next number in order; counted on beyond 16 bits.
        self._next: int | None = None
        #: The waiting packets by number: time stamp and payload.
        self._waiting: dict[int, tuple[int, bytes]] = {}
        self._gap_since: float | None = None
        self._jitter = 0.0
        self._transit: float | None = None
        self._source: int | None = None
        #: The SSRC of the stream before, and until when its packets count as late.
        self._former: tuple[int, float] | None = None
        #: Whether the next packet is the first of its stream.
        self._begins = True
        #: The time stamp of the last packet that passed.
        self._passed_timestamp = 0
        #: The transit time of the last packet that was not late; only differences of such times mean anything.
        self._usual_transit: float | None = None
        #: The fewest ticks from one packet to the next, in this stream; 0 before there are two packets.
        self._ticks = 0
        #: The last packet whose number is out of sequence, and the length of the run of consecutive packets that it
        #: ends.
        self._astray: tuple[int, int, bytes] | None = None
        self._astray_run = 0

    def receive(
        self, sequence: int, timestamp: int, payload: bytes, *, now: float, source: int = 0
    ) -> list[MediaPacket]:
        """Receive a packet of the sender ``source`` (SSRC). Return the packets that are in order now."""
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

    def get_timer(self) -> float | None:
        """Return the time at which the missing packets are given up; None without a gap."""
        return None if self._gap_since is None else self._gap_since + self._wait

    def pass_over(self, now: float) -> list[MediaPacket]:
        """Give up the missing packets if ``get_timer`` is due. Return the packets after them that are in order now."""
        due = self.get_timer()
        return [] if due is None or now < due else self._pass_gap(now)

    def _ahead(self, sequence: int) -> int:
        assert self._next is not None
        return (sequence - self._next + _SEQUENCES // 2) % _SEQUENCES - _SEQUENCES // 2

    def _begin(self, sequence: int, now: float) -> list[MediaPacket]:
        """Begin a new stream. Return the waiting packets of the stream before."""
        passed: list[MediaPacket] = []
        while self._waiting:
            passed += self._pass_gap(now)
        self._next, self._begins = sequence, True
        self._transit = self._usual_transit = None
        self._jitter, self._ticks = 0.0, 0
        self._astray, self._astray_run = None, 0
        return passed

    def _restart(self, sequence: int, timestamp: int, payload: bytes, now: float) -> tuple[int, int, bytes] | None:
        """Return the first packet of a new stream if this packet, the second one, proves the stream; otherwise None."""
        before, self._astray = self._astray, (sequence, timestamp, payload)
        if before is None or sequence != (before[0] + 1) % _SEQUENCES:
            self._astray_run = 1
            return None
        self._astray_run += 1
        if self._is_late(sequence, timestamp, now) and self._astray_run < MAX_LATE_RUN:
            return None
        return before

    def _is_late(self, sequence: int, timestamp: int, now: float) -> bool:
        """Return whether the time stamp fits a late packet of this stream with the number ``sequence``."""
        age = (self._passed_timestamp - timestamp) % _TIMESTAMPS
        packets = -1 - self._ahead(sequence)  # distance from the last packet that passed
        if age >= _TIMESTAMPS // 2 or age < packets * self._ticks // 2 or self._usual_transit is None:
            return False
        sent = self._passed_timestamp - age
        return now - sent / CLOCK_RATE - self._usual_transit < MAX_LATE_SEC

    def _place(self, ahead: int, timestamp: int, payload: bytes, now: float) -> list[MediaPacket]:
        """Put a packet into its place. Return the packets that are in order now."""
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

    @property
    def _wait(self) -> float:
        return min(max(4 * self._jitter, MIN_WAIT_SEC), MAX_WAIT_SEC)

    def _measure(self, timestamp: int, now: float) -> None:
        transit = now - timestamp / CLOCK_RATE
        if self._transit is not None and (step := abs(transit - self._transit)) < 1:
            self._jitter += (step - self._jitter) / 16
        self._transit = transit

    def _take(self, now: float, lost: int = 0) -> list[MediaPacket]:
        """Remove and return the waiting packets that are in order, the first of them after ``lost`` lost ones."""
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

    def take_counts(self) -> dict[PacketOutcome, int]:
        """Return the number of packets by outcome, and reset the counts."""
        counts, self.counts = self.counts, {}
        return counts

    def _count(self, outcome: PacketOutcome, packets: int = 1) -> None:
        self.counts[outcome] = self.counts.get(outcome, 0) + packets


# Times of arrival.

#: The time from which the promptest piece is taken.
PROMPT_MS: Final = 2000


class Lateness:
    """Finds out how late each piece of live sound arrives, compared with the promptest of the last PROMPT_MS.

    The arrival of a late piece says little about when it was recorded. Of sound that arrives faster than it lasts, such
    as a file, each piece is the promptest.
    """

    def __init__(self) -> None:
        #: Of recent pieces, the time of arrival and the delay; the delays rise.
        self._lags: deque[tuple[float, float]] = deque()

    def of(self, at_ms: float, sound_ms: float) -> float:
        """Return how late the piece is, in ms, that ends at ``sound_ms`` of the sound, and arrived at ``at_ms``."""
        lag = at_ms - sound_ms
        while self._lags and (self._lags[-1][1] >= lag or self._lags[0][0] < at_ms - PROMPT_MS):
            if self._lags[-1][1] >= lag:
                self._lags.pop()
            else:
                self._lags.popleft()
        self._lags.append((at_ms, lag))
        return lag - self._lags[0][1]


class SpokenTimes:
    """Tells when live sound was spoken: when the piece that held it arrived, less the lateness of that piece.

    A piece counts as late only as far as pieces before and after it were prompter: then its client goes on speaking,
    and the network, or the client, was busy. A client that sends nothing in silence, or a file, has no late pieces.
    """

    def __init__(self) -> None:
        self._lateness = Lateness()
        #: When the latest piece arrived.
        self.came_ms = 0.0
        #: Of the anchor, the delay, and how late it was; and the least delay since it. Milliseconds.
        self._lag = self._late = self._least_after = 0.0

    def arrived(self, at_ms: float, sound_ms: float, *, anchors: bool) -> None:
        """Note that the sound up to ``sound_ms`` arrived at ``at_ms``. ``anchors``: later times are counted from it."""
        late, lag = self._lateness.of(at_ms, sound_ms), at_ms - sound_ms
        self.came_ms = at_ms
        if anchors:
            self._lag, self._late, self._least_after = lag, late, lag
        else:
            self._least_after = min(self._least_after, lag)

    def when(self, sound_ms: float) -> float:
        """Return the time in milliseconds at which the sound at ``sound_ms``, at or before the anchor, was spoken."""
        return sound_ms + max(self._lag - self._late, min(self._lag, self._least_after))
