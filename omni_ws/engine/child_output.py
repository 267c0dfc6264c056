"""The standard output of a process that this server started, and that answers there."""

from __future__ import annotations

import os
from typing import BinaryIO

# Apart from ``child_process``: these processes do without asyncio, which takes memory and time to import.


def take_over_stdout() -> BinaryIO:
    """Return the pipe to the server; what C libraries print goes to standard error instead of into it."""
    target = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return target
