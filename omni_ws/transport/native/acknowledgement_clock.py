"""AcknowledgementClock: tells connections when an acknowledgement has waited long enough."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol


class Waiting(Protocol):
    #: When its acknowledgement is due, on the loop's clock; infinite where none is.
    ack_at: float

    def acknowledge(self) -> None:
        """It is due now. May not raise."""


class AcknowledgementClock:
    """One timer for all connections of a server.

    The delay is the same for all of them, so that who waits first is due first. Nearly every acknowledgement goes out
    earlier, with a chunk, and then nothing is cancelled or armed: what is found to have gone is passed over.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[float, Waiting]] = deque()
        self._armed = False

    def wait(self, when: float, waiting: Waiting) -> None:
        """Call ``waiting.acknowledge`` at ``when``, if its ``ack_at`` is still that."""
        self._waiting.append((when, waiting))
        if not self._armed:
            self._arm(when)

    def _arm(self, when: float) -> None:
        self._armed = True
        asyncio.get_running_loop().call_at(when, self._strike, when)

    def _strike(self, struck: float) -> None:
        self._armed = False
        # Loops round: a timer that fires a little early would be armed again and again until its time has come.
        now = max(asyncio.get_running_loop().time(), struck)
        while self._waiting:
            when, waiting = self._waiting[0]
            if waiting.ack_at == when:
                if when > now:
                    self._arm(when)
                    return
                waiting.acknowledge()
            self._waiting.popleft()
