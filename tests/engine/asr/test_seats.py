import pytest

from omni_ws.engine.asr.seats import Seats
from omni_ws.errors import EngineOverloaded


def test_seats_at_the_limit_and_past_it() -> None:
    seats = Seats(2)
    seats.take()
    seats.take()
    with pytest.raises(EngineOverloaded) as refusal:
        seats.take()
    assert refusal.value.retry_after_ms
    seats.leave()
    seats.take()
    assert seats.taken == 2
