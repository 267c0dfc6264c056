"""Puts chunks back in order by where they begin: the reassembly of RFC 9000 streams, byte by byte."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.stream_events import StreamEvent
from omni_ws.errors import InvalidValue, OutOfOrder, ReorderWindowExceeded, SequenceGap, SessionConflict


@dataclass(frozen=True, slots=True)
class Piece:
    """What a chunk brings of the input, from ``start`` on; of a text that counts characters, its characters."""

    start: int
    content: bytes | str
    chunk: InputChunk

    @property
    def end(self) -> int:
        return self.start + len(self.content)

    def to_chunk(self) -> InputChunk:
        """As a chunk of an input whose order is that of its arrival."""
        content = self.content
        payload = content.encode() if isinstance(content, str) else content
        return replace(self.chunk, payload=payload, offset=None, end_of_input=False)


class Downstream(Protocol):
    """Where the pieces go; see InputStream."""

    reject_out_of_order: bool
    duplicates: int

    def hold_waiting(self, size: int) -> None:
        """So many bytes more wait behind a gap. Raises PayloadTooLarge or EngineOverloaded where there is no room."""
        ...

    def release_waiting(self, size: int) -> None: ...

    def pass_on(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        """The next one in order, for whose bytes there is room."""
        ...


class OffsetBuffer:
    """The input of one request: one modality, and one unit. Of what overlaps the first copy counts.

    At most ``window`` pieces wait behind a gap.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: Everything before it has been passed on.
        self.next_offset = 0
        #: Where the input ends, once that is known.
        self.end: int | None = None
        #: Behind a gap: in order, and apart from one another.
        self._waiting: list[Piece] = []
        self._kind: tuple[Modality, bool] | None = None

    def __len__(self) -> int:
        """How many pieces wait."""
        return len(self._waiting)

    @property
    def complete(self) -> bool:
        """Whether everything up to the end has been passed on."""
        return self.end == self.next_offset

    @property
    def highest(self) -> int:
        """Where the last of what came ends."""
        return self._waiting[-1].end if self._waiting else self.next_offset

    @property
    def missing(self) -> range | None:
        """The first gap, also one before an end that was announced."""
        if self._waiting:
            return range(self.next_offset, self._waiting[0].start)
        return range(self.next_offset, self.end) if self.end is not None and self.end > self.next_offset else None

    def gap_error(self) -> SequenceGap:
        gap = self.missing
        assert gap is not None
        return SequenceGap(f"{len(gap)} {self.unit}s from {gap.start} on did not arrive", param="offset")

    @property
    def unit(self) -> str:
        return "character" if self._kind is not None and self._kind[1] else "byte"

    def receive(self, chunk: InputChunk, downstream: Downstream) -> list[StreamEvent]:
        """A chunk as it arrived, and with it what waited for it.

        Raises InvalidValue, SessionConflict, OutOfOrder, ReorderWindowExceeded, and what ``downstream`` raises: the
        same chunk may come again then.
        """
        piece = self._read(chunk)
        fresh = self._fresh(piece)
        if piece.content and not fresh:
            downstream.duplicates += 1
        if fresh and fresh[0].start > self.next_offset:
            self._check_window(fresh, downstream)
        # All of it or nothing, also of what need not wait: what was passed on cannot be taken back.
        downstream.hold_waiting(sum(len(one.to_chunk().payload) for one in fresh))
        for one in fresh:
            insort(self._waiting, one, key=_start)
        if chunk.end_of_input:
            self.end_at(piece.end)
        return self._pass_on(downstream)

    def end_at(self, end: int) -> None:
        """The input ends there, unless it is known to end elsewhere; what is before that may still be missing."""
        self.end = end if self.end is None else self.end

    def _read(self, chunk: InputChunk) -> Piece:
        """The chunk as a piece. Raises InvalidValue for another modality, or unit, than those before it had."""
        offset = chunk.offset
        assert offset is not None
        content = _content(chunk)
        if content:
            kind = (chunk.modality, offset.in_characters)
            if self._kind is None:
                self._kind = kind
            elif self._kind[0] is not chunk.modality:
                raise InvalidValue("an input whose chunks have offsets is of one modality", param="modality")
            elif self._kind != kind:
                raise InvalidValue("offsets count the bytes of payloads or the characters of texts", param="offset")
        # Without its payload, of which a piece may be but a little.
        return Piece(offset.start, content, replace(chunk, payload=b""))

    def _fresh(self, piece: Piece) -> list[Piece]:
        """What of the piece has not come before, in order.

        Raises SessionConflict for what stands behind the end, and for an end before what is here.
        """
        if self.end is None and piece.chunk.end_of_input and piece.end < self.highest:
            raise SessionConflict(
                f"an end at {piece.end}, while the input goes on to {self.highest} already", param="offset"
            )
        parts = [part for part in self._uncovered(piece) if part.content]
        if self.end is not None and parts and parts[-1].end > self.end:
            raise SessionConflict(f"the input has ended at {self.end}", param="offset")
        return parts

    def _check_window(self, pieces: Sequence[Piece], downstream: Downstream) -> None:
        if downstream.reject_out_of_order:
            raise OutOfOrder(f"expected {self.unit} {self.next_offset}", param="offset")
        if len(self._waiting) + len(pieces) > self.window:
            raise ReorderWindowExceeded(
                f"{self.unit} {self.next_offset} is missing, and {self.window} pieces wait for it", param="offset"
            )

    def _pass_on(self, downstream: Downstream) -> list[StreamEvent]:
        """What waits with no gap before it."""
        events: list[StreamEvent] = []
        passed = 0
        for piece in self._waiting:
            if piece.start > self.next_offset:
                break
            chunk = piece.to_chunk()
            downstream.release_waiting(len(chunk.payload))  # counted again, or not, where it goes now
            events += downstream.pass_on(chunk)
            self.next_offset = piece.end
            passed += 1
        del self._waiting[:passed]
        return events

    def discard(self) -> None:
        """Give up on what waits; nothing before its end is missing any more."""
        self.next_offset = self.highest
        self._waiting = []

    def _uncovered(self, piece: Piece) -> Iterator[Piece]:
        position = max(piece.start, self.next_offset)
        for other in self._waiting[bisect_right(self._waiting, position, key=_end) :]:
            if other.start >= piece.end:
                break
            yield _cut(piece, position, other.start)
            position = other.end
        yield _cut(piece, position, piece.end)


def offset_end(chunk: InputChunk) -> int:
    """Where a chunk that has an offset ends."""
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
