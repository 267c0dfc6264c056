"""The cores of the machine that this process may use."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

_MEMBERSHIPS: Final = Path("/proc/self/cgroup")
_CGROUPS: Final = Path("/sys/fs/cgroup")

_processes = 1


def share_cores(processes: int) -> None:
    """From now on count only this process's share of the cores: ``processes`` of them do the same work."""
    global _processes
    _processes = processes


def cores() -> int:
    """Return how many there are, at least 1. A container or ``taskset`` may leave a process fewer than the machine has.

    A quota of CPU time counts as so many whole cores: more threads than that would stall one another.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min(allowed, _quota(_MEMBERSHIPS, _CGROUPS))) // _processes)


def _quota(memberships: Path, cgroups: Path) -> float:
    """Return the cores whose time the control groups of this process leave it, of either version; infinite if all."""
    try:
        lines = memberships.read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return float("inf")
    quotas = [float("inf")]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, read = cgroups, _quota_of_version_2
        elif "cpu" in controllers.split(","):
            root, read = cgroups / "cpu", _quota_of_version_1
        else:
            continue
        # A group above limits its members, too. A container may see the path that the group has outside of it.
        inside = PurePosixPath(path.lstrip("/"))
        for group in (inside, *inside.parents):
            with suppress(OSError, ValueError, ZeroDivisionError):  # no such group, or none that has a quota
                quotas.append(read(root / group))
    return min(quotas)


def _quota_of_version_2(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text("utf-8").split()
    return float("inf") if quota == "max" else int(quota) / int(period)


def _quota_of_version_1(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text("utf-8"))
    return float("inf") if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text("utf-8"))
