"""The cores of the machine that this process may use."""

from __future__ import annotations

import os


def cores() -> int:
    """Return how many there are. A container or ``taskset`` may leave a process fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
