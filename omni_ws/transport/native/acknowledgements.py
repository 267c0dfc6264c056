"""When a connection acknowledges its input: delayed and grouped, as those of RFC 9000, 13.2.

An acknowledgement is sent after ACK_EVERY_CHUNKS accepted chunks, or ACK_DELAY_SEC after the first of them, whichever
is first. What a client should know at once is acknowledged at once: a duplicate, a filled gap, an end of its input, and
chunks that were discarded. HTTP has no acknowledgements: an InputStream only counts what happens.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from omni_ws.core.input_stream import InputStream

ACK_EVERY_CHUNKS: Final = 16
ACK_DELAY_SEC: Final = 0.1
#: Where chunks arrive steadily, the acknowledgement is sent this long before its time, together with a chunk: waking up
#: for it alone costs as much as a chunk does.
ACK_EARLY_SEC: Final = 0.025


class Waiting(Protocol):
    """Has an acknowledgement that is due at some time."""

    #: On the loop's clock; infinite where none is due.
    due_at: float

    def acknowledge(self) -> None:
        """Called at ``due_at``. May not raise."""


class Clock(Protocol):
    def wait(self, when: float, waiting: Waiting) -> None:
        """Call ``waiting.acknowledge`` at ``when``, if its ``due_at`` is still that."""


class AcknowledgementClock:
    """The Clock of all connections of a server, with one timer.

    The delay is the same for all connections, so that the first to wait is the first to be due. Nearly every
    acknowledgement is sent earlier, with a chunk, and then no timer is cancelled or armed: an entry whose time has
    changed is skipped.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Waiting]] = deque()
        self._armed = False

    def wait(self, when: float, waiting: Waiting) -> None:
        self._waiting.append((when, waiting))
        if not self._armed:
            self._arm(when)

    def _arm(self, when: float) -> None:
        self._armed = True
        asyncio.get_running_loop().call_at(when, self._on_timer, when)

    def _on_timer(self, due: float) -> None:
        self._armed = False
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(asyncio.get_running_loop().time(), due)
        while self._waiting:
            when, waiting = self._waiting[0]
            if waiting.due_at == when:
                if when > now:
                    self._arm(when)
                    return
                waiting.acknowledge()
            self._waiting.popleft()


class Acknowledgements:
    """The acknowledgements of one connection.

    ``send`` is called when one is due. Whoever sends one, for this or for any other reason, calls ``sent``.
    """

    __slots__ = ("_acknowledged", "_clock", "_reorder", "_reported", "_send", "_stream", "due_at")

    def __init__(self, stream: InputStream, clock: Clock, send: Callable[[], None]) -> None:
        self._stream = stream
        self._reorder = stream.reorder
        self._clock = clock
        self._send = send
        self.due_at = math.inf
        #: What ``next_sequence_id`` and ``notable_events`` of the stream were in the last acknowledgement.
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = stream.notable_events

    def received(self, now: float) -> None:
        """A frame was received at ``now``, and the stream has processed it."""
        chunks = self._reorder.next_sequence_id - self._acknowledged
        if (
            chunks >= ACK_EVERY_CHUNKS
            or self._stream.notable_events != self._reported
            or now + ACK_EARLY_SEC >= self.due_at
        ):
            self.acknowledge()
        elif chunks and self.due_at == math.inf:
            self.due_at = now + ACK_DELAY_SEC
            self._clock.wait(self.due_at, self)

    @property
    def pending(self) -> bool:
        """Whether there is anything to acknowledge."""
        return self._reorder.next_sequence_id != self._acknowledged or self._stream.notable_events != self._reported

    def acknowledge(self) -> None:
        """Send now, if there is anything to acknowledge."""
        self.due_at = math.inf
        if self.pending:
            self._send()

    def sent(self) -> None:
        """The client knows all that the stream has received."""
        self._acknowledged = self._reorder.next_sequence_id
        self._reported = self._stream.notable_events

    def stop(self) -> None:
        """The connection is over: the clock calls no more."""
        self.due_at = math.inf
