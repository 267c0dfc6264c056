"""The writer of a process: what is settled when, who is told what, and what a store does that is slow, full or gone."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.fake_store import FakeBackend, FakeStore, kept_by

from omni_ws.core.quota import ByteBudget
from omni_ws.metrics import Metrics
from omni_ws.service.store import session_store
from omni_ws.service.store.records import (
    RECORD_VERSION,
    Contents,
    FoundRecord,
    Sealer,
    StoreError,
    StoreSize,
    packed,
)
from omni_ws.service.store.session_store import MAX_QUEUED_BYTES, Lease, SessionStore

pytestmark = pytest.mark.virtual_clock


class Holder:
    """A session behind a lease; it writes snapshots when it is asked, and keeps what it is told."""

    def __init__(self, store: SessionStore, lease: Lease, *, answers: bool = True) -> None:
        self.store, self.lease = store, lease
        self.told: list[str] = []
        self.answers = answers
        self.state = b"state"
        lease.holder = self

    def lease_lost(self, *, deleted: bool) -> None:
        self.told.append("deleted" if deleted else "lost")

    def store_degraded(self) -> None:
        self.told.append("degraded")

    def store_wants_snapshot(self) -> None:
        self.told.append("wanted")
        if self.answers:
            self.snapshot()

    def snapshot(self, *, away: bool = False) -> None:
        self.store.snapshot(self.lease, self.state, tokens=(b"digest",), away=away)

    def when_settled(self, word: str) -> None:
        self.store.when_settled(self.lease, lambda: self.told.append(word))


@pytest.fixture
def shared() -> FakeStore:
    return FakeStore()


@asynccontextmanager
async def started(shared: FakeStore, **options: object) -> AsyncIterator[SessionStore]:
    store = kept_by(FakeBackend(shared), **options)
    await store.start()
    try:
        yield store
    finally:
        shared.open.set()
        await store.stop()


@pytest.fixture
async def store(shared: FakeStore) -> AsyncIterator[SessionStore]:
    async with started(shared) as store:
        yield store


def begun(store: SessionStore, session_id: str = "sess_1", **options: bool) -> Holder:
    return Holder(store, store.begin(session_id, kind="native", owner="anna"), **options)


async def kept(store: SessionStore, session_id: str = "sess_1") -> Holder:
    """A session whose first snapshot is settled."""
    holder = begun(store, session_id)
    holder.snapshot()
    await store.settle(holder.lease)
    return holder


async def until(condition: Callable[[], bool]) -> None:
    """Lets time pass until ``condition`` holds."""
    async with asyncio.timeout(100):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


# Writing.


async def test_nothing_is_written_before_the_first_snapshot(shared: FakeStore, store: SessionStore) -> None:
    holder = begun(store)
    store.append(holder.lease, b"not kept")
    holder.when_settled("at once")
    assert holder.told == ["at once"]
    assert not holder.lease.whole
    store.release(holder.lease, delete=True)
    assert shared.commits == 0


async def test_what_is_settled_is_committed_and_told_in_order(shared: FakeStore, store: SessionStore) -> None:
    shared.open.clear()
    holder = begun(store)
    holder.snapshot()
    holder.when_settled("snapshot")
    store.append(holder.lease, b"a")
    holder.when_settled("a")
    await asyncio.sleep(0.1)
    assert holder.told == []
    shared.open.set()
    await store.settle(holder.lease)
    assert holder.told == ["snapshot", "a"]
    assert await store.read("sess_1") == (b"state", (b"a",))
    holder.when_settled("at once")
    assert holder.told[-1] == "at once"


async def test_one_commit_takes_what_all_sessions_queued_during_the_one_before(
    shared: FakeStore, store: SessionStore
) -> None:
    shared.open.clear()
    holders = [begun(store, f"sess_{number}") for number in range(20)]
    for holder in holders:
        holder.snapshot()
    await asyncio.sleep(0.01)
    for holder in holders:
        for letter in (b"a", b"b", b"c"):
            store.append(holder.lease, letter)
    shared.open.set()
    await asyncio.gather(*(store.settle(holder.lease) for holder in holders))
    assert shared.commits == 2
    assert await store.read("sess_19") == (b"state", (b"a", b"b", b"c"))


async def test_a_snapshot_takes_the_place_of_what_is_queued(shared: FakeStore, store: SessionStore) -> None:
    holder = begun(store)
    holder.snapshot()
    store.append(holder.lease, b"before")
    holder.state = b"newer"
    holder.snapshot()
    store.append(holder.lease, b"after")
    await store.settle(holder.lease)
    assert await store.read("sess_1") == (b"newer", (b"after",))
    assert shared.changes[0].snapshot == packed(b"newer")


async def test_a_commit_is_bounded_in_what_it_overwrites(shared: FakeStore, store: SessionStore) -> None:
    holders = [await kept(store, f"sess_{number}") for number in range(4)]
    for holder in holders:
        store.append(holder.lease, bytes(session_store._MAX_COMMIT_BYTES // 2))
        await store.settle(holder.lease)
    before = shared.commits
    for holder in holders:
        store.release(holder.lease, delete=True)
    await asyncio.gather(*(store.settle(holder.lease) for holder in holders))
    assert shared.commits == before + 2


async def test_a_commit_is_bounded_in_records(shared: FakeStore, store: SessionStore) -> None:
    holders = [begun(store, f"sess_{number}") for number in range(session_store.MAX_CHANGES + 1)]
    for holder in holders:
        holder.snapshot()
    await store.settle(holders[-1].lease)
    assert shared.commits == 2


async def test_what_is_queued_is_charged_until_it_is_committed(shared: FakeStore) -> None:
    budget = ByteBudget(1000)
    async with started(shared, budget=budget) as store:
        shared.open.clear()
        holder = begun(store)
        holder.state = bytes(100)
        holder.snapshot()
        store.append(holder.lease, bytes(10))
        assert budget.used == 110
        holder.snapshot()
        assert budget.used == 100
        shared.open.set()
        await store.settle(holder.lease)
        assert budget.used == 0


async def test_stop_commits_what_is_queued_and_frees_the_records(shared: FakeStore) -> None:
    async with started(shared) as store:
        holder = await kept(store)
        store.append(holder.lease, b"last")
    async with started(shared) as other:
        taken = await other.take("sess_1", force=False)
        assert taken is not None
        assert taken.entries == (b"last",)


# Taking over.


async def test_a_session_moves_and_its_holder_before_is_told_once(shared: FakeStore, store: SessionStore) -> None:
    before = await kept(store)
    store.append(before.lease, b"a")
    await store.settle(before.lease)
    async with started(shared) as other:
        found = await other.peek("sess_1")
        assert found is not None
        assert (found.clear.kind, found.clear.owner, found.clear.tokens, found.held) == (
            *("native", "anna"),
            *((b"digest",), True),
        )
        taken = await other.take("sess_1", force=True)
        assert taken is not None
        assert (taken.snapshot, taken.entries) == (b"state", (b"a",))
        after = Holder(other, taken.lease)
        after.snapshot()
        await other.settle(after.lease)
        store.append(before.lease, b"late")
        before.when_settled("never")
        await store.settle(before.lease)
        assert before.told == ["lost"]
        assert before.lease.lost
        before.snapshot()
        store.append(before.lease, b"later")
        before.when_settled("never")
        store.release(before.lease, delete=True)
        await store.settle(before.lease)
        assert await other.read("sess_1") == (b"state", ())
        assert before.told == ["lost"]


async def test_a_living_process_keeps_its_sessions_unless_forced(shared: FakeStore) -> None:
    async with started(shared) as other, started(shared) as store:
        await kept(store)
        assert await other.take("sess_1", force=False) is None
        # A process that sleeps gives no sign of life.
        shared.seen[store.process] -= 6
        assert (await other.take("sess_1", force=False)) is not None


async def test_released_records_are_for_everybody(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    holder.state = b"at the end"
    holder.snapshot(away=True)
    store.release(holder.lease, delete=False)
    # Also for its own process, at once.
    taken = await store.take("sess_1", force=False)
    assert taken is not None
    assert taken.snapshot == b"at the end"
    assert taken.found.away_sec is not None
    # What was taken but not written is given back as it was.
    store.release(taken.lease, delete=False)
    await store.settle(taken.lease)
    async with started(shared) as other:
        again = await other.take("sess_1", force=False)
    assert again is not None
    assert again.snapshot == b"at the end"


async def test_a_session_that_ended_leaves_nothing(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    store.append(holder.lease, b"a")
    store.release(holder.lease, delete=True)
    holder.when_settled("gone")
    await store.settle(holder.lease)
    assert holder.told == ["gone"]
    assert await store.peek("sess_1") is None
    assert await store.take("sess_1", force=True) is None
    assert await store.read("sess_1") is None


async def test_who_takes_its_own_session_loses_the_lease_before(store: SessionStore) -> None:
    holder = await kept(store)
    taken = await store.take("sess_1", force=True)
    assert taken is not None
    assert holder.told == ["lost"]


async def test_a_record_whose_taker_gave_up_may_be_taken_again(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await kept(store)
    store.release(before.lease, delete=False)
    await store.settle(before.lease)
    take, taken, answer = store._backend.take, asyncio.Event(), asyncio.Event()

    async def slow(session_id: str, **options: Any) -> Contents | None:
        contents = await take(session_id, **options)
        taken.set()
        await answer.wait()
        return contents

    monkeypatch.setattr(store._backend, "take", slow)
    taking = asyncio.create_task(store.take("sess_1", force=False))
    await taken.wait()
    assert await store.take("sess_1", force=False) is None  # another client's is under way
    taking.cancel()
    await asyncio.wait([taking])
    answer.set()
    found = await store.take("sess_1", force=False)
    assert found is not None
    assert found.lease.fence == shared.records["sess_1"].fence == 3
    assert await store.take("sess_1", force=False) is None


@pytest.mark.parametrize("lost", ["held by another", "gone"])
async def test_a_take_that_comes_late_looks_again(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    await kept(store)
    async with started(shared) as other:
        take = FakeBackend.take

        async def late(backend: FakeBackend, session_id: str, **options: Any) -> object:
            monkeypatch.setattr(FakeBackend, "take", take)
            if lost == "gone":
                assert await backend.erase(session_id)
            else:
                assert await take(backend, session_id, fence=options["fence"], holder="somebody")
            return await take(backend, session_id, **options)

        monkeypatch.setattr(FakeBackend, "take", late)
        taken = await other.take("sess_1", force=True)
        assert (taken is None) == (lost == "gone")
        assert taken is None or taken.lease.fence == 3


@pytest.mark.parametrize("fails", [False, True])
async def test_a_take_that_nobody_waits_for_leaves_the_record_to_all(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    holder = await kept(store)
    store.release(holder.lease, delete=False)
    await store.settle(holder.lease)
    take = FakeBackend.take

    async def without_answer(backend: FakeBackend, session_id: str, **options: Any) -> object:
        await take(backend, session_id, **options)
        return await asyncio.get_running_loop().create_future()

    async with started(shared) as other:
        monkeypatch.setattr(FakeBackend, "take", without_answer)
        taking = asyncio.create_task(other.take("sess_1", force=False))
        await until(lambda: shared.records["sess_1"].holder == other.process)
        shared.gone = fails
        taking.cancel()
        await asyncio.gather(taking, return_exceptions=True)
        await until(lambda: other.degraded == fails)
        shared.gone = False
        monkeypatch.setattr(FakeBackend, "take", take)
        await until(lambda: not shared.records["sess_1"].holder)
        taken = await store.take("sess_1", force=False)
        assert taken is not None
        assert taken.snapshot == b"state"


async def test_only_the_owner_deletes_and_the_session_ends_where_it_is(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    async with started(shared) as other:
        assert not await other.delete("sess_1", owner=None)
        assert not await other.delete("sess_1", owner="berta")
        assert not await other.delete("sess_2", owner="anna")
        assert await other.delete("sess_1", owner="anna")
        assert not await other.delete("sess_1", owner="anna")
        store.append(holder.lease, b"late")
        await store.settle(holder.lease)
        assert holder.told == ["deleted"]
        assert await store.peek("sess_1") is None
        resting = await kept(store, "sess_3")
        assert await other.delete("sess_3", owner="anna")
        await asyncio.sleep(session_store.BEAT_SEC)
        assert resting.told == ["deleted"]
    own = await kept(store, "sess_2")
    assert await store.delete("sess_2", owner="anna")
    assert own.told == ["deleted"]


# What cannot be read.


async def test_records_of_another_version_or_key_are_as_if_absent(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await kept(store)
    async with started(shared, sealer=Sealer([bytes(32)])) as sealed:
        for asked in (await sealed.peek("sess_1"), await sealed.take("sess_1", force=True)):
            assert asked is None
        assert await sealed.read("sess_1") is None
        await kept(sealed, "sess_2")
        assert await store.take("sess_2", force=True) is None
        # Unread, it still can be deleted by its owner.
        assert await store.delete("sess_2", owner="anna")
    monkeypatch.setattr("omni_ws.service.store.records.RECORD_VERSION", RECORD_VERSION + 1)
    async with started(shared) as newer:
        assert await newer.take("sess_1", force=True) is None
    # They did not take it either: who can read it has it as before.
    assert shared.records["sess_1"].fence == 1


async def test_a_damaged_record_is_as_if_absent(
    shared: FakeStore, store: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    holder = await kept(store)
    store.append(holder.lease, b"a")
    await store.settle(holder.lease)
    shared.records["sess_1"].log[0] = b"\xc1"
    assert await store.read("sess_1") is None
    assert await store.take("sess_1", force=True) is None
    assert "the record of session sess_1 in the store is damaged" in caplog.text


@pytest.mark.parametrize("more", [0, 1])
async def test_a_long_log_is_replaced_when_the_snapshots_of_others_leave_room(
    shared: FakeStore, store: SessionStore, more: int
) -> None:
    long, other, small = [await kept(store, name) for name in ("sess_long", "sess_other", "sess_small")]
    shared.open.clear()
    small.snapshot()
    await until(lambda: small.lease.flying is not None)
    other.state = bytes(MAX_QUEUED_BYTES // 4 + more)
    other.snapshot()
    store.when_settled(other.lease, lambda: long.told.append("the other"))
    store.append(long.lease, b"")
    store.want_snapshot(long.lease)
    shared.open.set()
    await until(lambda: len(long.told) == 2)
    assert long.told == (["the other", "wanted"] if more else ["wanted", "the other"])


@pytest.mark.parametrize("more", [0, 1])
async def test_what_takes_long_to_open_is_opened_off_the_loop(shared: FakeStore, more: int) -> None:
    threads = []

    class Noticing(Sealer):
        def open(self, form: str, session_id: str, data: bytes, place: int) -> bytes:
            threads.append(threading.current_thread())
            return super().open(form, session_id, data, place)

    async with started(shared, sealer=Noticing()) as store:
        holder = begun(store)
        noise = random.Random(0).randbytes(64 << 10)
        holder.state = next(noise[:-cut] for cut in range(1, 100) if len(packed(noise[:-cut])) == (64 << 10) + more)
        holder.snapshot()
        await store.settle(holder.lease)
        store.release(holder.lease, delete=False)
        taken = await store.take("sess_1", force=True)
        assert taken is not None
        assert taken.snapshot == holder.state
    assert [one is threading.main_thread() for one in threads] == [not more]


async def test_nothing_in_the_clear_is_written_with_a_key(shared: FakeStore) -> None:
    async with started(shared, sealer=Sealer([bytes(32)])) as store:
        holder = begun(store)
        holder.state = b"what was said"
        holder.snapshot()
        store.append(holder.lease, b"what was said")
        await store.settle(holder.lease)
        store.append(holder.lease, b"what was said")
        await store.settle(holder.lease)
        for change in shared.changes:
            assert b"what was said" not in (change.snapshot or b"") + (change.element or b"")
        assert await store.read("sess_1") == (b"what was said", (b"what was said",) * 2)


@pytest.mark.parametrize("size", [session_store._SEALED_HERE_BYTES, session_store._SEALED_HERE_BYTES + 1])
async def test_what_is_long_is_sealed_off_the_loop(
    shared: FakeStore, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed: list[object] = []

    async def run_work(_: object, call: Callable[..., object], *arguments: object) -> object:
        sealed.append(call)
        return call(*arguments)  # a virtual clock sees no threads

    monkeypatch.setattr(session_store, "run_work", run_work)
    async with started(shared) as store:
        holder = begun(store)
        holder.state = bytes(size)
        holder.snapshot()
        await store.settle(holder.lease)
        assert len(sealed) == (size > session_store._SEALED_HERE_BYTES)
        assert await store.read("sess_1") == (bytes(size), ())


# A store that fails.


@pytest.mark.parametrize(("delay", "degraded"), [(0.24, False), (0.26, True)])
async def test_a_store_that_is_slow_is_degraded(
    shared: FakeStore, store: SessionStore, delay: float, degraded: bool
) -> None:
    holder = await kept(store)
    shared.delay_sec = delay
    store.append(holder.lease, b"a")
    holder.when_settled("settled")
    await store.settle(holder.lease)
    assert holder.told == (["degraded", "settled"] if degraded else ["settled"])
    assert (store.degraded, store.reason) == (degraded, "slow" if degraded else "")


@pytest.mark.parametrize("reason", ["slow", "full", "gone"])
async def test_sessions_are_told_and_kept_again_when_the_store_works(
    shared: FakeStore, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, session_store.__name__)
    metrics = Metrics()
    async with started(shared, metrics=metrics) as store:
        busy, idle = await kept(store), await kept(store, "sess_2")
        shared.delay_sec, shared.full, shared.gone = 2.0 * (reason == "slow"), reason == "full", reason == "gone"
        store.append(busy.lease, b"a")
        busy.when_settled("settled")
        await store.settle(busy.lease)
        assert busy.told == ["degraded", "settled"]
        await until(lambda: idle.told == ["degraded"])
        # Nothing waits now, and nothing is kept.
        store.append(busy.lease, b"b")
        busy.snapshot()
        busy.when_settled("at once")
        assert busy.told[-1] == "at once"
        late = begun(store, "sess_3")
        late.snapshot()
        assert (store.degraded, busy.lease.whole, late.lease.whole) == (True, False, False)
        await asyncio.sleep(10)
        assert (store.degraded, store.reason) == (True, reason)
        assert busy.told == ["degraded", "settled", "at once"]
        assert metrics.registry.get_sample_value("omni_ws_store_up", {"store": "fake"}) == 0
        assert metrics.registry.get_sample_value("omni_ws_store_failures_total", {"reason": reason}) == 1

        shared.delay_sec, shared.full, shared.gone = 0.0, False, False
        busy.state = b"now"
        await until(lambda: all(one.told[-1] == "wanted" for one in (busy, idle, late)))
        await store.settle(late.lease)
        assert not store.degraded
        store.append(busy.lease, b"c")
        await store.settle(busy.lease)
        assert await store.read("sess_1") == (b"now", (b"c",))
        assert await store.read("sess_3") == (b"state", ())
        assert metrics.registry.get_sample_value("omni_ws_store_up", {"store": "fake"}) == 1
    lines = [record.message for record in caplog.records]
    assert [line.partition(",")[0] for line in lines] == [
        f"the store of sessions (fake) is {reason}",
        "the store of sessions (fake) works again",
    ]


async def test_a_store_that_fails_again_soon_is_tried_less_often(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    loop = asyncio.get_running_loop()
    took = []
    for passed in (0.0, 1.0, 1.0, 31.0):
        await asyncio.sleep(passed)
        shared.gone = True
        store.append(holder.lease, b"a")
        await store.settle(holder.lease)
        shared.gone, began = False, loop.time()
        await until(lambda: holder.lease.whole)
        took.append(loop.time() - began)
    assert [round(seconds, 1) for seconds in took] == [0.3, 0.5, 1.0, 0.3]


async def test_a_full_store_is_pruned(shared: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    pruned: list[int] = []
    prune = FakeBackend.prune

    async def told(backend: FakeBackend, *, max_age_sec: float, max_bytes: int) -> StoreSize:
        pruned.append(max_bytes)
        return await prune(backend, max_age_sec=max_age_sec, max_bytes=max_bytes)

    monkeypatch.setattr(FakeBackend, "prune", told)
    async with started(shared) as store:
        await kept(store)
        await asyncio.sleep(session_store.PRUNE_SEC)
        shared.full = True
        await kept(store, "sess_2")
        await until(lambda: len(pruned) > 2)
        assert pruned[2] == len(shared.records["sess_1"].snapshot) * 9 // 10


async def test_a_process_starts_without_its_store(shared: FakeStore) -> None:
    shared.gone = True
    async with started(shared) as store:
        assert store.degraded
        holder = begun(store)
        holder.snapshot()
        with pytest.raises(StoreError, match="gone"):
            await store.peek("sess_1")
        shared.gone = False
        await until(lambda: not store.degraded and holder.lease.whole)
        await store.settle(holder.lease)
        assert await store.read("sess_1") == (b"state", ())


async def test_an_idle_process_notices_that_the_store_is_gone(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    shared.gone = True
    await until(lambda: store.degraded)
    await until(lambda: holder.told == ["degraded"])


async def test_questions_to_a_store_that_hangs_end(shared: FakeStore, store: SessionStore) -> None:
    await kept(store)
    shared.delay_sec = 60
    with pytest.raises(StoreError, match="does not answer"):
        await store.take("sess_1", force=True)
    shared.delay_sec = 0


async def test_many_who_come_back_at_once_ask_one_after_the_other(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, most = 0, 0
    find = FakeBackend.find

    async def counted(backend: FakeBackend, session_id: str) -> FoundRecord | None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(1)
            return await find(backend, session_id)
        finally:
            at_once -= 1

    monkeypatch.setattr(FakeBackend, "find", counted)
    # The last has an answer though it comes after ``ANSWER_SEC``.
    assert set(await asyncio.gather(*(store.peek(f"sess_{number}") for number in range(100)))) == {None}
    assert most == session_store._QUESTIONS


async def test_sessions_that_end_while_nothing_is_kept_are_deleted_later(
    shared: FakeStore, store: SessionStore
) -> None:
    ends, hands_over = await kept(store), await kept(store, "sess_2")
    shared.gone = True
    await until(lambda: store.degraded)
    store.release(ends.lease, delete=True)
    store.release(hands_over.lease, delete=False)  # what the store has of it is not its end
    shared.gone = False
    await until(lambda: not store.degraded)
    await store.settle(hands_over.lease)
    assert await store.peek("sess_1") is None
    assert await store.peek("sess_2") is None
    assert "wanted" not in ends.told + hands_over.told


async def test_an_end_that_fails_is_repeated(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    shared.open.clear()
    store.release(holder.lease, delete=False)
    await asyncio.sleep(0.01)
    shared.gone = True
    shared.open.set()
    await until(lambda: store.degraded)
    shared.gone = False
    await until(lambda: not store.degraded)
    await until(lambda: shared.records["sess_1"].gone)


async def test_ends_are_remembered_up_to_a_bound(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "_MAX_ENDS", 2)
    holders = [await kept(store, f"sess_{number}") for number in range(3)]
    shared.gone = True
    await until(lambda: store.degraded)
    for holder in holders:
        store.release(holder.lease, delete=True)
    shared.gone = False
    await until(lambda: not store.degraded and not store._queue)
    await asyncio.sleep(0.1)
    assert [shared.records[f"sess_{number}"].gone for number in range(3)] == [True, True, False]


async def test_a_store_that_lost_its_data_is_mended_by_snapshots(shared: FakeStore, store: SessionStore) -> None:
    holder = await kept(store)
    shared.lose_everything()
    shared.open.clear()
    holder.state = b"now"
    store.append(holder.lease, b"a")
    holder.when_settled("settled")
    await asyncio.sleep(0.1)  # it is on its way
    store.append(holder.lease, b"b")
    holder.when_settled("later")
    shared.open.set()
    await store.settle(holder.lease)
    assert holder.told == ["wanted", "settled", "later"]
    assert await store.read("sess_1") == (b"now", ())
    assert not store.degraded
    # And one whose session does not answer is left as it is.
    mute = begun(store, "sess_2", answers=False)
    mute.snapshot()
    await store.settle(mute.lease)
    shared.lose_everything()
    store.append(mute.lease, b"a")
    mute.when_settled("settled")
    await store.settle(mute.lease)
    assert mute.told == ["wanted", "settled"]
    assert not mute.lease.whole


async def test_more_than_the_queue_holds_counts_as_slow(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "MAX_QUEUED_BYTES", 100)
    holder = await kept(store)
    shared.open.clear()
    store.append(holder.lease, bytes(100))
    assert not store.degraded
    store.append(holder.lease, b"x")
    assert (store.degraded, store.reason) == (True, "slow")
    assert store._queued_bytes == 0


async def test_a_session_that_is_too_large_is_not_kept_until_it_is_smaller(
    shared: FakeStore, store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "MAX_SNAPSHOT_BYTES", 10)
    holder = await kept(store)
    holder.state = bytes(10)
    holder.snapshot()
    await store.settle(holder.lease)
    assert holder.told == []
    holder.state = bytes(11)
    holder.snapshot()
    store.append(holder.lease, b"a")
    holder.when_settled("settled")
    await store.settle(holder.lease)
    assert holder.told == ["degraded", "settled"]
    assert await store.peek("sess_1") is None
    assert not store.degraded
    holder.state = b"small"
    holder.snapshot()
    await store.settle(holder.lease)
    assert await store.read("sess_1") == (b"small", ())


@pytest.mark.parametrize(("seconds", "degraded"), [(1.9, False), (2.1, True)])
async def test_a_busy_loop_is_not_the_fault_of_the_store(
    shared: FakeStore, store: SessionStore, seconds: float, degraded: bool
) -> None:
    """Up to a bound. Each pass of the loop takes 30 ms."""
    holder = await kept(store)
    loop = asyncio.get_running_loop()
    shared.open.clear()
    store.append(holder.lease, b"a")
    for _ in range(round(seconds / 0.03)):
        loop._selector.now += 0.03  # type: ignore[attr-defined]
        await asyncio.sleep(0)
    shared.open.set()
    await store.settle(holder.lease)
    assert store.degraded == degraded


async def test_defects_of_one_session_are_logged_and_harm_no_other(
    shared: FakeStore, store: SessionStore, caplog: pytest.LogCaptureFixture
) -> None:
    holder, other = await kept(store), await kept(store, "sess_2")
    store.append(holder.lease, b"a")
    store.when_settled(holder.lease, lambda: 1 // 0)  # type: ignore[arg-type]
    store.append(other.lease, b"a")
    await store.settle(other.lease)
    store.append(other.lease, b"b")
    await store.settle(other.lease)
    assert "a defect in a session that is kept" in caplog.text


@pytest.mark.parametrize("where", ["_commit", "beat", "prune"])
async def test_a_defect_of_a_store_is_logged_and_degrades_it(
    shared: FakeStore,
    store: SessionStore,
    where: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    holder = await kept(store)
    monkeypatch.setattr(FakeBackend, where, lambda *_, **__: 1 // 0)
    store.append(holder.lease, b"a")
    await store.settle(holder.lease)
    await until(lambda: store.degraded)
    assert "a defect in the store of sessions" in caplog.text
    monkeypatch.undo()
    await until(lambda: not store.degraded)


async def test_records_of_sessions_that_live_long_are_written_anew(shared: FakeStore) -> None:
    async with started(shared, max_age_sec=600.0) as store:
        holder = await kept(store)
        await asyncio.sleep(290)
        assert holder.told == []
        await asyncio.sleep(120)
        assert holder.told == ["wanted"]


async def test_the_store_is_measured(shared: FakeStore) -> None:
    metrics = Metrics()
    async with started(shared, metrics=metrics) as store:
        holder = await kept(store)
        store.append(holder.lease, b"abc")
        await store.settle(holder.lease)
        await asyncio.sleep(session_store.PRUNE_SEC)
        sample = metrics.registry.get_sample_value
        assert sample("omni_ws_store_records") == 1
        assert sample("omni_ws_store_leases") == 1
        assert sample("omni_ws_store_bytes") == sum(
            len(c.snapshot or b"") + len(c.element or b"") for c in shared.changes
        )
        assert sample("omni_ws_store_written_bytes_total") == sample("omni_ws_store_bytes")
        assert sample("omni_ws_store_commit_seconds_count") == 2
        assert await store.take("sess_9", force=True) is None
        assert sample("omni_ws_store_takes_total", {"outcome": "absent"}) == 1


async def test_stop_ends_though_a_cancellation_is_taken_for_an_error(
    shared: FakeStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = asyncio.Event()

    async def hangs(*_: object, **__: object) -> StoreSize:
        entered.set()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise StoreError("gone", "the connection was lost") from None
        raise AssertionError("not reached")

    monkeypatch.setattr(FakeBackend, "prune", hangs)
    async with started(shared):
        await entered.wait()
    assert caplog.records == []
