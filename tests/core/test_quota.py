from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.core.quota import (
    ORDINARY_BYTES,
    ByteBudget,
    SessionAccount,
    Share,
    TokenBucket,
    beyond_ordinary,
    memory_of,
)
from omni_ws.errors import EngineOverloaded, PayloadTooLarge


def test_takes_up_to_its_capacity_and_no_byte_more() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    budget.take(40)
    assert budget.used == 100
    budget.take(0)
    with pytest.raises(EngineOverloaded) as caught:
        budget.take(1)
    assert caught.value.retry_after_ms is not None
    assert budget.used == 100
    budget.give(1)
    budget.take(1)
    assert budget.used == 100


def test_a_share_grows_and_shrinks_and_stays_as_it_was_where_there_is_no_room() -> None:
    budget = ByteBudget(100)
    one, other = Share(budget), Share(budget)
    one.resize(60)
    other.resize(40)
    assert budget.used == 100
    with pytest.raises(EngineOverloaded):
        one.resize(61)
    assert (one.size, budget.used) == (60, 100)
    other.resize(39)
    one.resize(61)
    one.resize(0)
    assert (one.size, budget.used) == (0, 39)


def test_an_account_refuses_beyond_its_own_limit_and_beyond_that_of_the_server() -> None:
    server = ByteBudget(150)
    one, other = SessionAccount(server, 100), SessionAccount(server, 100)
    one.take(100)
    with pytest.raises(PayloadTooLarge):
        one.take(1)
    other.take(50)
    with pytest.raises(EngineOverloaded):
        other.take(1)
    assert (one.used, other.used, server.used) == (100, 50, 150)
    one.give(1)
    other.take(1)
    other.give(51)
    assert (one.used, other.used, server.used) == (99, 0, 99)


def test_what_must_not_be_lost_is_charged_beyond_the_limit_and_makes_room_as_it_goes() -> None:
    server = ByteBudget(100)
    account = SessionAccount(server, 50)
    account.charge(60)
    assert (account.used, server.used, account.over_half()) == (60, 60, True)
    account.take(0)
    with pytest.raises(PayloadTooLarge):
        account.take(1)
    account.give(60)
    account.take(50)
    assert not account.over_half()
    assert account.over_half(1)


def test_a_share_moves_to_the_account_of_a_session_with_what_it_holds() -> None:
    server = ByteBudget(100)
    account, share = SessionAccount(server, 50), Share(server)
    share.resize(30)
    share.move(account)
    assert (account.used, server.used) == (30, 30)
    share.force(70)
    assert (account.used, server.used) == (70, 70)
    share.resize(0)
    assert (account.used, server.used) == (0, 0)


def test_the_memory_of_a_value_counts_all_that_is_in_it_once() -> None:
    text = "a" * 1000
    assert memory_of(text) == sys.getsizeof(text)
    assert memory_of("\U0001f600" + text) > 4 * memory_of(text) - 500
    assert memory_of([text, text, {"b": text}]) < 1.5 * memory_of(text)
    assert memory_of([[] for _ in range(1000)]) > 1000 * sys.getsizeof([])
    assert memory_of(InputChunk(Modality.TEXT, b"x" * 5000)) > 5000


def test_ordinary_settings_are_not_charged() -> None:
    assert [beyond_ordinary(size) for size in (0, ORDINARY_BYTES, ORDINARY_BYTES + 1)] == [0, 0, 1]


# Rate and burst, with a clock that the test sets.


def test_the_burst_and_one_more() -> None:
    bucket = TokenBucket(rate=2, capacity=3, now=10)
    assert [bucket.try_take(now=10) for _ in range(4)] == [0, 0, 0, 0.5]


def test_what_was_refused_costs_nothing() -> None:
    bucket = TokenBucket(rate=2, capacity=1, now=0)
    assert bucket.try_take(now=0) == 0
    for _ in range(100):
        assert bucket.try_take(now=0.25) == 0.25
    assert bucket.try_take(now=0.5) == 0
    assert bucket.try_take(now=0.5) == 0.5


def test_a_long_silence_saves_up_no_more_than_the_burst() -> None:
    bucket = TokenBucket(rate=1, capacity=2, now=0)
    assert [bucket.try_take(now=1e6) for _ in range(3)] == [0, 0, 1]


def test_debt_is_paid_at_the_rate() -> None:
    bucket = TokenBucket(rate=100, capacity=100, now=0)
    assert bucket.spend(100, now=0) == 0
    assert bucket.spend(1, now=0) == 0.01
    assert bucket.spend(399, now=0) == 4
    assert bucket.spend(0, now=3) == 1
    assert bucket.spend(0, now=4) == 0


def test_a_full_bucket_is_overdrawn_and_saves_up_no_more_than_it_holds() -> None:
    bucket = TokenBucket(rate=100, capacity=1000, now=5)
    assert [bucket.spend(500, now=5) for _ in range(3)] == [0, 0, 5]
    assert bucket.spend(100, now=10) == 1
    assert bucket.spend(100, now=11) == 1
    assert [bucket.spend(1000, now=1000), bucket.spend(1, now=1000)] == [0, 0.01]


@given(
    rate=st.floats(0.01, 1e6),
    capacity=st.floats(1, 1e6),
    gaps=st.lists(st.floats(0, 10), min_size=1, max_size=100),
)
def test_never_more_than_the_burst_and_the_rate(rate: float, capacity: float, gaps: list[float]) -> None:
    bucket = TokenBucket(rate=rate, capacity=capacity, now=0)
    now = 0.0
    taken = 0
    for gap in gaps:
        now += gap
        wait = bucket.try_take(now=now)
        taken += not wait
        assert wait >= 0
        assert taken <= capacity + now * rate + 1e-3
        if wait:
            assert bucket.try_take(now=now + wait * (1 + 1e-9) + 1e-9) == pytest.approx(0)
            now += wait * (1 + 1e-9) + 1e-9
            taken += 1
