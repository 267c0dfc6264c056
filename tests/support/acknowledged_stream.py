"""An InputStream with the acknowledgements of a connection, for tests without one. Time comes in as an argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from omni_ws.core.input_stream import InputStream
from omni_ws.transport.native.endpoint import Acknowledgements

Method = TypeVar("Method", bound=Callable[..., Any])


def _frame(method: Method) -> Method:
    """A method that stands for a frame, whatever it makes of that."""

    @wraps(method)
    def received(stream: AcknowledgedStream, *arguments: Any, now: float) -> Any:
        try:
            return method(stream, *arguments, now=now)
        finally:
            stream.acks.received(now)

    return cast("Method", received)


class AcknowledgedStream(InputStream):
    """Every call that stands for a frame may make an acknowledgement due, which ``take_ack`` sends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: Whether one is to be sent.
        self.ack_due = False
        self.acks = Acknowledgements(self, self.wait, self._send)

    def take_ack(self) -> tuple[int, int, int]:
        """What it says: the next number, the chunks that wait for a missing one, the bytes that were accepted."""
        self.ack_due = False
        self.acks.sent()
        self.acks.stop()
        return self.reorder.next_sequence_id, self.buffered_chunks, self.received_bytes

    @property
    def acks_at(self) -> float:
        """When one is due if no more frames arrive."""
        return self.acks.due_at

    def wait(self, when: float, waiting: Acknowledgements) -> None:
        """As the clock of the acknowledgements."""
        assert waiting.due_at == when

    def _send(self) -> None:
        self.ack_due = True

    receive_chunk = _frame(InputStream.receive_chunk)
    refuse = _frame(InputStream.refuse)
    finish = _frame(InputStream.finish)
    cancel = _frame(InputStream.cancel)

    def handle_timer(self, *, now: float) -> None:
        super().handle_timer(now=now)
        if now >= self.acks.due_at < math.inf:
            self.acks.acknowledge()
