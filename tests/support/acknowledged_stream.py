"""An InputStream with the acknowledgements of a connection, for tests without one. Time comes in as an argument."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from omni_ws.core.chunks import InputChunk
from omni_ws.core.input_stream import InputStream
from omni_ws.core.stream_events import ReceivedInput, StreamEvent
from omni_ws.transport.native.acknowledgements import Acknowledgements, Waiting


class AcknowledgedStream(InputStream):
    """Every call that stands for a frame may make an acknowledgement due, which ``take_ack`` sends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Whether one is to be sent.
        self.ack_due = False
        self.acks = Acknowledgements(self, self, self._send)

    def take_ack(self) -> ReceivedInput:
        self.ack_due = False
        self.acks.sent()
        self.acks.stop()
        return self.received()

    @property
    def acks_at(self) -> float:
        """When one is due if no more frames arrive."""
        return self.acks.due_at

    def wait(self, when: float, waiting: Waiting) -> None:
        """As the clock of the acknowledgements."""
        assert waiting.due_at == when

    def _send(self) -> None:
        self.ack_due = True

    def receive_chunk(self, chunk: InputChunk, *, now: float) -> Sequence[StreamEvent]:
        try:
            return super().receive_chunk(chunk, now=now)
        finally:
            self.acks.received(now)

    def refuse(self, sequence_id: int, *, now: float) -> Sequence[StreamEvent]:
        try:
            return super().refuse(sequence_id, now=now)
        finally:
            self.acks.received(now)

    def finish(self, *, now: float) -> Sequence[StreamEvent]:
        try:
            return super().finish(now=now)
        finally:
            self.acks.received(now)

    def cancel(self, *, now: float) -> None:
        super().cancel(now=now)
        self.acks.received(now)

    def handle_timer(self, *, now: float) -> None:
        super().handle_timer(now=now)
        if now >= self.acks.due_at < math.inf:
            self.acks.acknowledge()
