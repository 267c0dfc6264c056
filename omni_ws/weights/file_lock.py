"""A lock between processes, and between threads of one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from omni_ws.weights.fetching import Fetching, Progress

_LOOK_EVERY_SEC: Final = 0.1


@contextmanager
def locked(path: Path, name: str, fetching: Fetching) -> Iterator[None]:
    """Holds the lock of a file, which is created. The end of a process releases it. Raises WeightsError if given up."""
    with path.open("ab") as opened:
        told = False
        while not _try(opened):
            if not told:
                fetching.progress(Progress(name, "waiting for another process that fetches it"))
                told = True
            fetching.go_on()
            fetching.stop.wait(_LOOK_EVERY_SEC)
        yield


if sys.platform == "win32":
    import msvcrt

    def _try(opened: IO[bytes]) -> bool:
        try:
            opened.seek(0)
            msvcrt.locking(opened.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _try(opened: IO[bytes]) -> bool:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
