"""ChunkIntake: the input of one conversation of one request, whose chunks come in HTTP requests of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from omni_ws.core.chunks import InputChunk
from omni_ws.core.session import SessionState
from omni_ws.errors import InvalidRequest
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.input_progress import InputProgress
from omni_ws.wire.append_body import ChunkOrRefusal
from omni_ws.wire.frames import RefusedChunk


class ChunkIntake:
    """Any of those requests may be late, or repeated: a gap may be open until the end of the input is announced, and
    only from then on has it the time that gaps have.
    """

    def __init__(self, conversation: Conversation, *, now: Callable[[], float]) -> None:
        self._conversation = conversation
        self._stream = conversation.stream
        self._stream.limits = replace(self._stream.limits, reorder_timeout=math.inf)
        self._now = now
        self._gap_deadline = math.inf

    @property
    def started(self) -> bool:
        """Whether work has started, known before the engine has said anything. What ends non-empty has started."""
        current = self._stream.current
        return self._stream.received_bytes > 0 if current is None else current.state is SessionState.STARTED

    @property
    def has_content(self) -> bool:
        """Whether any byte has come, also behind a gap."""
        return bool(self._stream.received_bytes or self._stream.held_bytes)

    @property
    def full(self) -> bool:
        """Whether the engine is behind."""
        return self._conversation.input_full()

    @property
    def refused(self) -> bool:
        """Whether the request has failed before any work on it began; an input without contents does so at its end."""
        return self._conversation.refused

    @property
    def progress(self) -> InputProgress:
        received = self._stream.received()
        return InputProgress(
            next_sequence_id=received.next_sequence_id,
            buffered_chunks=received.buffered_chunks,
            received_bytes=received.received_bytes,
            duplicates=self._stream.duplicates,
            ended=self._stream.opened and self._stream.current is None,
            next_offset=None if self._stream.offsets is None else self._stream.offsets.next_offset,
            max_total_bytes=self._stream.limits.max_total_bytes,
        )

    def take(self, content: ChunkOrRefusal) -> None:
        """Raises what it is refused for; its number is used up then, where it has one."""
        match content:
            case RefusedChunk(sequence_id=sequence_id, error=error):
                self._use_up(sequence_id)
                raise error
            case InputChunk(sequence_id=number):
                try:
                    self._conversation.configuration.check_chunk(content)
                except InvalidRequest:
                    self._use_up(number)
                    raise
                self._conversation.receive_chunk(content, now=self._now())
                if content.end_of_input:
                    self._end_announced()
            case error:
                raise error

    def finish(self) -> None:
        """The end of the input; where a gap is open, behind it. Idempotent."""
        self._conversation.finish()
        self._end_announced()

    def touch(self) -> None:
        """A sign of life of the client."""
        self._stream.touch(now=self._now())

    def get_timer(self) -> float | None:
        when = self._conversation.get_timer()
        gap = self._gap_deadline if self._stream.gap_since is not None else math.inf
        if when is not None:
            return min(when, gap)
        return None if gap == math.inf else gap

    def handle_timer(self, now: float) -> None:
        """Raises SequenceGap or SessionTimeout when their time has come."""
        if self._stream.gap_since is not None and now >= self._gap_deadline:
            raise self._stream.gap_error()
        self._conversation.handle_timer(now)

    def _end_announced(self) -> None:
        if self._stream.gap_since is not None and self._gap_deadline == math.inf:
            self._gap_deadline = self._now() + self._conversation.limits.stream.reorder_timeout

    def _use_up(self, number: int | None) -> None:
        """Chunks without numbers have no gaps that a number could leave."""
        if number is not None and self._stream.numbered is not False:
            self._conversation.refuse_chunk(number)
