"""What every kind of store does: in a file of SQLite, on a server of Redis, and as the fake that tests use."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_store import FakeBackend, FakeStore
from support.redis_server import redis_server

from omni_ws.config.values import StoreAddress
from omni_ws.service.store.records import Change, ChangeOutcome, ClearPart, Contents, StoreBackend, StoreEnd, StoreSize
from omni_ws.service.store.sqlite_backend import SqliteBackend

KEPT = ChangeOutcome.KEPT
CLEAR = ClearPart("1", "native", "anna", (b"digest", b"other"), False)
AWAY = ClearPart("1", "native", None, (), True)


def change(
    session_id: str = "sess_1",
    *,
    fence: int = 1,
    serial: int = 1,
    holder: str = "a",
    clear: ClearPart | None = None,
    snapshot: bytes | None = None,
    element: bytes | None = None,
    place: int = 0,
    end: StoreEnd | None = None,
) -> Change:
    clear = clear or (None if snapshot is None else CLEAR)
    return Change(session_id, fence, holder, serial, clear, snapshot, element, place, end)


@pytest.fixture(params=["sqlite", "redis", "fake"])
async def made(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Callable[[], StoreBackend]]:
    """Makes what another process would have."""
    backends: list[StoreBackend] = []

    def opened(backend: StoreBackend) -> StoreBackend:
        backends.append(backend)
        return backend

    if request.param == "sqlite":
        yield lambda: opened(SqliteBackend(tmp_path / "store" / "sessions.db", max_bytes=1 << 24))
    elif request.param == "fake":
        shared = FakeStore()
        yield lambda: opened(FakeBackend(shared))
    else:
        from omni_ws.service.store.redis_backend import RedisBackend

        async with redis_server(tmp_path) as server:
            yield lambda: opened(RedisBackend(StoreAddress.parse(server.url), max_age_sec=60))
            for backend in backends:
                await backend.close()
            backends.clear()
    for backend in backends:
        await backend.close()


@pytest.fixture
async def backend(made: Callable[[], StoreBackend]) -> StoreBackend:
    backend = made()
    await backend.open()
    return backend


async def test_a_snapshot_is_kept_with_its_clear_part_and_log(backend: StoreBackend) -> None:
    assert await backend.find("sess_1") is None
    assert await backend.read("sess_1") is None
    assert [*await backend.commit([change(snapshot=b"one", element=b"a")])] == [ChangeOutcome.KEPT]
    assert [*await backend.commit([change(element=b"b", place=1)])] == [ChangeOutcome.KEPT]
    found = await backend.find("sess_1")
    assert found is not None
    assert (found.clear, found.fence, found.holder, found.held, found.away_sec) == (CLEAR, 1, "a", False, None)
    assert await backend.read("sess_1") == Contents(b"one", (b"a", b"b"))


async def test_a_snapshot_replaces_what_was_before(backend: StoreBackend) -> None:
    await backend.commit([change(snapshot=b"one", element=b"a")])
    await backend.commit([change(snapshot=b"two", serial=2)])
    assert await backend.read("sess_1") == Contents(b"two", ())
    await backend.commit([change(element=b"b", serial=2)])
    assert await backend.read("sess_1") == Contents(b"two", (b"b",))


async def test_one_commit_changes_many_records(backend: StoreBackend) -> None:
    changes = [change(f"sess_{number}", snapshot=b"%d" % number) for number in range(50)]
    assert set(await backend.commit(changes)) == {ChangeOutcome.KEPT}
    assert await backend.read("sess_49") == Contents(b"49", ())
    more = [change(f"sess_{number}", element=b"x", place=number % 2) for number in range(50)]
    assert [*await backend.commit(more)] == [ChangeOutcome.KEPT, ChangeOutcome.GAP] * 25


async def test_who_takes_a_record_fences_out_who_had_it(
    made: Callable[[], StoreBackend], backend: StoreBackend
) -> None:
    await backend.commit([change(snapshot=b"one", element=b"a")])
    other = made()
    await other.open()
    assert await other.take("sess_1", fence=0, holder="b") is None
    assert await other.take("sess_1", fence=1, holder="b", clear=replace(CLEAR, tokens=(b"other",))) is None
    assert await other.take("sess_1", fence=1, holder="b", clear=CLEAR) == Contents(b"one", (b"a",))
    assert await other.take("sess_1", fence=1, holder="c") is None
    late = [change(element=b"b", place=1), change("sess_2", snapshot=b"x")]
    assert [*await backend.commit(late)] == [ChangeOutcome.LOST, ChangeOutcome.KEPT]
    assert [*await backend.commit([change(snapshot=b"late", serial=9)])] == [ChangeOutcome.LOST]
    assert [*await backend.commit([change(end=StoreEnd.DELETE)])] == [ChangeOutcome.LOST]
    assert await other.read("sess_1") == Contents(b"one", (b"a",))
    # What it took is not its own before it wrote a snapshot.
    assert [*await other.commit([change(fence=2, element=b"b", place=1, holder="b")])] == [ChangeOutcome.GAP]
    assert [*await other.commit([change(fence=2, snapshot=b"two", holder="b")])] == [ChangeOutcome.KEPT]
    found = await other.find("sess_1")
    assert found is not None
    assert (found.fence, found.holder) == (2, "b")


async def test_who_appends_notices_what_others_did(made: Callable[[], StoreBackend], backend: StoreBackend) -> None:
    names = ["taken", "erased", "erased here", "written by another connection", "kept"]
    await backend.commit([change(name, snapshot=b"one") for name in names])
    other = made()
    await other.open()
    for place in range(2):
        assert set(await backend.commit([change(name, element=b"a", place=place) for name in names])) == {KEPT}
    assert await other.take("taken", fence=1, holder="b") == Contents(b"one", (b"a", b"a"))
    assert await other.erase("erased")
    more = [change(name, element=b"b", place=2) for name in names]
    assert [*await backend.commit(more)] == [ChangeOutcome.LOST, ChangeOutcome.DELETED, KEPT, KEPT, KEPT]
    assert await backend.erase("erased here")
    more = [change(name, element=b"c", place=3) for name in names[2:]]
    assert [*await backend.commit(more)] == [ChangeOutcome.DELETED, KEPT, KEPT]
    await other.commit([change(names[3], element=b"d", place=4)])
    more = [change(name, element=b"e", place=4) for name in names[3:]]
    assert [*await backend.commit(more)] == [ChangeOutcome.GAP, KEPT]
    assert await other.read("kept") == Contents(b"one", (b"a", b"a", b"b", b"c", b"e"))
    assert await other.read(names[3]) == Contents(b"one", (b"a", b"a", b"b", b"c", b"d"))


async def test_logs_that_grow_together_are_each_record_s_own(backend: StoreBackend) -> None:
    names = [f"sess_{number}" for number in range(5)]
    await backend.commit([change(name, snapshot=name.encode(), element=b"0") for name in names])
    for place in range(1, 9):
        growing = names[place % 2 :]
        at = {name: place if name != names[0] else place // 2 for name in growing}
        added = [change(name, element=f"{name} {at[name]}".encode(), place=at[name]) for name in growing]
        assert set(await backend.commit(added)) == {KEPT}
    await backend.commit([change(names[1], end=StoreEnd.DELETE), change(names[2], snapshot=b"new", serial=2)])
    assert await backend.read(names[1]) is None
    assert await backend.read(names[2]) == Contents(b"new", ())
    for name, length in ((names[0], 5), (names[3], 9), (names[4], 9)):
        log = (b"0", *(f"{name} {place}".encode() for place in range(1, length)))
        assert await backend.read(name) == Contents(name.encode(), log)


async def test_a_take_that_was_not_done_is_released_without_effect(backend: StoreBackend) -> None:
    await backend.beat("a")
    await backend.commit([change(snapshot=b"one")])
    assert [*await backend.commit([change(fence=2, holder="b", end=StoreEnd.RELEASE)])] == [ChangeOutcome.KEPT]
    found = await backend.find("sess_1")
    assert found is not None
    assert (found.fence, found.holder, found.held) == (1, "a", True)
    assert await backend.take("sess_1", fence=1, holder="b") == Contents(b"one", ())
    await backend.commit([change(fence=2, holder="b", end=StoreEnd.RELEASE)])
    found = await backend.find("sess_1")
    assert found is not None
    assert (found.fence, found.holder) == (2, "")


async def test_what_builds_on_lost_data_is_a_gap(backend: StoreBackend) -> None:
    assert [*await backend.commit([change(element=b"a")])] == [ChangeOutcome.GAP]
    await backend.commit([change(snapshot=b"one", element=b"a")])
    assert [*await backend.commit([change(element=b"c", place=2)])] == [ChangeOutcome.GAP]
    assert [*await backend.commit([change(element=b"c", place=0)])] == [ChangeOutcome.GAP]
    assert [*await backend.commit([change(element=b"c", serial=2, place=1)])] == [ChangeOutcome.GAP]
    assert await backend.read("sess_1") == Contents(b"one", (b"a",))


async def test_a_snapshot_that_arrives_late_or_twice_changes_nothing(backend: StoreBackend) -> None:
    twice = change(snapshot=b"two", serial=2, element=b"a")
    await backend.commit([twice])
    assert [*await backend.commit([change(snapshot=b"one", serial=1)])] == [ChangeOutcome.KEPT]
    assert [*await backend.commit([twice])] == [ChangeOutcome.KEPT]
    assert await backend.read("sess_1") == Contents(b"two", (b"a",))


async def test_a_deleted_record_leaves_its_fence(made: Callable[[], StoreBackend], backend: StoreBackend) -> None:
    await backend.commit([change(snapshot=b"one", element=b"a")])
    other = made()
    await other.open()
    await other.take("sess_1", fence=1, holder="b")
    await other.commit([change(fence=2, snapshot=b"two", end=StoreEnd.DELETE)])
    assert await backend.find("sess_1") is None
    assert await backend.read("sess_1") is None
    assert await backend.take("sess_1", fence=2, holder="a") is None
    assert not await backend.erase("sess_1")
    assert [*await backend.commit([change(snapshot=b"back", serial=5)])] == [ChangeOutcome.DELETED]
    assert [*await backend.beat("b")] == []  # it knows
    # Its own holder may write it again.
    assert [*await other.commit([change(fence=2, serial=2, snapshot=b"three")])] == [ChangeOutcome.KEPT]
    assert await backend.read("sess_1") == Contents(b"three", ())
    await backend.commit([change("never written", end=StoreEnd.DELETE)])
    assert await backend.find("never written") is None


async def test_what_is_erased_is_lost_by_its_holder(backend: StoreBackend) -> None:
    await backend.commit([change(snapshot=b"one", element=b"a")])
    assert await backend.erase("sess_1")
    assert not await backend.erase("sess_1")
    assert not await backend.erase("sess_2")
    assert await backend.find("sess_1") is None
    assert [*await backend.commit([change(snapshot=b"two", serial=2)])] == [ChangeOutcome.DELETED]
    assert [*await backend.beat("b")] == []
    assert [*await backend.beat("a")] == ["sess_1"]
    assert [*await backend.beat("a")] == []


async def test_a_record_is_held_while_its_holder_lives(made: Callable[[], StoreBackend], backend: StoreBackend) -> None:
    await backend.commit([change(snapshot=b"one")])

    async def held() -> bool:
        found = await backend.find("sess_1")
        assert found is not None
        return found.held

    assert not await held()
    other = made()
    await other.open()
    await other.beat("a")
    assert await held()
    await other.beat("b")
    await other.leave("a")
    assert not await held()
    await other.beat("a")
    await backend.commit([change(end=StoreEnd.RELEASE)])
    assert not await held()
    found = await backend.find("sess_1")
    assert found is not None
    assert found.holder == ""


async def test_the_store_counts_the_time_away(backend: StoreBackend) -> None:
    async def away_sec() -> float | None:
        found = await backend.find("sess_1")
        assert found is not None
        return found.away_sec

    await backend.commit([change(snapshot=b"one", clear=AWAY)])
    first = await away_sec()
    assert first is not None
    assert first >= 0
    await backend.commit([change(snapshot=b"two", serial=2, clear=AWAY)])
    second = await away_sec()
    assert second is not None
    assert second >= first
    await backend.commit([change(snapshot=b"three", serial=3)])
    assert await away_sec() is None


async def test_data_are_kept_byte_by_byte(backend: StoreBackend) -> None:
    every = bytes(range(256)) * 300
    clear = ClearPart("1.ab", "mode_b", "ключ '\"\x00 ]", (every[:32],), False)
    await backend.commit([change("sess_ü'; --", clear=clear, snapshot=every, element=every)])
    found = await backend.find("sess_ü'; --")
    assert found is not None
    assert found.clear == clear
    assert await backend.read("sess_ü'; --") == Contents(every, (every,))


async def test_probes_leave_nothing(backend: StoreBackend) -> None:
    await backend.probe()
    await backend.probe()
    assert (await backend.prune(max_age_sec=60, max_bytes=sys.maxsize)).records == 0


async def test_commits_and_takes_at_the_same_time(made: Callable[[], StoreBackend], backend: StoreBackend) -> None:
    """Of several that take a record at once, one gets it."""
    await backend.commit([change(snapshot=b"one")])
    others = [made() for _ in range(4)]
    for other in others:
        await other.open()
    taken = await asyncio.gather(*(one.take("sess_1", fence=1, holder=str(n)) for n, one in enumerate(others)))
    assert sorted(map(str, taken)) == sorted(map(str, [Contents(b"one", ()), None, None, None]))
    found = await backend.find("sess_1")
    assert found is not None
    assert taken[int(found.holder)] is not None
    assert isinstance(await backend.prune(max_age_sec=60, max_bytes=sys.maxsize), StoreSize)
