"""What workers count together: limits of sessions, rates and amounts of a day, at the limit and past it."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from random import Random
from typing import IO

import pytest

from omni_ws.config.keys import ApiKey, digest
from omni_ws.core.quota import DAY_SEC, DailyLimits, TokenBucket, UsedToday
from omni_ws.errors import EngineOverloaded, RateLimited
from omni_ws.service.sessions.admission import Addresses, Admission
from omni_ws.service.sessions.shared_counts import SharedCounts, SharedDailyUse, SharedSlotCounts, WorkerRow

NAMES = ("one", "two")


@pytest.fixture
def file() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as found:
        yield found


class Side:
    """A worker, with a mapping of its own of the same file."""

    def __init__(self, file: IO[bytes], serial: int, *, max_sessions: int = 4) -> None:
        self.counts = SharedCounts(file, rows=3, slots=max_sessions, keys=NAMES)
        self.row: WorkerRow = self.counts.take_row(serial)
        slots = SharedSlotCounts(self.counts, self.row)
        self.admission = Admission(max_sessions=max_sessions, addresses=Addresses(()), counts=slots)


def key(name: str, **limits: float) -> ApiKey:
    return ApiKey(name=name, key_sha256=digest(name), **limits)  # type: ignore[arg-type]


def take(side: Side, of: ApiKey | None = None, client: str = "") -> None:
    side.admission.take(of, client=client, many_requests=True)


def test_slots_are_those_of_the_server(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    for side in (a, b, a):
        take(side)
    last = b.admission.take(None, many_requests=True)
    for side in (a, b):
        assert side.admission.all_sessions == 4
        with pytest.raises(EngineOverloaded):
            take(side)
    last.release()
    last.release()
    take(a)
    assert (a.admission.sessions, b.admission.sessions, b.admission.all_sessions) == (3, 1, 4)


def test_slots_of_a_key_are_those_of_the_server(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    limited = key("one", max_sessions=2)
    take(a, limited)
    held = b.admission.take(limited, many_requests=True)
    for side in (a, b):
        with pytest.raises(RateLimited):
            take(side, limited)
    take(b, key("two"))
    held.release()
    take(a, limited)


def test_shares_count_the_holders_of_all_workers(file: IO[bytes]) -> None:
    a, b = Side(file, 1, max_sessions=6), Side(file, 2, max_sessions=6)
    for side, client in ((a, "192.0.2.1"), (b, "192.0.2.1"), (a, "192.0.2.2")):
        take(side, client=client)
    for side in (a, b):  # three holders, with one to come: two slots each
        with pytest.raises(RateLimited):
            take(side, client="192.0.2.1")
    take(b, client="192.0.2.2")


def test_what_a_dead_worker_held_is_free(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    for side in (a, a, a, b):
        take(side)
    with pytest.raises(EngineOverloaded):
        take(b)
    b.counts.free(b.counts.rows[a.row.index])
    for _ in range(3):
        take(b)
    with pytest.raises(EngineOverloaded):
        take(b)


def test_there_are_only_so_many_rows(file: IO[bytes]) -> None:
    counts = SharedCounts(file, rows=1, slots=1, keys=())
    counts.take_row(1)
    with pytest.raises(RuntimeError):
        counts.take_row(2)


async def test_a_rate_is_that_of_the_server(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    rated = key("one", requests_per_sec=0.001, burst=3)
    for side in (a, b, a):
        side.admission.request(rated)
    for side in (a, b):
        with pytest.raises(RateLimited):
            side.admission.request(rated)


async def test_the_pace_of_input_is_that_of_the_server(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    rated = key("two", input_bytes_per_sec=1000)
    paces = [side.admission.input_pace(rated) for side in (a, b)]
    waits = [pace(500) for pace in paces if pace is not None]
    assert waits == [0, 0]
    assert [pace(1000) > 0.5 for pace in paces if pace is not None] == [True, True]


@pytest.mark.parametrize("kind", ["requests", "input"])
def test_a_shared_bucket_takes_what_one_bucket_would(file: IO[bytes], kind: str) -> None:
    sides = [Side(file, serial) for serial in (1, 2)]
    begin, rate, capacity = 5e6, 3.0, 7.0
    shared = [
        SharedSlotCounts(side.counts, side.row).bucket(kind, "one", rate=rate, capacity=capacity, now=begin)
        for side in sides
    ]
    alone = TokenBucket(rate=rate, capacity=capacity, now=begin)
    random = Random(1)
    now = begin
    for _ in range(2000):
        now += random.choice((0, 0.01, 0.3, 2, 20))
        bucket, amount = random.choice(shared), random.choice((1, 2, 7))
        if random.random() < 0.2:
            waits = bucket.spend(amount, now=now), alone.spend(amount, now=now)
        else:
            waits = bucket.try_take(amount, now=now), alone.try_take(amount, now=now)
        assert waits[0] == pytest.approx(waits[1], abs=1e-3)


async def test_what_a_dead_worker_spent_of_a_rate_stays_spent(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    rated = key("one", requests_per_sec=0.001, burst=3)
    for side in (a, a, b):
        side.admission.request(rated)
    b.counts.free(b.counts.rows[a.row.index])
    with pytest.raises(RateLimited):
        b.admission.request(rated)


async def test_of_two_that_take_the_last_of_a_rate_at_once_at_most_one_has_it(
    file: IO[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one is stopped in between: what it counted is seen, and what it finds is what all have counted."""
    a, b = Side(file, 1), Side(file, 2)
    rated = key("one", requests_per_sec=0.001, burst=2)
    a.admission.request(rated)
    lost = a.counts.lost
    served = []

    def stopped(name: str, place: int) -> float:
        with contextlib.suppress(RateLimited):
            b.admission.request(rated)
            served.append(b)
        return lost(name, place)

    monkeypatch.setattr(a.counts, "lost", stopped)
    with contextlib.suppress(RateLimited):
        a.admission.request(rated)
        served.append(a)
    assert len(served) <= 1


def test_the_amounts_of_a_day_are_those_of_the_server(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    uses = [SharedDailyUse({"one": DailyLimits(tokens=10)}, side.counts, side.row) for side in (a, b)]
    now = 20_000.5 * DAY_SEC
    uses[0].add("one", tokens=4, audio_ms=70, now=now)
    uses[1].add("one", tokens=5, audio_ms=0, now=now)
    uses[1].add("two", tokens=5, audio_ms=0, now=now)
    assert [use.refusal("one", now) for use in uses] == [None, None]
    uses[0].add("one", tokens=1, audio_ms=0, now=now)
    assert [use.refusal("one", now) is None for use in uses] == [False, False]
    assert b.counts.daily() == (20_000, {"one": UsedToday(10, 70)})
    assert uses[0].refusal("one", now + DAY_SEC) is None
    uses[0].add("one", tokens=12, audio_ms=20, now=now + DAY_SEC)
    assert b.counts.daily() == (20_001, {"one": UsedToday(12, 20)})
    refusal = uses[1].refusal("one", now)  # by a clock that is a day behind
    assert refusal is not None
    assert refusal.retry_after_ms == 1.5 * DAY_SEC * 1000


def test_what_was_used_before_counts(file: IO[bytes]) -> None:
    side = Side(file, 1)
    side.counts.set_daily(7, {"one": UsedToday(10, 0), "gone": UsedToday(1, 1)})
    use = SharedDailyUse({"one": DailyLimits(tokens=10)}, side.counts, side.row)
    assert use.refusal("one", 7.5 * DAY_SEC) is not None
    assert use.refusal("two", 7.5 * DAY_SEC) is None


def test_what_runs_anywhere_is_reserved_and_what_a_dead_worker_used_stays(file: IO[bytes]) -> None:
    a, b = Side(file, 1), Side(file, 2)
    mine, other = (SharedDailyUse({"one": DailyLimits(tokens=1500)}, side.counts, side.row) for side in (a, b))
    now = 20_000.5 * DAY_SEC
    mine.reserve("one", now)
    other.reserve("one", now)
    for use in (mine, other):
        with pytest.raises(RateLimited, match="reserved"):
            use.reserve("one", now)
    mine.add("one", tokens=100, audio_ms=5, now=now, reserved=True)
    mine.reserve("one", now)
    b.counts.free(a.row)  # with what it had reserved
    other.reserve("one", now)
    with pytest.raises(RateLimited, match="reserved"):
        other.reserve("one", now)
    assert b.counts.daily() == (20_000, {"one": UsedToday(100, 5)})


def test_two_that_take_the_last_slot_at_once_have_at_most_one(file: IO[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """No process locks another out: each counts first, and looks then."""
    a, b = Side(file, 1, max_sessions=1), Side(file, 2, max_sessions=1)
    evict = a.admission._evict

    def meanwhile() -> None:
        take(b)
        evict()

    monkeypatch.setattr(a.admission, "_evict", meanwhile)
    with pytest.raises(EngineOverloaded):
        take(a)
    assert (a.admission.sessions, b.admission.all_sessions) == (0, 1)
