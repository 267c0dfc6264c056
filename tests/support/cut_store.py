"""A store of sessions in memory that several servers share, and that each of them can lose at any commit."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.store.records import (
    GONE,
    Change,
    ClearPart,
    Contents,
    Found,
    Outcome,
    StoreEnd,
    StoreError,
    StoreSize,
)
from omni_ws.service.store.sealing import Sealer
from omni_ws.service.store.session_store import SessionStore


@dataclass
class Record:
    fence: int
    serial: int = 0
    holder: str = ""
    clear: ClearPart | None = None
    snapshot: bytes = b""
    log: list[bytes] = field(default_factory=list)


class SharedRecords:
    """What all servers of a test share: the records by their ids."""

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}


class CutBackend:
    """A StoreBackend over SharedRecords. Once ``cut``, it neither reads nor writes, as if its process were dead.

    With ``fate``, a commit takes a few passes of the loop before it is done, and a few more until that is known.
    ``wait`` holds all commits back until it is set; ``refuses`` is the error of every call while it is not None.
    """

    name = "cut"

    def __init__(self, shared: SharedRecords, *, fate: random.Random | None = None) -> None:
        self._shared = shared
        self._fate = fate
        self.is_cut = False
        self.commits = 0
        self.wait = asyncio.Event()
        self.wait.set()
        self.refuses: StoreError | None = None

    def cut(self) -> None:
        self.is_cut = True

    async def _passes(self) -> None:
        for _ in range(0 if self._fate is None else self._fate.choice([0, 0, 1, 2, 5])):
            await asyncio.sleep(0)
        self._check()

    def _check(self) -> None:
        if self.is_cut:
            raise StoreError(GONE, "the process is dead")
        if self.refuses is not None:
            raise self.refuses

    async def open(self) -> None:
        self._check()

    async def close(self) -> None:
        pass

    async def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
        await self._passes()
        await self.wait.wait()
        self._check()
        outcomes = [self._do(one) for one in changes]
        self.commits += 1
        await self._passes()
        return outcomes

    def _do(self, change: Change) -> Outcome:
        records = self._shared.records
        record = records.get(change.session_id)
        if record is not None and record.fence > change.fence:
            return Outcome.LOST
        if change.snapshot is not None:
            record = records[change.session_id] = Record(change.fence, change.serial, change.holder)
            record.clear, record.snapshot = change.clear, change.snapshot
        if change.element is not None:
            if record is None or (record.serial, len(record.log)) != (change.serial, change.place):
                return Outcome.GAP
            record.log.append(change.element)
        if change.end is StoreEnd.DELETE:
            records[change.session_id] = Record(change.fence)
        elif change.end is StoreEnd.RELEASE and record is not None:
            record.holder = ""
        return Outcome.KEPT

    async def find(self, session_id: str) -> Found | None:
        await self._passes()
        record = self._shared.records.get(session_id)
        if record is None or record.clear is None:
            return None
        held = bool(record.holder)
        return Found(record.clear, record.fence, record.holder, held, 0 if record.clear.away else None)

    async def read(self, session_id: str) -> Contents | None:
        await self._passes()
        record = self._shared.records.get(session_id)
        return None if record is None or record.clear is None else Contents(record.snapshot, tuple(record.log))

    async def take(self, session_id: str, *, fence: int, holder: str) -> Contents | None:
        await self._passes()
        record = self._shared.records.get(session_id)
        if record is None or record.clear is None or record.fence != fence:
            return None
        record.fence, record.serial, record.holder = fence + 1, 0, holder
        return Contents(record.snapshot, tuple(record.log))

    async def erase(self, session_id: str) -> bool:
        await self._passes()
        record = self._shared.records.get(session_id)
        if record is None or record.clear is None:
            return False
        self._shared.records[session_id] = Record(record.fence + 1)
        return True

    async def beat(self, holder: str) -> None:
        self._check()

    async def leave(self, holder: str) -> None:
        self._check()

    async def probe(self) -> None:
        self._check()

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        self._check()
        return StoreSize(len(self._shared.records), 0)


def store_over(backend: CutBackend, budget: ByteBudget, metrics: Metrics) -> SessionStore:
    return SessionStore(backend, sealer=Sealer(), budget=budget, metrics=metrics, max_age_sec=86400, max_bytes=1 << 30)
