"""InputProgress: how much of an input has arrived, also when the work on it is over."""

from __future__ import annotations

from dataclasses import dataclass

from omni_ws.core.chunks import InputChunk
from omni_ws.core.offsets import offset_end
from omni_ws.errors import InvalidRequest, PayloadTooLarge, SessionConflict
from omni_ws.wire.append_body import ChunkOrRefusal
from omni_ws.wire.frames import RefusedChunk


@dataclass(slots=True)
class InputProgress:
    """``closed`` says that nothing more is taken, whether the input ended or not; ``max_total_bytes`` is all that may
    come, None: as much as it likes."""

    next_sequence_id: int = 0
    buffered_chunks: int = 0
    received_bytes: int = 0
    duplicates: int = 0
    ended: bool = False
    closed: bool = False
    max_total_bytes: int | None = None
    #: Where the next piece begins, where chunks say that instead of a number.
    next_offset: int | None = None

    def take_late(self, content: ChunkOrRefusal) -> None:
        """A chunk that comes when the work is over.

        A retry of what was taken is no error, nor is another end. Where the answer was complete before the input, what
        is left of the input is counted, up to its end. For anything else raises SessionConflict; PayloadTooLarge where
        it is too much.
        """
        if isinstance(content, InvalidRequest):
            raise content
        number = content.sequence_id
        if self._came_before(content):
            self.duplicates += 1
            return
        if self.ended or self.closed:
            if isinstance(content, InputChunk) and content.is_bare_end:
                return
            raise SessionConflict("the session has ended already", param="sequence_id", sequence_id=number)
        size = 0 if isinstance(content, RefusedChunk) else len(content.payload)
        if self.max_total_bytes is not None and self.received_bytes + size > self.max_total_bytes:
            raise PayloadTooLarge(f"the input has more than {self.max_total_bytes} bytes in all", param="payload")
        if isinstance(content, InputChunk) and content.offset is not None:
            self.next_offset = offset_end(content)
        self.next_sequence_id = (self.next_sequence_id if number is None else number) + 1
        if isinstance(content, RefusedChunk):
            raise content.error
        self.received_bytes += size
        self.ended = content.end_of_input

    def _came_before(self, content: InputChunk | RefusedChunk) -> bool:
        if isinstance(content, InputChunk) and content.offset is not None:
            return bool(content.payload) and offset_end(content) <= (self.next_offset or 0)
        number = content.sequence_id
        return number is not None and number < self.next_sequence_id
