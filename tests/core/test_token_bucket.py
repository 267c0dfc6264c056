"""Rate and burst, with a clock that the test sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.quota import TokenBucket


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
