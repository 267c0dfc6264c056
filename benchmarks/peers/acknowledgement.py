"""Acknowledgements of the wire protocol, as sent by every peer."""

from __future__ import annotations

import argparse
import time
from typing import Final

EVERY_CHUNKS: Final = 16
#: The wire's 100 ms, less a frame of 20 ms and some jitter: the next chunk would come too late to acknowledge this one.
DELAY_SEC: Final = 0.075


class Acknowledgements:
    """Counts chunks and decides when an acknowledgement is due: every fifth chunk at 50 a second, as in our server.

    A timer would be needed to send the last one in time; the peers are spared it.
    """

    def __init__(self) -> None:
        self.accepted = 0
        self._received_bytes = 0
        self._unacknowledged = 0
        self._since = 0.0

    def accept(self, size: int) -> str | None:
        """Counts a chunk; returns the frame to send, if one is due."""
        now = time.monotonic()
        self.accepted += 1
        self._received_bytes += size
        if not self._unacknowledged:
            self._since = now
        self._unacknowledged += 1
        if self._unacknowledged < EVERY_CHUNKS and now < self._since + DELAY_SEC:
            return None
        self._unacknowledged = 0
        return (
            f'{{"type":"input_ack","next_sequence_id":{self.accepted},"buffered_chunks":0,'
            f'"received_bytes":{self._received_bytes},"credit_bytes":67108864}}'
        )


def arguments() -> argparse.Namespace:
    """Parses ``--port`` and ``--echo``, which returns every chunk instead of acknowledging it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--echo", action="store_true")
    return parser.parse_args()
