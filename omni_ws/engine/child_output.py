"""What a process that this server started does first: with its signals and its standard output."""

from __future__ import annotations

import os
import signal
from typing import BinaryIO

# Apart from ``child_process``: these processes do without asyncio, which takes memory and time to import.


def take_over_stdout() -> BinaryIO:
    """Return the pipe to the server; what C libraries print goes to standard error instead of into it."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return target


def leave_signals_to_server() -> None:
    """Ignore the signals that a terminal or a supervisor sends to the whole process group: the server handles them."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
