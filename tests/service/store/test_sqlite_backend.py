"""The store in a file: who may read it, what it takes, and what happens when the disk or another process fails."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from support.fake_store import kept_by
from support.patience import until

from omni_ws.config.values import ConfigurationError
from omni_ws.service.store import sqlite_backend
from omni_ws.service.store.records import (
    HOLDER_EXPIRY_SEC,
    TOMBSTONE_SEC,
    Change,
    ChangeOutcome,
    ClearPart,
    StoreEnd,
    StoreError,
)
from omni_ws.service.store.session_store import SessionStore
from omni_ws.service.store.sqlite_backend import SqliteBackend

MIB = 1 << 20
CLEAR = ClearPart("1", "native", "anna", (), False)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(
    path: Path, *, max_bytes: int = 16 * MIB, clock: Callable[[], float] | None = None
) -> AsyncIterator[SqliteBackend]:
    backend = SqliteBackend(path, max_bytes=max_bytes, clock=clock or Clock())
    await backend.open()
    try:
        yield backend
    finally:
        await backend.close()


def snapshot(session_id: str, data: bytes, *, serial: int = 1, holder: str = "", end: StoreEnd | None = None) -> Change:
    return Change(session_id, 1, holder, serial, CLEAR, data, None, 0, end)


@asynccontextmanager
async def started(path: Path, *, max_bytes: int = 16 * MIB) -> AsyncIterator[SessionStore]:
    store = kept_by(SqliteBackend(path, max_bytes=max_bytes))
    await store.start()
    try:
        yield store
    finally:
        await store.stop()


# The file.


async def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "sessions.db"
    async with opened(path) as backend:
        await backend.commit([snapshot("sess_1", b"said")])
        modes = {one.name: stat.S_IMODE(one.stat().st_mode) for one in path.parent.iterdir()}
        assert modes == dict.fromkeys(["sessions.db", "sessions.db-wal", "sessions.db-shm"], 0o600)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_file_that_others_may_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.touch(0o644)
    async with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_what_is_no_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    path.write_text("a diary, " * 1000)
    backend = SqliteBackend(path, max_bytes=MIB)
    with pytest.raises(ConfigurationError, match="is no database of SQLite"):
        await backend.open()
    await backend.close()
    assert path.read_text().startswith("a diary")
    path.unlink()
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 7")
    backend = SqliteBackend(path, max_bytes=MIB)
    with pytest.raises(ConfigurationError, match="has layout 7 of another version of omni_ws"):
        await backend.open()
    await backend.close()


async def test_a_record_of_unknown_form_is_as_if_absent(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as backend:
        await backend.commit([snapshot("sess_1", b"one"), snapshot("sess_2", b"two")])
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("UPDATE records SET clear = x'c0' WHERE session_id = 'sess_1'")
        assert await backend.find("sess_1") is None
        assert await backend.find("sess_2") is not None


async def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "sessions.db", tmp_path):
        backend = SqliteBackend(path, max_bytes=MIB)
        with pytest.raises(ConfigurationError, match=r"sessions\.store: cannot use"):
            await backend.open()
        await backend.close()


async def test_a_store_outlives_its_process(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with started(path) as store:
        lease = store.begin("sess_1", kind="native", owner=None)
        store.snapshot(lease, b"state", tokens=(b"token",), away=False)
        store.append(lease, b"a")
        await store.settle(lease)
        # What is settled is in the file, without any word of the process.
        copy = tmp_path / "copy.db"
        for suffix in ("", "-wal"):
            (tmp_path / f"copy.db{suffix}").write_bytes((tmp_path / f"sessions.db{suffix}").read_bytes())
    async with started(copy) as other:
        taken = await other.take("sess_1", force=True)
        assert taken is not None
        assert (taken.snapshot, taken.entries) == (b"state", (b"a",))


async def test_a_file_that_is_deleted_is_made_anew_with_all_sessions(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with started(path) as store:
        lease = store.begin("sess_1", kind="native", owner=None)
        told: list[str] = []

        class Holder:
            def lease_lost(self, *, deleted: bool) -> None:
                told.append("lost")

            def store_degraded(self) -> None:
                told.append("degraded")

            def store_wants_snapshot(self) -> None:
                store.snapshot(lease, b"now", tokens=(), away=False)

        lease.holder = Holder()
        store.snapshot(lease, b"state", tokens=(), away=False)
        await store.settle(lease)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()  # noqa: ASYNC240 - a test has the loop to itself
        await until(lambda: told == ["degraded"])
        await until(lambda: lease.whole)
        await store.settle(lease)
        assert await store.read("sess_1") == (b"now", ())
        assert path.exists()


async def test_what_is_deleted_is_not_left_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as backend:
        await backend.commit([snapshot("sess_1", b"nobody shall know" * 1000), snapshot("sess_2", b"x")])
        assert b"nobody shall know" in Path(f"{path}-wal").read_bytes()  # noqa: ASYNC240
        assert await backend.erase("sess_1")
        await asyncio.wrap_future(backend._checkpoints.submit(lambda: None))
        for one in (path, Path(f"{path}-wal")):
            assert b"nobody shall know" not in one.read_bytes()


@pytest.mark.parametrize("how", ["its session ended", "it is old"])
async def test_the_next_pruning_leaves_nothing_of_a_deleted_record(tmp_path: Path, how: str) -> None:
    path, clock = tmp_path / "sessions.db", Clock()
    async with opened(path, clock=clock) as backend:
        await backend.prune(max_age_sec=60, max_bytes=MIB)
        secret, ended = b"nobody shall know" * 1000, how == "its session ended"
        await backend.commit([snapshot("sess_1", secret)])
        if ended:
            await backend.commit([Change("sess_1", 1, "", 1, None, None, None, 0, StoreEnd.DELETE)])
        clock.now += 0 if ended else 61
        await backend.prune(max_age_sec=60, max_bytes=MIB)
        await asyncio.wrap_future(backend._checkpoints.submit(lambda: None))
        for one in (path, Path(f"{path}-wal")):
            assert b"nobody shall know" not in one.read_bytes()


async def test_a_wal_that_is_read_is_emptied_at_a_later_pruning(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with opened(path) as backend:
        await backend.commit([snapshot("sess_1", b"nobody shall know" * 1000)])
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM records").fetchone()
            assert await backend.erase("sess_1")
            await asyncio.wrap_future(backend._checkpoints.submit(lambda: None))
            assert b"nobody shall know" in Path(f"{path}-wal").read_bytes()  # noqa: ASYNC240
        await backend.prune(max_age_sec=60, max_bytes=MIB)
        await asyncio.wrap_future(backend._checkpoints.submit(lambda: None))
        assert b"nobody shall know" not in Path(f"{path}-wal").read_bytes()  # noqa: ASYNC240


# Size and age.


async def test_the_oldest_sessions_go_when_the_store_is_full(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "sessions.db", max_bytes=MIB, clock=clock) as backend:
        await backend.beat("living")
        await backend.commit([snapshot("alive", bytes(1000), holder="living")])
        for number in range(40):
            clock.now += 1
            await backend.beat("living")
            outcome = await backend.commit([snapshot(f"sess_{number}", bytes(100_000))])
            assert [*outcome] == [ChangeOutcome.KEPT]
        assert await backend.find("alive") is not None
        assert await backend.find("sess_39") is not None
        assert await backend.find("sess_0") is None
        assert (tmp_path / "sessions.db").stat().st_size <= MIB


async def test_sessions_that_live_fill_the_store(tmp_path: Path) -> None:
    async with opened(tmp_path / "sessions.db", max_bytes=MIB) as backend:
        await backend.beat("living")
        for number in range(9):
            await backend.commit([snapshot(f"sess_{number}", bytes(100_000), holder="living")])
        with pytest.raises(StoreError, match="full") as raised:
            await backend.commit([snapshot("sess_10", bytes(200_000), holder="living")])
        assert raised.value.reason == "full"
        await backend.commit([snapshot("sess_10", bytes(70_000), holder="living")])
        with pytest.raises(StoreError, match="full"):
            await backend.probe()
        assert await backend.find("sess_0") is not None
        for number in range(4):
            assert await backend.erase(f"sess_{number}")
        await backend.probe()
        assert [*await backend.commit([snapshot("again", bytes(5000), holder="living")])] == [ChangeOutcome.KEPT]


async def test_pruning_makes_the_store_smaller(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "sessions.db", clock=clock) as backend:
        await backend.beat("living")
        await backend.commit([snapshot("alive", bytes(10_000), holder="living")])
        for number in range(250):
            clock.now += 0.01
            await backend.commit([snapshot(f"sess_{number}", bytes(10_000))])
        size = await backend.prune(max_age_sec=1e9, max_bytes=1 << 40)
        assert size.records == 251
        assert size.bytes > 2_500_000
        size = await backend.prune(max_age_sec=1e9, max_bytes=MIB)
        assert size.bytes <= MIB
        assert 0 < size.records < 100
        assert await backend.find("alive") is not None
        assert await backend.find("sess_249") is not None


async def test_sessions_and_tombstones_end_with_age(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "sessions.db", clock=clock) as backend:
        await backend.commit([snapshot("left", b"x"), snapshot("gone", b"x", end=StoreEnd.DELETE)])
        await backend.commit([snapshot("alive", b"x", holder="living")])
        clock.now += 100
        await backend.beat("living")
        assert (await backend.prune(max_age_sec=100, max_bytes=1 << 40)).records == 2
        clock.now += 0.1
        assert (await backend.prune(max_age_sec=100, max_bytes=1 << 40)).records == 1
        assert await backend.find("alive") is not None
        assert [*await backend.commit([snapshot("gone", b"y")])] == [ChangeOutcome.KEPT]
        assert await backend.find("gone") is None
        clock.now += TOMBSTONE_SEC
        await backend.prune(max_age_sec=100, max_bytes=1 << 40)
        assert [*await backend.commit([snapshot("gone", b"y")])] == [ChangeOutcome.KEPT]
        assert await backend.find("gone") is not None


async def test_signs_of_life_expire(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path / "sessions.db", clock=clock) as backend:
        await backend.commit([snapshot("sess_1", b"x", holder="a")])
        await backend.beat("a")
        for passed, held in ((HOLDER_EXPIRY_SEC - 0.1, True), (0.1, False)):
            clock.now += passed
            found = await backend.find("sess_1")
            assert found is not None
            assert found.held is held


async def test_the_sessions_of_a_process_that_was_killed_are_free_at_once(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    program = f"""
import asyncio, pathlib
from omni_ws.service.store.sqlite_backend import SqliteBackend
async def main():
    backend = SqliteBackend(pathlib.Path({str(path)!r}), max_bytes=1 << 24)
    await backend.open()
    await backend.beat("a")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    async with opened(path, clock=time.time) as backend:
        await backend.commit([snapshot("sess_1", b"x", holder="a")])

        async def held() -> bool:
            found = await backend.find("sess_1")
            assert found is not None
            return found.held

        assert await held()
        process.kill()
        await process.communicate()
        assert not await held()


async def test_processes_that_are_gone_leave_no_files(tmp_path: Path) -> None:
    clock = Clock()
    path = tmp_path / "sessions.db"
    async with opened(path, clock=clock) as backend, opened(path, clock=clock) as other:
        await other.beat("a")
        await backend.beat("b")
        clock.now += 60.1
        await backend.beat("b")
        await backend.prune(max_age_sec=1e9, max_bytes=1 << 40)
        locks = [one.name for one in tmp_path.glob("*-holder-*")]  # noqa: ASYNC240 - a test has the loop to itself
        assert locks == ["sessions.db-holder-b"]
        # One that was only paused makes itself known again.
        await other.beat("a")
        await backend.commit([snapshot("sess_1", b"x", holder="a")])
        found = await backend.find("sess_1")
        assert found is not None
        assert found.held
        await other.leave("a")
        await backend.leave("b")
        assert not [*tmp_path.glob("*-holder-*")]  # noqa: ASYNC240


# Failures.


async def test_a_process_that_holds_the_file_makes_the_store_slow(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    async with started(path) as store:
        lease = store.begin("sess_1", kind="native", owner=None)
        store.snapshot(lease, b"state", tokens=(), away=False)
        await store.settle(lease)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            store.append(lease, b"a")
            await store.settle(lease)
            assert (store.degraded, store.reason) == (True, "slow")
            other.execute("ROLLBACK")
        await until(lambda: not store.degraded)


async def test_a_store_that_was_full_takes_sessions_again(tmp_path: Path) -> None:
    async with started(tmp_path / "sessions.db", max_bytes=MIB) as store:
        leases = [store.begin(f"sess_{number}", kind="native", owner=None) for number in range(20)]
        for lease in leases:
            store.snapshot(lease, os.urandom(100_000), tokens=(), away=False)
        await asyncio.gather(*(store.settle(lease) for lease in leases))
        assert (store.degraded, store.reason) == (True, "full")
        for lease in leases:
            store.release(lease, delete=True)
        await until(lambda: not store.degraded)
        late = store.begin("late", kind="native", owner=None)
        store.snapshot(late, b"state", tokens=(), away=False)
        await store.settle(late)
        assert await store.read("late") == (b"state", ())


async def test_checkpoints_keep_the_log_of_writes_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_backend, "_CHECKPOINT_BYTES", 100_000)
    path = tmp_path / "sessions.db"
    async with opened(path) as backend:
        for serial in range(1, 101):
            await backend.commit([snapshot("sess_1", bytes(50_000), serial=serial)])
            if serial % 10 == 0:
                # As in any moment without a commit: the next one begins the log anew.
                await asyncio.wrap_future(backend._checkpoints.submit(lambda: None))
        assert Path(f"{path}-wal").stat().st_size < 2 * MIB  # noqa: ASYNC240
