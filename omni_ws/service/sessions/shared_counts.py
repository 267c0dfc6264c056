"""Counts that the workers of a server share, in a file that all of them map into memory; and WorkerGroup.

The file holds integers and floats of 8 bytes: a few for the server, a row for each worker, and a row for each key. The
supervisor owns the file and assigns the rows to workers. When a worker has ended, the supervisor frees its row, and
thus the slots that were counted there (``free``).

There is no lock, so that no process ever waits for another, which may hang. Each cell has one writer, its worker; a
total is the sum over the rows. Therefore a worker counts a slot first and then checks the limit (``Admission.take``):
if two workers take the last slot at the same time, both may be refused, but never both admitted.
"""

from __future__ import annotations

import abc
import hashlib
import mmap
import re
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from typing import IO, Any, Final

from prometheus_client.metrics_core import Metric

from omni_ws.core.quota import DailyCounts, DailyLimits, DailyUse, TokenBucket, UsedToday
from omni_ws.errors import RateLimited
from omni_ws.service.sessions.admission import SlotCounts

_CELL: Final = 8
#: Cells of the server: the first says whether all workers have been ready once.
_SERVER_CELLS: Final = 8
#: Cells of a worker before its slots, and of a key.
_WORKER_CELLS: Final = 16
_KEY_CELLS: Final = 8
#: Cells of a key in the row of a worker: the day; the tokens and milliseconds of audio used on that day; the number of
#: running requests; and for each rate, as floats, the seconds spent and the seconds lost (see _SharedBucket).
_USE_CELLS: Final = 8
_RUNNING: Final = 3
_RATE: Final = 4
#: Stands for the holder None in a row.
_NOBODY: Final = 1
#: Places in the cells of a key: of its rates, and of its daily amounts, both as used by workers that have ended.
_RATES: Final[Mapping[str, int]] = {"requests": 0, "input": 2}
_DAY: Final = 4
#: Tokens by which a sum of seconds may be wrong, as floats are rounded.
_ROUNDING: Final = 1e-3


class WorkerState(IntEnum):
    """The state of a worker, for the other workers."""

    STARTING = 0
    OK = 1
    UNHEALTHY = 2
    DRAINING = 3


class _Cell(IntEnum):
    """Positions of cells in the row of a worker. ``RECEIVED``: connections that the worker received since its start.

    The supervisor writes the cells from ``GIVEN`` on: connections that it gave to the worker since the worker's start,
    and whether the worker does not answer.
    """

    SERIAL = 0
    STATE = 1
    CONNECTIONS = 2
    WEBSOCKETS = 3
    RECEIVED = 4
    ENGINE_REQUESTS = 5
    SLOTS = 6
    GIVEN = 7
    HUNG = 8


class WorkerRow:
    """The counts of one worker, which alone writes them while it runs; before and after, the supervisor does.

    ``given`` and ``hung`` are written by the supervisor at all times.
    """

    def __init__(self, cells: memoryview[int], floats: memoryview[float], index: int, keys: Sequence[str]) -> None:
        self._cells = cells
        self.index = index
        first = len(cells) - len(keys) * _USE_CELLS
        starts = range(first, len(cells), _USE_CELLS)
        #: By key name, the cells with the daily use and the running requests of this worker.
        self.uses = {name: cells[start : start + _USE_CELLS] for name, start in zip(keys, starts, strict=True)}
        #: By key name, the cells with the seconds that this worker has spent of the key's rates.
        self.rates = {
            name: floats[start + _RATE : start + _USE_CELLS] for name, start in zip(keys, starts, strict=True)
        }

    @property
    def serial(self) -> int:
        """The number of the row's worker; 0 for a free row."""
        return self._cells[_Cell.SERIAL]

    @property
    def state(self) -> WorkerState:
        return WorkerState(self._cells[_Cell.STATE])

    @property
    def connections(self) -> int:
        """Open connections that were not upgraded to WebSockets."""
        return self._cells[_Cell.CONNECTIONS]

    @property
    def websockets(self) -> int:
        return self._cells[_Cell.WEBSOCKETS]

    @property
    def received(self) -> int:
        """Connections that the worker has received since its start."""
        return self._cells[_Cell.RECEIVED]

    @property
    def engine_requests(self) -> int:
        return self._cells[_Cell.ENGINE_REQUESTS]

    @property
    def slots(self) -> int:
        """Slots that sessions of the worker have taken."""
        return self._cells[_Cell.SLOTS]

    @property
    def given(self) -> int:
        """Connections that the supervisor has given to the worker since its start."""
        return self._cells[_Cell.GIVEN]

    def give(self) -> None:
        """Count a connection that the supervisor gives to the worker."""
        self._cells[_Cell.GIVEN] += 1

    @property
    def all_connections(self) -> int:
        """The open connections of the worker, upgraded or not, and those on their way to it."""
        return self.connections + self.websockets + max(0, self.given - self.received)

    @property
    def hung(self) -> bool:
        """Whether the worker does not answer the supervisor."""
        return self._cells[_Cell.HUNG] == 1

    def note_hung(self, hung: bool) -> None:
        self._cells[_Cell.HUNG] = hung

    def use(self, serial: int) -> None:
        """Clear the row, and assign it to the worker with number ``serial``; 0 frees the row."""
        for cell in _Cell:
            self._cells[cell] = 0
        for cells in self.uses.values():
            cells[:] = memoryview(array("q", bytes(_USE_CELLS * _CELL)))
        self._cells[_Cell.SERIAL] = serial

    def note(self, *, state: WorkerState, connections: int, websockets: int, engine_requests: int) -> None:
        self._cells[_Cell.STATE] = state
        self._cells[_Cell.CONNECTIONS] = connections
        self._cells[_Cell.WEBSOCKETS] = websockets
        self._cells[_Cell.ENGINE_REQUESTS] = engine_requests

    def receive(self) -> None:
        """Count a connection that the worker has received."""
        self._cells[_Cell.RECEIVED] += 1

    def holders(self) -> list[int]:
        """Return the hash of the holder of each slot."""
        return self._cells[_WORKER_CELLS : _WORKER_CELLS + self.slots].tolist()

    def add(self, holder: int) -> None:
        self._cells[_WORKER_CELLS + self.slots] = holder
        self._cells[_Cell.SLOTS] += 1

    def remove(self, holder: int) -> None:
        last = self.slots - 1
        place = self.holders().index(holder)
        self._cells[_WORKER_CELLS + place] = self._cells[_WORKER_CELLS + last]
        self._cells[_Cell.SLOTS] = last


class SharedCounts:
    """The counts of all workers. Each process has an object of its own, mapped to the same file."""

    def __init__(self, file: IO[bytes], *, rows: int, slots: int, keys: Sequence[str]) -> None:
        """Map ``file``, resized to ``rows`` rows, one for each worker, and in each row ``slots`` cells for sessions.

        ``keys`` are the names of all API keys, in the same order in every process.
        """
        row_cells = _WORKER_CELLS + slots + 1 + len(keys) * _USE_CELLS
        first_key = _SERVER_CELLS + rows * row_cells
        size = (first_key + len(keys) * _KEY_CELLS) * _CELL
        file.truncate(size)
        view = memoryview(mmap.mmap(file.fileno(), size))
        cells: memoryview[int] = view.cast("q")
        floats: memoryview[float] = view.cast("d")
        self._server = cells[:_SERVER_CELLS]
        starts = range(_SERVER_CELLS, first_key, row_cells)
        places_of_rows = [slice(start, start + row_cells) for start in starts]
        self.rows = [WorkerRow(cells[row], floats[row], index, keys) for index, row in enumerate(places_of_rows)]
        starts = range(first_key, size // _CELL, _KEY_CELLS)
        places = {name: slice(start, start + _KEY_CELLS) for name, start in zip(keys, starts, strict=True)}
        self._keys = {name: cells[place] for name, place in places.items()}
        self._rates = {name: floats[place] for name, place in places.items()}

    @property
    def started(self) -> bool:
        """Whether all workers have been ready at least once."""
        return self._server[0] == 1

    def note_started(self) -> None:
        self._server[0] = 1

    def take_row(self, serial: int) -> WorkerRow:
        """Assign a free row to a new worker, and return it. Raises RuntimeError if there is none."""
        for row in self.rows:
            if not row.serial:
                row.use(serial)
                return row
        raise RuntimeError("all rows of the workers are in use")

    def free(self, row: WorkerRow) -> None:
        """Free the row of a worker that has ended, and thus the slots of its sessions. Daily use stays counted."""
        for name, cells in row.uses.items():
            _add_use(self._keys[name][_DAY:], cells[0], tokens=cells[1], audio_ms=cells[2])
            ended, rates = self._rates[name], row.rates[name]
            for place in _RATES.values():
                ended[place] += rates[place]
                ended[place + 1] = max(ended[place + 1], rates[place + 1])
        row.use(0)

    def spent(self, key: str, place: int) -> float:
        """Return the seconds that all workers have spent of a rate of the key; see _SharedBucket.

        ``place`` is the index of the rate's cell.
        """
        return self._rates[key][place] + sum(row.rates[key][place] for row in self.rows)

    def lost(self, key: str, place: int) -> float:
        """Return the seconds that passed while the bucket of the key's rate was full; see _SharedBucket."""
        return max(self._rates[key][place + 1], *(row.rates[key][place + 1] for row in self.rows))

    def _uses(self, name: str) -> list[list[int]]:
        """Return the use of a key by ended workers, then by each running one: day, tokens, ms, running requests."""
        ended = [*self._keys[name][_DAY : _DAY + 3], 0]
        return [ended, *(row.uses[name].tolist() for row in self.rows if row.serial)]

    def used(self, name: str, day: int) -> UsedToday:
        """Return what the key has used on ``day``, or on later days, which only a wrong clock can have counted."""
        found = [one for one in self._uses(name) if one[0] >= day]
        return UsedToday(sum(one[1] for one in found), sum(one[2] for one in found))

    def last_day(self, name: str) -> int:
        """Return the last day on which the key was used."""
        return max(one[0] for one in self._uses(name))

    def running(self, name: str) -> int:
        """Return how many requests of the key have begun and not ended."""
        return sum(one[3] for one in self._uses(name))

    def daily(self) -> DailyCounts:
        """Return the last day on which any key was used, and the use of each key on that day."""
        days = {name: self.last_day(name) for name in self._keys}
        day = max(days.values(), default=0)
        return day, {name: self.used(name, day) for name, last in days.items() if day and last == day}

    def set_daily(self, day: int, used: Mapping[str, UsedToday]) -> None:
        """Set what each key had used before the server started."""
        for name, counts in used.items():
            if name in self._keys:
                self._keys[name][_DAY], self._keys[name][_DAY + 1], self._keys[name][_DAY + 2] = (
                    day,
                    counts.tokens,
                    counts.audio_ms,
                )


class SharedSlotCounts(SlotCounts):
    """The SlotCounts of one of several workers: counts in its own row, and sums over all rows."""

    def __init__(self, counts: SharedCounts, own: WorkerRow) -> None:
        super().__init__()
        self._counts = counts
        self._own = own

    @property
    def total(self) -> int:
        return sum(row.slots for row in self._counts.rows)

    def held(self, holder: str) -> int:
        wanted = _hash(holder)
        return sum(row.holders().count(wanted) for row in self._counts.rows)

    def holders(self, beside: str) -> int:
        found = {_hash(beside)}.union(*(row.holders() for row in self._counts.rows))
        return len(found - {_NOBODY})

    def add(self, holder: str | None) -> None:
        self._own.add(_hash(holder))

    def remove(self, holder: str | None) -> None:
        self._own.remove(_hash(holder))

    def bucket(self, kind: str, key: str, *, rate: float, capacity: float, now: float) -> TokenBucket:
        return _SharedBucket(self._counts, self._own, _RATES[kind], key, rate=rate, capacity=capacity, now=now)


class _SharedBucket(TokenBucket):
    """A token bucket that all workers share. It counts tokens as seconds: the time in which the rate yields them.

    The bucket is short of full by the seconds that all workers have spent, plus the seconds lost while it was full,
    minus the current time. Before a worker spends anything, it writes down the current time minus all seconds spent so
    far; the highest of these notes is the seconds lost. So each cell has one writer, and each worker sees what the
    others spend.
    """

    def __init__(
        self,
        counts: SharedCounts,
        own: WorkerRow,
        place: int,
        key: str,
        *,
        rate: float,
        capacity: float,
        now: float,
    ) -> None:
        super().__init__(rate=rate, capacity=capacity, now=now)
        self._counts = counts
        self._place = place
        self._key = key
        self._cells = own.rates[key]

    def try_take(self, amount: float = 1, *, now: float) -> float:
        wait = self.spend(amount, now=now)  # counted first, and given back if it is too much
        if wait:
            self._cells[self._place] -= amount / self.rate
        return wait

    def spend(self, amount: float, *, now: float) -> float:
        cells, place = self._cells, self._place
        cells[place + 1] = max(cells[place + 1], now - self._counts.spent(self._key, place))
        cells[place] += amount / self.rate
        lacking = self._counts.lost(self._key, place) + self._counts.spent(self._key, place) - now
        wait = lacking - self.capacity / self.rate
        return wait if wait * self.rate > _ROUNDING else 0


class SharedDailyUse(DailyUse):
    """The DailyUse of one of several workers: counts in its own row, and sums over all workers."""

    def __init__(self, limits: Mapping[str, DailyLimits], counts: SharedCounts, own: WorkerRow) -> None:
        super().__init__(limits)
        self._counts = counts
        self._own = own

    def reserve(self, key_name: str | None, now: float) -> None:
        if key_name is None or key_name not in self.limits:
            return
        self._own.uses[key_name][_RUNNING] += 1
        if (refusal := self.refusal(key_name, now, beside=1)) is not None:
            self._own.uses[key_name][_RUNNING] -= 1
            raise refusal

    def add(self, key_name: str | None, *, tokens: int, audio_ms: int, now: float, reserved: bool = False) -> None:
        if key_name is None or key_name not in self.limits:
            return
        self.day = self._counts.last_day(key_name)
        self._turn(now)
        cells = self._own.uses[key_name]
        _add_use(cells, self.day, tokens=tokens, audio_ms=audio_ms)
        cells[0] = self.day
        cells[_RUNNING] -= reserved

    def refusal(self, key_name: str, now: float, *, beside: int = 0) -> RateLimited | None:
        if key_name in self.limits:
            self.day = self._counts.last_day(key_name)
        return super().refusal(key_name, now, beside=beside)

    def used_by(self, key_name: str) -> UsedToday:
        return self._counts.used(key_name, self.day)

    def running_of(self, key_name: str) -> int:
        return self._counts.running(key_name)


def _add_use(cells: memoryview[int], day: int, *, tokens: int, audio_ms: int) -> None:
    """Add the use on ``day`` to three cells: day, tokens, milliseconds. Use on an earlier day is dropped from them."""
    if cells[0] < day:
        cells[0], cells[1], cells[2] = day, 0, 0
    if cells[0] == day or tokens or audio_ms:
        cells[1] += tokens
        cells[2] += audio_ms


def _hash(holder: str | None) -> int:
    """Return a number that stands for a holder: 63 bits of a digest, so that collisions practically never happen."""
    if holder is None:
        return _NOBODY
    found = int.from_bytes(hashlib.blake2b(holder.encode(), digest_size=8).digest(), "big") >> 1
    return max(found, _NOBODY + 1)


# The other workers.

#: The number of a worker in the name of a recording, such as ``w3``.
_WORKER: Final = re.compile(r"_w(\d{1,9})_")
#: Questions that a worker asks the others: for their metrics; to accept a new client secret; for the transcripts of
#: spoken answers; to start, and to stop, a profile as well.
METRICS: Final = "metrics"
KNOW_SECRET: Final = "know client secret"
SPOKEN_ANSWERS: Final = "spoken answers"
START_PROFILE: Final = "start profile"
STOP_PROFILE: Final = "stop profile"

#: A worker's answer to a question of the others: a function of the question's argument.
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
        """The name of the worker in ids and in the log, such as ``w3``."""
        return f"w{self.serial}"

    def on(self, question: str, handler: Handler) -> None:
        """Have ``handler`` answer the question ``question`` when other workers ask it."""
        self._handlers[question] = handler

    @abc.abstractmethod
    async def ask_others(self, question: str, argument: Any = None) -> list[Any]:
        """Ask all other workers, and return their answers; a worker that ends meanwhile gives none."""

    @abc.abstractmethod
    async def all_metrics(self, own: list[Metric]) -> list[Metric]:
        """Return the metrics of the whole server; ``own`` are those of this worker."""

    @abc.abstractmethod
    def destination(self, target: bytes) -> int | None:
        """Return the number of the worker that must serve a request for ``target``; None for this worker.

        0 stands for any worker but this one.
        """

    @abc.abstractmethod
    def pass_on(self, serial: int, connection: int, received: bytes) -> None:
        """Give an open connection to the worker ``serial``: its file descriptor, and the bytes read from it.

        0 means any worker but this one.
        """

    def owns_file(self, name: str) -> bool:
        """Return whether this worker manages the recording ``name``.

        A recording has the name of its worker. A worker also manages the recordings of earlier workers whose place it
        has taken; the first worker also manages those without a worker's name.
        """
        found = _WORKER.search(name)
        return (0 if found is None else int(found[1]) - 1) % self.wanted == (self.serial - 1) % self.wanted

    @property
    def ready(self) -> int:
        """The number of workers that accept new sessions."""
        return sum(row.serial != 0 and not row.hung and row.state is WorkerState.OK for row in self.counts.rows)

    @property
    def hung(self) -> list[int]:
        """The numbers of the workers that do not answer the supervisor."""
        return sorted(row.serial for row in self.counts.rows if row.serial and row.hung)

    @property
    def engine_requests(self) -> int:
        """The number of requests in the engines of all workers."""
        return sum(row.engine_requests for row in self.counts.rows)

    @property
    def connections_elsewhere(self) -> int:
        """The number of open connections of the other workers, including those on their way to one of them."""
        rows = (row for row in self.counts.rows if row is not self.row)
        return sum(row.all_connections for row in rows)
