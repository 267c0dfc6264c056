"""Pause: why a connection does not read its socket."""

from __future__ import annotations

import enum
from typing import Final


class Pause(enum.IntFlag):
    """Reasons not to read the socket."""

    NONE = 0
    #: The session has no room for input.
    SESSION = enum.auto()
    #: More than MAX_UNWRITTEN_BYTES wait to be written.
    UNWRITTEN = enum.auto()
    #: There is no session yet.
    EARLY = enum.auto()
    #: What was read waits for the next pass of the event loop.
    PASS = enum.auto()
    #: The client sent more than its key allows.
    PACE = enum.auto()
    #: Others have their turn first.
    TURN = enum.auto()


#: Reasons that may last, during which the peer may hang up unnoticed.
RESTS: Final = Pause.SESSION | Pause.UNWRITTEN | Pause.PACE
