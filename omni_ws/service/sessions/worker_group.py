"""WorkerGroup: what a process knows of a server that consists of several, its workers."""

from __future__ import annotations

import abc
import re
from collections.abc import Awaitable, Callable
from typing import Any, Final

from prometheus_client.metrics_core import Metric

from omni_ws.service.sessions.shared_counts import SharedCounts, WorkerRow, WorkerState

#: The number of a worker, in the name of a file.
_WORKER: Final = re.compile(r"_w(\d{1,9})_")
#: Questions: for the metrics of a worker; to know a client secret, too; for what was said in answers; to start and to
#: stop a profile, too.
METRICS: Final = "metrics"
KNOW_SECRET: Final = "know client secret"
SPOKEN_ANSWERS: Final = "spoken answers"
START_PROFILE: Final = "start profile"
STOP_PROFILE: Final = "stop profile"

#: What a worker does when the others ask: gets one argument, and returns what they are to know.
Handler = Callable[[Any], Awaitable[Any]]


class WorkerGroup(abc.ABC):
    """The workers of a server, as one of them sees them."""

    def __init__(self, serial: int, wanted: int, counts: SharedCounts, row: WorkerRow) -> None:
        #: The number of this worker; no other worker of the server ever has the same.
        self.serial = serial
        #: How many workers the server is to have.
        self.wanted = wanted
        self.counts = counts
        self.row = row
        self._handlers: dict[str, Handler] = {}

    @property
    def name(self) -> str:
        """What the worker is called, in ids and in the log."""
        return f"w{self.serial}"

    def on(self, question: str, handler: Handler) -> None:
        """Have ``handler`` answer a question of the others."""
        self._handlers[question] = handler

    @abc.abstractmethod
    async def ask_others(self, question: str, argument: Any = None) -> list[Any]:
        """The answers of the other workers that run; one that ends meanwhile gives none."""

    @abc.abstractmethod
    async def all_metrics(self, own: list[Metric]) -> list[Metric]:
        """The metrics of the server, of which ``own`` are those of this worker."""

    def owns_file(self, name: str) -> bool:
        """Whether this worker looks after a recording: that of a worker that it follows, or of no worker."""
        found = _WORKER.search(name)
        return (0 if found is None else int(found[1]) - 1) % self.wanted == (self.serial - 1) % self.wanted

    @property
    def ready(self) -> int:
        """How many workers take new sessions."""
        return sum(row.serial != 0 and not row.hung and row.state is WorkerState.OK for row in self.counts.rows)

    @property
    def hung(self) -> list[int]:
        """The numbers of the workers that do not answer the supervisor."""
        return sorted(row.serial for row in self.counts.rows if row.serial and row.hung)

    @property
    def engine_requests(self) -> int:
        """Requests in the engines of all workers."""
        return sum(row.engine_requests for row in self.counts.rows)

    @property
    def connections_elsewhere(self) -> int:
        """Open connections of the other workers, with those on their way to one."""
        rows = (row for row in self.counts.rows if row is not self.row)
        return sum(row.all_connections for row in rows)
