"""A disk without room, and a process that may open no more files."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest


@contextmanager
def full_disk(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on a disk that is full: a small one of its own where that may be mounted, else writing is made to fail.

    New files can be made there as on any full disk, and stay empty.
    """
    folder.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,mode=700", "none", str(folder)]
    mounted = sys.platform == "linux" and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if not mounted:
        with patch.context() as failing:
            failing.setattr(os, "write", _no_space)
            failing.setattr("omni_ws.service.process.TemporaryFile", _no_space)
            yield folder
        return
    try:
        filling = folder / "filling"
        filling.write_bytes(bytes(4096))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def _no_space(*arguments: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@contextmanager
def no_more_files() -> Iterator[None]:
    """Whatever opens a file, or gets one, fails meanwhile; what is open stays so."""
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, allowed[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
