"""What a worker starts with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import IO

from omni_ws.config.keys import ApiKey
from omni_ws.config.model import ServerConfig
from omni_ws.service.sessions.shared_counts import SharedCounts

#: Rows of counts for each worker that is wanted: the one that serves, its predecessor while that drains, and a
#: successor that starts.
ROWS_PER_WORKER = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The settings of one worker, as the supervisor sends them to its process."""

    config: ServerConfig = field(repr=False)
    keys: tuple[ApiKey, ...] = field(repr=False)
    serial: int
    #: How many workers the server is to have.
    wanted: int
    row: int
    port: int


def shared_counts(file: IO[bytes], config: ServerConfig, keys: Sequence[ApiKey], wanted: int) -> SharedCounts:
    """The counts of a server with these settings, in this file."""
    names = [key.name for key in keys]
    return SharedCounts(file, rows=ROWS_PER_WORKER * wanted, slots=config.limits.max_sessions, keys=names)
