"""A process that may open no more files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
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
