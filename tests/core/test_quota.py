from __future__ import annotations

import pytest

from omni_ws.core.quota import ByteBudget
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
