"""SharedCounts: what the workers of a server count together, in a file that all of them map.

The file holds whole numbers and floats of 8 bytes: a few for the server, a row for each worker, and a row for each key.
A lock on the file makes a check and a count one step; the kernel frees it when its process ends. What a worker counted
that has died goes with its row (``free``).
"""

from __future__ import annotations

import hashlib
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import IO, Final, TypeAlias

from omni_ws.core.daily_use import DailyCounts, DailyLimits, DailyUse, UsedToday
from omni_ws.core.token_bucket import TokenBucket
from omni_ws.errors import RateLimited

if sys.platform != "win32":
    import fcntl

_CELL: Final = 8
#: Cells of the server: the first says whether all workers have been ready.
_SERVER_CELLS: Final = 8
#: Cells of a worker before its slots, and of a key.
_WORKER_CELLS: Final = 8
_KEY_CELLS: Final = 8
#: A slot that counts against no holder.
_NOBODY: Final = 1
#: Where a key has its rates, and its amounts of the day.
_RATES: Final[Mapping[str, int]] = {"requests": 0, "input": 2}
_DAY: Final = 4


class WorkerState(IntEnum):
    """What a worker is doing, as the others see it."""

    STARTING = 0
    OK = 1
    UNHEALTHY = 2
    DRAINING = 3


class _Cell(IntEnum):
    """Places in the row of a worker. ``RECEIVED``: connections that it was given since its start."""

    SERIAL = 0
    STATE = 1
    CONNECTIONS = 2
    WEBSOCKETS = 3
    RECEIVED = 4
    ENGINE_REQUESTS = 5
    SLOTS = 6


class WorkerRow:
    """What one worker counts. Only it writes it while it runs, and the supervisor before and after that."""

    def __init__(self, cells: memoryview[int], index: int) -> None:
        self._cells = cells
        self.index = index

    @property
    def serial(self) -> int:
        """The number of its worker; 0 for a free row."""
        return self._cells[_Cell.SERIAL]

    @property
    def state(self) -> WorkerState:
        return WorkerState(self._cells[_Cell.STATE])

    @property
    def connections(self) -> int:
        """Open connections that are not upgraded."""
        return self._cells[_Cell.CONNECTIONS]

    @property
    def websockets(self) -> int:
        return self._cells[_Cell.WEBSOCKETS]

    @property
    def received(self) -> int:
        """Connections that the worker was given since its start."""
        return self._cells[_Cell.RECEIVED]

    @property
    def engine_requests(self) -> int:
        return self._cells[_Cell.ENGINE_REQUESTS]

    @property
    def slots(self) -> int:
        """Slots that its sessions have."""
        return self._cells[_Cell.SLOTS]

    def use(self, serial: int) -> None:
        """Give the row to a worker."""
        for cell in _Cell:
            self._cells[cell] = 0
        self._cells[_Cell.SERIAL] = serial

    def note(self, *, state: WorkerState, connections: int, websockets: int, engine_requests: int) -> None:
        self._cells[_Cell.STATE] = state
        self._cells[_Cell.CONNECTIONS] = connections
        self._cells[_Cell.WEBSOCKETS] = websockets
        self._cells[_Cell.ENGINE_REQUESTS] = engine_requests

    def receive(self) -> None:
        """Count a connection that the worker was given."""
        self._cells[_Cell.RECEIVED] += 1

    def holders(self) -> list[int]:
        """The holder of each slot, by its hash."""
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
    """The counts of all workers. Each process has an object of its own over the same file."""

    def __init__(self, file: IO[bytes], *, rows: int, slots: int, keys: Sequence[str]) -> None:
        """``slots`` is the most that one worker takes; ``keys`` are the names of all keys, in one order for all."""
        self._file = file
        row_cells = _WORKER_CELLS + slots
        first_key = _SERVER_CELLS + rows * row_cells
        size = (first_key + len(keys) * _KEY_CELLS) * _CELL
        file.truncate(size)
        view = memoryview(mmap.mmap(file.fileno(), size))
        cells: memoryview[int] = view.cast("q")
        floats: memoryview[float] = view.cast("d")
        self._server = cells[:_SERVER_CELLS]
        starts = range(_SERVER_CELLS, first_key, row_cells)
        self.rows = [WorkerRow(cells[start : start + row_cells], index) for index, start in enumerate(starts)]
        starts = range(first_key, size // _CELL, _KEY_CELLS)
        places = {name: slice(start, start + _KEY_CELLS) for name, start in zip(keys, starts, strict=True)}
        self._keys = {name: cells[place] for name, place in places.items()}
        self._rates = {name: floats[place] for name, place in places.items()}
        self._depth = 0

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the other processes from counting, for microseconds, unless its holder is stopped. May be nested."""
        if not self._depth:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                fcntl.lockf(self._file, fcntl.LOCK_UN)

    @property
    def started(self) -> bool:
        """Whether all workers have been ready once."""
        return self._server[0] == 1

    @started.setter
    def started(self, value: bool) -> None:
        self._server[0] = value

    def take_row(self, serial: int) -> WorkerRow:
        """A free row, for a new worker. Raises RuntimeError where there is none."""
        with self.locked():
            for row in self.rows:
                if not row.serial:
                    row.use(serial)
                    return row
        raise RuntimeError("all rows of the workers are in use")

    def free(self, row: WorkerRow) -> None:
        """Forget a worker that has ended, and its sessions with it."""
        with self.locked():
            row.use(0)

    def of_key(self, name: str) -> tuple[memoryview[int], memoryview[float]]:
        """The cells of a key, as whole numbers and as floats."""
        return self._keys[name], self._rates[name]

    def daily(self) -> DailyCounts:
        """What the keys have used on the last day on which any of them was used."""
        with self.locked():
            found = {name: tuple(cells[_DAY : _DAY + 3]) for name, cells in self._keys.items()}
        day = max((counts[0] for counts in found.values()), default=0)
        return day, {name: UsedToday(*counts[1:]) for name, counts in found.items() if day and counts[0] == day}

    def set_daily(self, day: int, used: Mapping[str, UsedToday]) -> None:
        """Begin with what was used before."""
        with self.locked():
            for name, counts in used.items():
                if name in self._keys:
                    _store_day(self._keys[name], day, counts)


class SharedSlotCounts:
    """The slots of all workers, as one of them counts them; a SlotCounts."""

    def __init__(self, counts: SharedCounts, own: WorkerRow) -> None:
        self._counts = counts
        self._own = own
        self.locked = counts.locked

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
        with self.locked():
            self._own.add(_hash(holder))

    def remove(self, holder: str | None) -> None:
        with self.locked():
            self._own.remove(_hash(holder))

    def bucket(self, kind: str, key: str, *, rate: float, capacity: float, now: float) -> TokenBucket:
        return _SharedBucket(self._counts, _RATES[kind], key, rate=rate, capacity=capacity, now=now)


class _SharedBucket(TokenBucket):
    """A token bucket whose state is in the file: its tokens, and the time as of which it had them (0: never used)."""

    def __init__(self, counts: SharedCounts, place: int, key: str, *, rate: float, capacity: float, now: float) -> None:
        super().__init__(rate=rate, capacity=capacity, now=now)
        self._counts = counts
        self._place = place
        self._cells = counts.of_key(key)[1]

    def try_take(self, amount: float = 1, *, now: float) -> float:
        with self._state():
            return super().try_take(amount, now=max(now, self._filled_at))

    def spend(self, amount: float, *, now: float) -> float:
        with self._state():
            return super().spend(amount, now=max(now, self._filled_at))

    @contextmanager
    def _state(self) -> Iterator[None]:
        with self._counts.locked():
            if self._cells[self._place + 1]:
                self._tokens, self._filled_at = self._cells[self._place : self._place + 2]
            yield
            self._cells[self._place] = self._tokens
            self._cells[self._place + 1] = self._filled_at


class SharedDailyUse(DailyUse):
    """What keys have used today, counted for all workers."""

    def __init__(self, limits: Mapping[str, DailyLimits], counts: SharedCounts) -> None:
        super().__init__(limits)
        self._counts = counts

    def add(self, key_name: str | None, *, tokens: int, audio_ms: int, now: float) -> None:
        if key_name is not None and key_name in self.limits:
            with self._state(key_name):
                super().add(key_name, tokens=tokens, audio_ms=audio_ms, now=now)

    def refusal(self, key_name: str, now: float) -> RateLimited | None:
        if key_name not in self.limits:
            return None
        with self._state(key_name):
            return super().refusal(key_name, now)

    @contextmanager
    def _state(self, key_name: str) -> Iterator[None]:
        with self._counts.locked():
            cells, _ = self._counts.of_key(key_name)
            self.day, tokens, audio_ms = cells[_DAY : _DAY + 3]
            self.used = {key_name: UsedToday(tokens, audio_ms)}
            yield
            _store_day(cells, self.day, self.used.get(key_name, UsedToday()))


_Cells: TypeAlias = "memoryview[int]"


def _store_day(cells: _Cells, day: int, used: UsedToday) -> None:
    cells[_DAY], cells[_DAY + 1], cells[_DAY + 2] = day, used.tokens, used.audio_ms


def _hash(holder: str | None) -> int:
    """A number that stands for a holder, 63 bits of a digest: two holders practically never share one."""
    if holder is None:
        return _NOBODY
    found = int.from_bytes(hashlib.blake2b(holder.encode(), digest_size=8).digest(), "big") >> 1
    return max(found, _NOBODY + 1)
