"""OffsetBuffer: reassembles input by position, byte for byte, as RFC 9000 (2.2) reassembles streams."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.stream_events import StreamEvent
from omni_ws.errors import InvalidValue, OmniError, OutOfOrder, ReorderWindowExceeded, SequenceGap, SessionConflict


@dataclass(frozen=True, slots=True)
class Piece:
    """A contiguous range of the input and its content: bytes, or str where offsets count characters.

    ``chunk`` supplies the other fields of the chunk that it is part of; its payload is empty.
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


class Downstream(Protocol):
    """The receiver of reassembled input, which also accounts for what waits; InputStream implements it."""

    reject_out_of_order: bool
    duplicates: int

    def hold_waiting(self, size: int) -> None:
        """Account for ``size`` more bytes that wait.

        Raises PayloadTooLarge or EngineOverloaded when they exceed a limit.
        """
        ...

    def release_waiting(self, size: int) -> None:
        """Account for ``size`` bytes that wait no longer."""
        ...

    def pass_on(self, chunk: InputChunk) -> Sequence[StreamEvent]:
        """Process the next chunk in order; its bytes are no longer accounted for as waiting."""
        ...


class OffsetBuffer:
    """The reassembly of one request's input: one modality, positions in one unit (bytes or characters).

    Where chunks overlap, the copy that arrived first wins. At most ``window`` pieces wait behind a gap.
    """

    def __init__(self, window: int) -> None:
        self.window = window
        #: The position up to which everything has been passed on.
        self.next_offset = 0
        #: The length of the input, once it is known.
        self.end: int | None = None
        #: The pieces behind a gap, sorted and disjoint.
        self._waiting: list[Piece] = []
        #: The modality, and whether offsets count characters; set by the first chunk with content.
        self._kind: tuple[Modality, bool] | None = None

    def __len__(self) -> int:
        """The number of pieces that wait behind a gap."""
        return len(self._waiting)

    @property
    def complete(self) -> bool:
        """Whether everything up to the end of the input has been passed on."""
        return self.end == self.next_offset

    @property
    def highest(self) -> int:
        """The highest position received so far."""
        return self._waiting[-1].end if self._waiting else self.next_offset

    @property
    def missing(self) -> range | None:
        """The first gap, including one before a known end of the input; None when there is none."""
        if self._waiting:
            return range(self.next_offset, self._waiting[0].start)
        return range(self.next_offset, self.end) if self.end is not None and self.end > self.next_offset else None

    def gap_error(self) -> SequenceGap:
        """Return the error for a gap that was not filled in time. There must be a gap."""
        gap = self.missing
        assert gap is not None
        return SequenceGap(f"{len(gap)} {self.unit}s from offset {gap.start} did not arrive", param="offset")

    @property
    def unit(self) -> str:
        """The unit of offsets, ``character`` or ``byte``, for error messages."""
        return "character" if self._kind is not None and self._kind[1] else "byte"

    def receive(self, chunk: InputChunk, downstream: Downstream) -> list[StreamEvent]:
        """Take a chunk as it arrived; returns the events of all chunks that are in order now.

        Raises InvalidValue for another modality or unit than before, SessionConflict for input beyond the end,
        OutOfOrder, ReorderWindowExceeded, and whatever ``downstream`` raises. The buffer is unchanged then: the client
        may send the chunk again.
        """
        kind_before = self._kind
        try:
            piece = self._read(chunk)
            fresh = self._fresh(piece)
            if fresh and fresh[0].start > self.next_offset:
                self._check_window(fresh, downstream)
            # Account for every piece before passing on any: a chunk is accepted whole or refused whole.
            downstream.hold_waiting(sum(len(one.to_chunk().payload) for one in fresh))
        except OmniError:
            self._kind = kind_before  # a refused chunk does not determine what the others may be
            raise
        if piece.content and not fresh:
            downstream.duplicates += 1
        for one in fresh:
            insort(self._waiting, one, key=_start)
        if chunk.end_of_input:
            self.end_at(piece.end)
        return self._pass_on(downstream)

    def end_at(self, end: int) -> None:
        """Set the length of the input; the first call wins. Input before it may still be missing."""
        self.end = end if self.end is None else self.end

    def _read(self, chunk: InputChunk) -> Piece:
        """Convert the chunk to a piece. Raises InvalidValue when its modality or unit differs from those before."""
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

    def _check_window(self, pieces: Sequence[Piece], downstream: Downstream) -> None:
        """Check that ``pieces`` may wait. Raises OutOfOrder or ReorderWindowExceeded."""
        if downstream.reject_out_of_order:
            raise OutOfOrder(f"expected {self.unit} {self.next_offset}", param="offset")
        if len(self._waiting) + len(pieces) > self.window:
            raise ReorderWindowExceeded(
                f"{self.unit} {self.next_offset} is missing; at most {self.window} later chunks can wait for it",
                param="offset",
            )

    def _pass_on(self, downstream: Downstream) -> list[StreamEvent]:
        """Pass on the waiting pieces that have no gap before them."""
        events: list[StreamEvent] = []
        passed = 0
        for piece in self._waiting:
            if piece.start > self.next_offset:
                break
            chunk = piece.to_chunk()
            downstream.release_waiting(len(chunk.payload))  # pass_on accounts for it anew
            events += downstream.pass_on(chunk)
            self.next_offset = piece.end
            passed += 1
        del self._waiting[:passed]
        return events

    def discard(self) -> None:
        """Discard the waiting pieces; reassembly resumes after the highest position received."""
        self.next_offset = self.highest
        self._waiting = []

    def _uncovered(self, piece: Piece) -> Iterator[Piece]:
        """Yield the ranges of ``piece`` between those already received; some may be empty."""
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
