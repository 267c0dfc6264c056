"""The store of sessions in a SQLite file: for one machine, whose processes may share the file.

The file is written in WAL mode. A commit survives the end of the process immediately, and a crash of the machine once
the system has written it to disk (with ``fsync=1``: immediately as well). All calls of a process run in one thread, in
order; checkpoints, which wait for the disk, run in another.

Each process also locks a file of its own beside the store. The system releases that lock however the process ends: so
its sessions are free immediately, and not only when its heartbeats have become old. A process that is paused keeps its
lock.

Table ``pieces`` has the snapshot of a record as piece 0, and its log after it: an entry in the log costs one row for
each commit, and nothing else.

A commit takes a handful of statements, however many records it changes. With each statement the thread lets others run,
and beside a busy event loop it waits 5 ms for its next turn. Therefore the parameters of all records are bound as one
JSON array, and all data as one blob with offsets into it.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from omni_ws.config.values import ConfigurationError
from omni_ws.service.store.records import (
    FULL,
    GONE,
    HOLDER_EXPIRY_SEC,
    TOMBSTONE_SEC,
    Change,
    ChangeOutcome,
    ClearPart,
    Contents,
    FoundRecord,
    StoreEnd,
    StoreError,
    StoreSize,
    read_clear,
    write_clear,
)

if sys.platform != "win32":
    import fcntl

T = TypeVar("T")

#: The layout of the tables, in ``PRAGMA user_version``. A file of another layout is refused.
_LAYOUT: Final = 1
#: How long a commit waits for those of other processes.
_BUSY_SEC: Final = 5.0
#: How long a checkpoint that empties the WAL may keep commits waiting for another process that reads the file.
_TRUNCATE_SEC: Final = 0.05
#: Two elements of speech of 100 ms fit a page, and a lone word of an answer does not write much more than itself.
_PAGE_BYTES: Final = 8192
#: Bytes written after which a checkpoint begins: a page that is overwritten meanwhile, as those of logs are by the next
#: turn, goes to the file once. And bytes of the WAL after which a commit does it, as the WAL only begins anew when
#: nothing is written during a checkpoint.
_CHECKPOINT_BYTES: Final = 16 << 20
_LAST_CHECKPOINT_BYTES: Final = 64 << 20
#: Processes that gave no sign of life for so long are forgotten; one that wakes up makes itself known again.
_FORGOTTEN_SEC: Final = 60.0
#: Records that pruning deletes between two commits.
_PRUNED_TOGETHER: Final = 100
#: What is deleted when the store is full: down to this share of its size.
_ROOM: Final = 0.9
_PROBE_BYTES: Final = 64 << 10

_TABLES: Final = """
CREATE TABLE records (
    id INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL UNIQUE,
    fence INTEGER NOT NULL,
    serial INTEGER NOT NULL,
    holder TEXT NOT NULL,
    clear BLOB NOT NULL,
    away REAL,
    changed REAL NOT NULL,
    gone INTEGER NOT NULL
);
CREATE INDEX records_by_age ON records (changed);
CREATE TABLE pieces (
    record INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (record, number)
);
CREATE TABLE holders (holder TEXT PRIMARY KEY, seen REAL NOT NULL);
"""
#: The state of each record of a commit, as one row.
_STATES: Final = """
SELECT json_group_array(json_array(
    j.key, r.fence, r.serial, r.gone, (SELECT max(number) FROM pieces WHERE record = r.id)
)) FROM json_each(:ids) AS j LEFT JOIN records AS r ON r.session_id = j.value
"""
#: ``rows`` has, for each record: session_id, fence, serial, holder, place and length of the clear part, away.
_REPLACE: Final = """
INSERT INTO records (session_id, fence, serial, holder, clear, away, changed, gone)
SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), substr(:data, json_extract(value, '$[4]'), json_extract(value, '$[5]')),
    json_extract(value, '$[6]'), :now, 0
FROM json_each(:rows) WHERE true
ON CONFLICT (session_id) DO UPDATE SET
    fence = excluded.fence, serial = excluded.serial, holder = excluded.holder, clear = excluded.clear,
    away = CASE WHEN excluded.away IS NULL THEN NULL ELSE coalesce(away, excluded.away) END,
    changed = excluded.changed, gone = 0
"""
#: ``rows`` has, for each piece: session_id, number, place and length of the data.
_APPEND: Final = """
INSERT INTO pieces (record, number, data)
SELECT r.id, json_extract(j.value, '$[1]'), substr(:data, json_extract(j.value, '$[2]'), json_extract(j.value, '$[3]'))
FROM json_each(:rows) AS j JOIN records AS r ON r.session_id = json_extract(j.value, '$[0]')
"""
_NAMED: Final = "session_id IN (SELECT value FROM json_each(:ids))"
_CLEAR_PIECES: Final = f"DELETE FROM pieces WHERE record IN (SELECT id FROM records WHERE {_NAMED})"
#: The tombstone names the process that is to be told of it, if any.
_BURY: Final = f"UPDATE records SET gone = 1, holder = {{}}, clear = x'', away = NULL, changed = :now WHERE {_NAMED}"
#: ``rows`` has session_id and fence of each.
_RELEASE: Final = """
UPDATE records SET holder = '' WHERE (session_id, fence) IN (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]') FROM json_each(:rows)
)
"""
_ALIVE: Final = "SELECT holder FROM holders WHERE abs(:now - seen) < :expiry"
#: Tombstones that ``holder`` was not told of, since a time.
_ERASED: Final = "SELECT session_id FROM records WHERE changed > :since AND gone AND holder = :holder"
_TOLD: Final = f"UPDATE records SET holder = '' WHERE gone AND {_NAMED}"
#: Records of no living holder, the oldest first.
_LEFT: Final = f"""
SELECT id, changed FROM records WHERE holder NOT IN ({_ALIVE}) AND NOT gone ORDER BY changed LIMIT :count
"""


class SqliteBackend:
    """A store in a file; see the module docstring. ``max_bytes`` limits the file, without its WAL."""

    def __init__(
        self, path: Path, *, max_bytes: int, fsync: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.name = "sqlite"
        self._path = path
        self._max_bytes = max_bytes
        self._fsync = fsync
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="session store")
        self._checkpoints = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._database: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        self._uncheckpointed = 0
        #: Whether the WAL may have what was deleted; that of an earlier process may.
        self._has_deleted = True
        #: The descriptors of the files that this process locks, by holder.
        self._locks: dict[str, int] = {}

    # StoreBackend

    async def open(self) -> None:
        await self._do(self._open)

    async def close(self) -> None:
        await asyncio.wrap_future(self._thread.submit(self._close))
        for holder in tuple(self._locks):
            self._unlock(holder)
        self._thread.shutdown(wait=False)
        self._checkpoints.shutdown(wait=False)

    async def commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        outcomes = await self._do(self._commit, changes)
        self._has_deleted |= any(one.end is StoreEnd.DELETE for one in changes)
        self._uncheckpointed += sum(len(one.snapshot or b"") + len(one.element or b"") + 4096 for one in changes)
        if self._uncheckpointed >= _CHECKPOINT_BYTES:
            self._uncheckpointed = 0
            self._checkpoints.submit(self._checkpoint)
        return outcomes

    async def find(self, session_id: str) -> FoundRecord | None:
        return await self._do(self._find, session_id)

    async def read(self, session_id: str) -> Contents | None:
        return await self._do(self._read, session_id)

    async def take(
        self, session_id: str, *, fence: int, holder: str, clear: ClearPart | None = None
    ) -> Contents | None:
        return await self._do(self._take, session_id, fence, holder, None if clear is None else write_clear(clear))

    async def erase(self, session_id: str) -> bool:
        erased = await self._do(self._erase, session_id)
        if erased:
            self._has_deleted = True
            self._empty_wal()
        return erased

    async def beat(self, holder: str) -> Sequence[str]:
        return await self._do(self._beat, holder)

    async def leave(self, holder: str) -> None:
        await self._do(self._leave, holder)

    async def probe(self) -> None:
        await self._do(self._probe)

    async def prune(self, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        while await self._do(self._prune_some, max_age_sec, int(max_bytes * _ROOM)):
            self._has_deleted = True
        self._empty_wal()
        return await self._do(self._size)

    def _empty_wal(self) -> None:
        """Empty the WAL, if it may contain deleted data.

        Commits wait for the second of two checkpoints, which is short.
        """
        if self._has_deleted:
            self._has_deleted = False
            for mode in ("PASSIVE", "TRUNCATE"):
                self._checkpoints.submit(self._checkpoint, mode)

    # in the thread

    async def _do(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.wrap_future(self._thread.submit(self._mapped, call, *arguments))

    def _mapped(self, call: Callable[..., T], *arguments: object) -> T:
        """Return the result of ``call``. Raises StoreError if it fails; any failure but a full disk closes the file."""
        try:
            return call(*arguments)
        except (sqlite3.Error, OSError) as error:
            full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            if not full:
                self._close()
            raise StoreError(FULL if full else GONE, f"{self._path}: {error}") from error

    @property
    def _open_database(self) -> sqlite3.Connection:
        if self._database is None:
            raise OSError("the file is not open")
        return self._database

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            with suppress(sqlite3.Error):
                database.close()

    def _open(self) -> None:
        if self._database is not None:
            return
        self._make_file()
        database = sqlite3.connect(self._path, timeout=_BUSY_SEC, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(database)
        except BaseException:
            database.close()
            raise
        self._database = database
        self._file = _identity(self._path)

    def _make_file(self) -> None:
        """Create the file, and its folder if needed, for their owner alone; refuse a file that others may read."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            if os.name == "posix":
                if self._path.stat().st_uid == os.geteuid():
                    self._path.chmod(0o600)
                if stat.S_IMODE(self._path.stat().st_mode) & 0o077:
                    raise ConfigurationError([f"sessions.store: others may read {self._path}; make it chmod 600"])
        except OSError as error:
            if isinstance(error, PermissionError | NotADirectoryError | IsADirectoryError | FileExistsError):
                raise ConfigurationError([f"sessions.store: cannot use {self._path}: {error.strerror}"]) from None
            raise

    def _prepare(self, database: sqlite3.Connection) -> None:
        try:
            database.execute(f"PRAGMA page_size = {_PAGE_BYTES}")  # of a new file alone
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("BEGIN IMMEDIATE")
            (layout,) = database.execute("PRAGMA user_version").fetchone()
            if layout == 0:
                for statement in _TABLES.split(";"):
                    database.execute(statement)
                database.execute(f"PRAGMA user_version = {_LAYOUT}")
            database.execute("COMMIT")
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise ConfigurationError([f"sessions.store: {self._path} is no database of SQLite"]) from None
            raise
        if layout not in (0, _LAYOUT):
            raise ConfigurationError(
                [f"sessions.store: {self._path} has layout {layout} of another version of omni_ws; name another file"]
            )
        (page_bytes,) = database.execute("PRAGMA page_size").fetchone()
        database.execute(f"PRAGMA max_page_count = {max(16, self._max_bytes // page_bytes)}")
        database.execute(f"PRAGMA synchronous = {'FULL' if self._fsync else 'NORMAL'}")
        database.execute(f"PRAGMA wal_autocheckpoint = {_LAST_CHECKPOINT_BYTES // page_bytes}")
        # What is deleted is overwritten. A snapshot takes the pages of the one before, so that costs little.
        database.execute("PRAGMA secure_delete = ON")

    def _transaction(self, call: Callable[[sqlite3.Connection], T]) -> T:
        database = self._open_database
        database.execute("BEGIN IMMEDIATE")
        try:
            result = call(database)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:  # some errors roll back by themselves
                database.execute("ROLLBACK")
            raise
        return result

    def _commit(self, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        try:
            return self._transaction(lambda database: self._changes(database, changes))
        except sqlite3.Error as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_FULL or not self._make_room():
                raise
        return self._transaction(lambda database: self._changes(database, changes))

    def _changes(self, database: sqlite3.Connection, changes: Sequence[Change]) -> Sequence[ChangeOutcome]:
        (states,) = database.execute(_STATES, {"ids": _json([one.session_id for one in changes])}).fetchone()
        by_change = {state[0]: state[1:] for state in msgspec.json.decode(states)}
        outcomes = [_outcome(change, *by_change[place]) for place, change in enumerate(changes)]
        kept = [
            change
            for place, (change, outcome) in enumerate(zip(changes, outcomes, strict=True))
            if outcome is ChangeOutcome.KEPT and not _is_done(change, *by_change[place][:2])
        ]
        self._write(database, kept)
        return outcomes

    def _write(self, database: sqlite3.Connection, changes: Sequence[Change]) -> None:
        now = self._clock()
        contents: list[bytes] = []
        end = 1
        records: list[tuple[object, ...]] = []
        pieces: list[tuple[object, ...]] = []

        def placed(content: bytes) -> tuple[int, int]:
            nonlocal end
            contents.append(content)
            end += len(content)
            return end - len(content), len(content)

        for one in changes:
            if one.clear is not None and one.snapshot is not None:
                clear = placed(write_clear(one.clear))
                away = now if one.clear.away else None
                records.append((one.session_id, one.fence, one.serial, one.holder, *clear, away))
                pieces.append((one.session_id, 0, *placed(one.snapshot)))
            if one.element is not None:
                pieces.append((one.session_id, one.place + 1, *placed(one.element)))
        data = b"".join(contents)
        if records:
            database.execute(_REPLACE, {"rows": _json(records), "data": data, "now": now})
            database.execute(_CLEAR_PIECES, {"ids": _json([one[0] for one in records])})
        if pieces:
            database.execute(_APPEND, {"rows": _json(pieces), "data": data})
        if ends := [one.session_id for one in changes if one.end is StoreEnd.DELETE]:
            self._bury(database, ends)
        if released := [(one.session_id, one.fence) for one in changes if one.end is StoreEnd.RELEASE]:
            database.execute(_RELEASE, {"rows": _json(released)})

    def _bury(self, database: sqlite3.Connection, session_ids: Sequence[str], *, untold: bool = False) -> None:
        """Turn records into tombstones. With ``untold``, a record's holder learns of this from its next ``beat``."""
        ids = _json(session_ids)
        database.execute(_CLEAR_PIECES, {"ids": ids})
        database.execute(_BURY.format("holder" if untold else "''"), {"ids": ids, "now": self._clock()})

    def _find(self, session_id: str) -> FoundRecord | None:
        now = self._clock()
        row = self._open_database.execute(
            "SELECT clear, away, fence, holder, "
            f"holder IN ({_ALIVE}) FROM records WHERE session_id = :session_id AND NOT gone",
            {"now": now, "expiry": HOLDER_EXPIRY_SEC, "session_id": session_id},
        ).fetchone()
        if row is None:
            return None
        clear, away, fence, holder, held = row
        if (read := read_clear(clear, away=away is not None)) is None:
            return None
        return FoundRecord(
            read,
            fence=fence,
            holder=holder,
            held=bool(held) and self._runs(holder),
            away_sec=None if away is None else max(0.0, now - away),
        )

    def _read(self, session_id: str) -> Contents | None:
        return self._pieces(self._open_database, session_id)

    def _pieces(self, database: sqlite3.Connection, session_id: str) -> Contents | None:
        rows = database.execute(
            "SELECT data FROM pieces WHERE record = (SELECT id FROM records WHERE session_id = ? AND NOT gone) "
            "ORDER BY number",
            (session_id,),
        ).fetchall()
        return Contents(rows[0][0], tuple(row[0] for row in rows[1:])) if rows else None

    def _take(self, session_id: str, fence: int, holder: str, clear: bytes | None) -> Contents | None:
        def take(database: sqlite3.Connection) -> Contents | None:
            taken = database.execute(
                "UPDATE records SET fence = fence + 1, serial = 0, holder = ? "
                "WHERE session_id = ? AND fence = ? AND NOT gone AND clear = ifnull(?, clear)",
                (holder, session_id, fence, clear),
            )
            return self._pieces(database, session_id) if taken.rowcount else None

        return self._transaction(take)

    def _erase(self, session_id: str) -> bool:
        def erase(database: sqlite3.Connection) -> bool:
            raised = database.execute(
                "UPDATE records SET fence = fence + 1 WHERE session_id = ? AND NOT gone", (session_id,)
            )
            if raised.rowcount:
                self._bury(database, [session_id], untold=True)
            return bool(raised.rowcount)

        return self._transaction(erase)

    def _beat(self, holder: str) -> Sequence[str]:
        if self._file != _identity(self._path):
            raise OSError("the file was deleted or replaced")
        self._lock(holder)
        now = self._clock()
        self._open_database.execute(
            "INSERT INTO holders (holder, seen) VALUES (:holder, :now) ON CONFLICT (holder) DO UPDATE SET seen = :now",
            {"holder": holder, "now": now},
        )
        rows = self._open_database.execute(_ERASED, {"holder": holder, "since": now - _FORGOTTEN_SEC})
        erased = [session_id for (session_id,) in rows]
        if erased:
            self._open_database.execute(_TOLD, {"ids": _json(erased)})
        return erased

    def _leave(self, holder: str) -> None:
        self._open_database.execute("DELETE FROM holders WHERE holder = ?", (holder,))
        self._lock_file(holder).unlink(missing_ok=True)

    def _lock_file(self, holder: str) -> Path:
        return self._path.with_name(f"{self._path.name}-holder-{holder}")

    def _lock(self, holder: str) -> None:
        path = self._lock_file(holder)
        if sys.platform == "win32" or (holder in self._locks and path.exists()):
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._unlock(holder)
        self._locks[holder] = descriptor

    def _unlock(self, holder: str) -> None:
        if (descriptor := self._locks.pop(holder, None)) is not None:
            os.close(descriptor)

    def _runs(self, holder: str) -> bool:
        """Return whether a process whose heartbeat is recent is still running."""
        if sys.platform == "win32":
            return True
        try:
            descriptor = os.open(self._lock_file(holder), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def _probe(self) -> None:
        def write(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM pieces WHERE record = -1")
            database.execute("INSERT INTO pieces (record, number, data) VALUES (-1, 0, zeroblob(?))", (_PROBE_BYTES,))

        self._transaction(write)
        self._open_database.execute("DELETE FROM pieces WHERE record = -1")

    # age and size

    def _used_bytes(self) -> int:
        database = self._open_database
        pages, free, size = (
            database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used: int = (pages - free) * size
        return used

    def _prune_some(self, max_age_sec: float, max_bytes: int) -> bool:
        """Delete some records beyond the limits of age and size. Returns whether there may be more."""
        now = self._clock()
        living = {"now": now, "expiry": HOLDER_EXPIRY_SEC, "count": _PRUNED_TOGETHER}
        excess = self._used_bytes() > max_bytes

        def prune(database: sqlite3.Connection) -> bool:
            forgotten = (now, _FORGOTTEN_SEC)
            for row in database.execute("SELECT holder FROM holders WHERE abs(? - seen) > ?", forgotten).fetchall():
                self._lock_file(row[0]).unlink(missing_ok=True)
            database.execute("DELETE FROM holders WHERE abs(? - seen) > ?", forgotten)
            database.execute("DELETE FROM records WHERE gone AND changed < ?", (now - TOMBSTONE_SEC,))
            old = [row[0] for row in database.execute(_LEFT, living) if excess or row[1] < now - max_age_sec]
            for record in old:
                database.execute("DELETE FROM pieces WHERE record = ?", (record,))
                database.execute("DELETE FROM records WHERE id = ?", (record,))
            return bool(old)

        return self._transaction(prune)

    def _make_room(self) -> bool:
        """If the store is nearly full, delete some records that no living process holds.

        Returns whether any were deleted.
        """
        room = int(self._max_bytes * _ROOM)
        return self._used_bytes() > room and self._prune_some(self._clock(), room)

    def _size(self) -> StoreSize:
        records = self._open_database.execute("SELECT count(*) FROM records WHERE NOT gone").fetchone()[0]
        return StoreSize(records, self._used_bytes())

    def _checkpoint(self, mode: str = "PASSIVE") -> None:
        """Move the contents of the WAL to the file. This waits for the disk; commits wait for it only with TRUNCATE."""
        # A commit finds out what is wrong, and says so.
        is_busy = True
        with suppress(sqlite3.Error), closing(sqlite3.connect(self._path, timeout=_TRUNCATE_SEC)) as database:
            (is_busy, *_) = database.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        if is_busy and mode == "TRUNCATE":
            self._has_deleted = True


def _json(rows: Sequence[object]) -> str:
    return msgspec.json.encode(rows).decode()


def _outcome(
    change: Change, fence: int | None, serial: int | None, gone: int | None, newest: int | None
) -> ChangeOutcome:
    """Return the outcome of a change to a record in this state; the state is None if there is no record."""
    if fence is not None and fence > change.fence:
        return ChangeOutcome.DELETED if gone else ChangeOutcome.LOST
    builds_on = (0, change.fence, change.serial, change.place)
    if change.snapshot is None and change.element is not None and (gone, fence, serial, newest) != builds_on:
        return ChangeOutcome.GAP
    return ChangeOutcome.KEPT


def _is_done(change: Change, fence: int | None, serial: int | None) -> bool:
    """Return whether a snapshot is already in the record, or is older than the record's."""
    return change.snapshot is not None and fence == change.fence and serial is not None and serial >= change.serial


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino
