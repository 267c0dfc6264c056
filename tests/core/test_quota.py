from __future__ import annotations

import pytest

from omni_ws.core.quota import ByteBudget, Share
from omni_ws.errors import EngineOverloaded


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
