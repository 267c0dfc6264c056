"""A store of sessions in memory that several servers of a test share, and that can be slow, full, gone, or cut off.

``FakeStore`` is what the servers share; each server has a ``FakeBackend`` of it, of which ``kept_by`` makes its
SessionStore. A process that dies is cut off: the commit that ``cut`` names is its last.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.store.records import (
    FULL,
    GONE,
    HOLDER_EXPIRY_SEC,
    Change,
    ChangeOutcome,
    ClearPart,
    Contents,
    FoundRecord,
    Sealer,
    StoreBackend,
    StoreEnd,
    StoreError,
    StoreSize,
    write_clear,
)
from omni_ws.service.store.session_store import SessionStore


@dataclass
class _Record:
    clear: ClearPart | None = None
    snapshot: bytes = b""
    log: list[bytes] = field(default_factory=list)
    fence: int = 0
    serial: int = 0
    holder: str = ""
    away_since: float | None = None
    gone: bool = True


class FakeStore:
    """The store that servers share. Its state is set by tests; its clock is that of the loop."""

    def __init__(self) -> None:
        self.records: dict[str, _Record] = {}
        self.seen: dict[str, float] = {}
        #: Commits so far, of all servers, and what was in each.
        self.commits = 0
        self.changes: list[Change] = []
        #: Seconds that each operation takes.
        self.delay_sec = 0.0
        #: Whether it refuses what takes space, and everything.
        self.full = False
        self.gone = False
        #: Cleared while commits wait, before they do anything.
        self.open = asyncio.Event()
        self.open.set()

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def lives(self, holder: str) -> bool:
        return holder in self.seen and self.now() - self.seen[holder] < HOLDER_EXPIRY_SEC

    def lose_everything(self) -> None:
        """As a server that is started anew without its data."""
        self.records.clear()
        self.seen.clear()


class FakeBackend:
    """One server's way to a FakeStore."""

    def __init__(self, shared: FakeStore) -> None:
        self.name = "fake"
        self.shared = shared
        #: The commits left until this server is cut off: 0 is the last. None: it is not.
        self.cut: int | None = None
        #: Whether the store did what the last commit asked before the server was cut off.
        self.last_arrives = True
        #: Called when the server is cut off: everything that it does from then on is that of a process that is gone.
        self.on_cut: Callable[[], None] = lambda: None
        self.is_cut = False

    async def _work(self, *, takes_space: bool = False) -> None:
        shared = self.shared
        if self.is_cut:
            await asyncio.get_running_loop().create_future()
        if shared.delay_sec:
            await asyncio.sleep(shared.delay_sec)
        if shared.gone:
            raise StoreError(GONE, "it is gone")
        if shared.full and takes_space:
            raise StoreError(FULL, "it is full")

    async def open(self) -> None:
        await self._work()

    async def close(self) -> None:
        pass

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        # As through a socket or a thread: never within the call.
        await asyncio.sleep(0)
        await self.shared.open.wait()
        await self._work(takes_space=True)
        if self.cut == 0:
            self.is_cut = True
            if self.last_arrives:
                self._commit(changes)
            self.on_cut()
            await asyncio.get_running_loop().create_future()
        if self.cut is not None:
            self.cut -= 1
        return self._commit(changes)

    def _commit(self, changes: Sequence[Change]) -> list[ChangeOutcome]:
        self.shared.commits += 1
        self.shared.changes += changes
        return [self._change(change) for change in changes]

    def _change(self, change: Change) -> ChangeOutcome:
        record = self.shared.records.get(change.session_id) or _Record()
        if record.fence > change.fence:
            return ChangeOutcome.DELETED if record.gone else ChangeOutcome.LOST
        if change.clear is not None and change.snapshot is not None:
            if record.fence == change.fence and record.serial >= change.serial:
                return ChangeOutcome.KEPT
            record.clear, record.snapshot, record.log = change.clear, change.snapshot, []
            record.fence, record.serial, record.holder, record.gone = change.fence, change.serial, change.holder, False
            away_since = self.shared.now() if record.away_since is None else record.away_since
            record.away_since = away_since if change.clear.away else None
            self.shared.records[change.session_id] = record
        elif change.element is not None:
            here = (record.gone, record.fence, record.serial, len(record.log))
            if here != (False, change.fence, change.serial, change.place):
                return ChangeOutcome.GAP
        if change.element is not None:
            record.log.append(change.element)
        if change.end is StoreEnd.DELETE:
            record.gone, record.holder, record.snapshot, record.log = True, "", b"", []
        elif change.end is StoreEnd.RELEASE and record.fence == change.fence:
            record.holder = ""
        return ChangeOutcome.KEPT

    async def find(self, session_id: str) -> FoundRecord | None:
        await self._work()
        record = self.shared.records.get(session_id)
        if record is None or record.gone or record.clear is None:
            return None
        away_sec = None if record.away_since is None else self.shared.now() - record.away_since
        return FoundRecord(record.clear, record.fence, record.holder, self.shared.lives(record.holder), away_sec)

    async def read(self, session_id: str) -> Contents | None:
        await self._work()
        record = self.shared.records.get(session_id)
        return None if record is None or record.gone else Contents(record.snapshot, tuple(record.log))

    async def take(
        self, session_id: str, *, fence: int, holder: str, clear: ClearPart | None = None
    ) -> Contents | None:
        await self._work()
        record = self.shared.records.get(session_id)
        if record is None or record.gone or record.fence != fence or record.clear is None:
            return None
        if clear is not None and write_clear(clear) != write_clear(record.clear):
            return None
        record.fence, record.serial, record.holder = fence + 1, 0, holder
        return Contents(record.snapshot, tuple(record.log))

    async def erase(self, session_id: str) -> bool:
        await self._work()
        record = self.shared.records.get(session_id)
        if record is None or record.gone:
            return False
        record.gone, record.fence, record.snapshot, record.log = True, record.fence + 1, b"", []
        return True

    async def beat(self, holder: str) -> Sequence[str]:
        await self._work()
        self.shared.seen[holder] = self.shared.now()
        erased = {name: one for name, one in self.shared.records.items() if one.gone and holder == one.holder}
        for one in erased.values():
            one.holder = ""
        return [*erased]

    async def leave(self, holder: str) -> None:
        await self._work()
        self.shared.seen.pop(holder, None)

    async def probe(self) -> None:
        await self._work(takes_space=True)

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        await self._work()
        kept = [one for one in self.shared.records.values() if not one.gone]
        return StoreSize(len(kept), sum(len(one.snapshot) + sum(map(len, one.log)) for one in kept))


def kept_by(backend: StoreBackend, **options: Any) -> SessionStore:
    """Return the store of one server, which is to be started; without bounds but for ``options``."""
    unbounded = {"budget": ByteBudget(sys.maxsize), "max_age_sec": 86_400, "max_bytes": sys.maxsize}
    return SessionStore(backend, **{"sealer": Sealer(), "metrics": Metrics(), **unbounded, **options})
