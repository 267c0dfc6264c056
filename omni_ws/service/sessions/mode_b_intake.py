"""ChunkIntake: the input of a Mode B session, whose chunks arrive in HTTP requests of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from omni_ws.core.chunks import InputChunk
from omni_ws.core.request_input import SessionState
from omni_ws.errors import InvalidRequest
from omni_ws.service.conversation.conversation import Conversation
from omni_ws.service.sessions.mode_b_progress import InputProgress
from omni_ws.wire.frames import RefusedChunk
from omni_ws.wire.streaming_body import ChunkOrRefusal


class ChunkIntake:
    """Passes chunks to a conversation of a single request, and supervises gaps between them.

    Each HTTP request may be delayed or repeated, so a gap may stay open for as long as the input does. The reorder
    time-out begins only when the end of the input is announced.
    """

    def __init__(self, conversation: Conversation, *, now: Callable[[], float]) -> None:
        self._conversation = conversation
        self._stream = conversation.stream
        self._stream.limits = replace(self._stream.limits, reorder_timeout=math.inf)
        self._now = now
        self._gap_deadline = math.inf
        #: Since when the time of the gap stands still.
        self._held_since: float | None = None

    @property
    def started(self) -> bool:
        """Whether work on the request has started, also where the engine has not answered yet.

        Input that has ended has started, unless it was empty.
        """
        current = self._stream.current
        return self._stream.received_bytes > 0 if current is None else current.state is SessionState.STARTED

    @property
    def has_content(self) -> bool:
        """Whether any byte of input has arrived, if only behind a gap."""
        return bool(self._stream.received_bytes or self._stream.held_bytes)

    @property
    def full(self) -> bool:
        """Whether the input should wait for the engine."""
        return self._conversation.input_full()

    @property
    def refused(self) -> bool:
        """Whether the request failed before work on it began, as one does whose input ends empty."""
        return self._conversation.refused

    @property
    def progress(self) -> InputProgress:
        """A record of the input as it is now."""
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
        """Accept a chunk. Raises the error that it is refused with, having used up its number if it has one."""
        self._stream.touch(now=self._now())
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
        """End the input, behind the gap if one is open. Idempotent."""
        self._conversation.finish()
        self._end_announced()

    def touch(self) -> None:
        """Restart the session time-out: the client is active."""
        self._stream.touch(now=self._now())

    def suspend_timeout(self, *, suspended: bool) -> None:
        """Keep the session time-out from ending the session, or let it again: at once where it has passed meanwhile."""
        self._stream.suspended = suspended

    def hold_clocks(self, *, held: bool) -> None:
        """Let the time of the gap stand still, or go on: what may fill it is not read."""
        if held == (self._held_since is not None):
            return
        if held:
            self._held_since = self._now()
        else:
            assert self._held_since is not None
            self._gap_deadline += self._now() - self._held_since
            self._held_since = None

    def get_timer(self) -> float | None:
        """When to call ``handle_timer``, on the loop's clock; None for never."""
        when = self._conversation.get_timer()
        counts = self._stream.gap_since is not None and self._held_since is None
        gap = self._gap_deadline if counts else math.inf
        if when is not None:
            return min(when, gap)
        return None if gap == math.inf else gap

    def handle_timer(self, now: float) -> None:
        """Raise SequenceGap or SessionTimeout if it is due."""
        if self._held_since is None and self._stream.gap_since is not None and now >= self._gap_deadline:
            raise self._stream.gap_error()
        self._conversation.handle_timer(now)

    def _end_announced(self) -> None:
        if self._stream.gap_since is not None and self._gap_deadline == math.inf:
            begins = self._now() if self._held_since is None else self._held_since
            self._gap_deadline = begins + self._conversation.limits.stream.reorder_timeout

    def _use_up(self, number: int | None) -> None:
        # Without numbers there are no gaps to leave.
        if number is not None and self._stream.numbered is not False:
            self._conversation.refuse_chunk(number)
