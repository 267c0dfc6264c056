"""InputProgress: how much of a Mode B session's input has arrived."""

from __future__ import annotations

from dataclasses import dataclass

from omni_ws.core.chunks import InputChunk
from omni_ws.core.reorder import offset_end
from omni_ws.errors import InvalidRequest, PayloadTooLarge, SessionConflict
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.streaming_body import ChunkOrRefusal


@dataclass(slots=True)
class InputProgress:
    """A record of the input, which goes on counting late chunks once the session has ended.

    While the session is live, its ``ChunkIntake`` makes a new record each time.
    """

    #: All chunks with lower numbers have arrived.
    next_sequence_id: int = 0
    #: Chunks behind a gap.
    buffered_chunks: int = 0
    received_bytes: int = 0
    duplicates: int = 0
    #: Whether the end of the input has arrived.
    ended: bool = False
    #: Whether no more input is accepted, ended or not.
    closed: bool = False
    #: The limit of ``received_bytes``; None for no limit.
    max_total_bytes: int | None = None
    #: The offset that follows the input, where chunks have offsets instead of numbers.
    next_offset: int | None = None

    def take_late(self, content: ChunkOrRefusal) -> None:
        """Count a chunk that arrives after the session has ended.

        A repeated chunk is a duplicate, and another end of input is ignored. If the answer was complete before its
        input, the rest of the input is accepted up to its end, and discarded.

        Raises the error of a chunk that was refused, SessionConflict for input that is not accepted any more, and
        PayloadTooLarge beyond ``max_total_bytes``.
        """
        if isinstance(content, InvalidRequest):
            raise content
        number = content.sequence_id
        if self._is_duplicate(content):
            self.duplicates += 1
            return
        if self.ended or self.closed:
            if isinstance(content, InputChunk) and content.is_bare_end:
                return
            by_offset = isinstance(content, InputChunk) and content.offset is not None
            raise SessionConflict(
                "the session has already ended", param="offset" if by_offset else "sequence_id", sequence_id=number
            )
        size = 0 if isinstance(content, RefusedChunk) else len(content.payload)
        if self.max_total_bytes is not None and self.received_bytes + size > self.max_total_bytes:
            raise PayloadTooLarge(f"the input exceeds {self.max_total_bytes} bytes in total", param="payload")
        if isinstance(content, InputChunk) and content.offset is not None:
            self.next_offset = offset_end(content)
        self.next_sequence_id = (self.next_sequence_id if number is None else number) + 1
        if isinstance(content, RefusedChunk):
            raise content.error
        self.received_bytes += size
        self.ended = content.end_of_input

    def _is_duplicate(self, content: InputChunk | RefusedChunk) -> bool:
        if isinstance(content, InputChunk) and content.offset is not None:
            return bool(content.payload) and offset_end(content) <= (self.next_offset or 0)
        number = content.sequence_id
        return number is not None and number < self.next_sequence_id
