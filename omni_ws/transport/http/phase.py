"""Phase: what an HTTP connection is doing."""

from __future__ import annotations

import enum
from typing import Final


class Phase(enum.Enum):
    """What the next bytes from the peer mean, and thereby what the connection does with them.

    ============ ======================================================= ========================================
    phase        bytes from the peer                                     next
    ============ ======================================================= ========================================
    HEAD         a request head, or nothing yet                          EXCHANGE, HANDED_OVER; on errors and
                                                                         deadlines LINGER or CLOSED
    EXCHANGE     the body, then pipelined requests                       HEAD, LINGER, CLOSED
    LINGER       discarded: the last response is sent, and may need a    CLOSED
                 moment to be read
    HANDED_OVER  read by another protocol                                LINGER or CLOSED if its start failed
    CLOSED       ignored                                                 none
    ============ ======================================================= ========================================
    """

    HEAD = enum.auto()
    EXCHANGE = enum.auto()
    LINGER = enum.auto()
    HANDED_OVER = enum.auto()
    CLOSED = enum.auto()


#: The phases that may follow each.
NEXT_PHASES: Final = {
    Phase.HEAD: frozenset({Phase.EXCHANGE, Phase.HANDED_OVER, Phase.LINGER, Phase.CLOSED}),
    Phase.EXCHANGE: frozenset({Phase.HEAD, Phase.LINGER, Phase.CLOSED}),
    Phase.LINGER: frozenset({Phase.CLOSED}),
    Phase.HANDED_OVER: frozenset({Phase.LINGER, Phase.CLOSED}),
    Phase.CLOSED: frozenset({Phase.CLOSED}),
}
