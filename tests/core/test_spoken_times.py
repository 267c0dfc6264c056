"""When live sound was spoken, by the times of its arrival."""

import pytest

from omni_ws.core.reorder import SpokenTimes

PIECE_MS = 20


def ended(delays: list[float], *, anchor: int, pace: float = 1.0, pause_ms: float = 0.0) -> float:
    """How long after its own time the end of piece ``anchor`` counts as spoken; ``pause_ms`` is behind that piece."""
    spoken = SpokenTimes()
    for number, delay in enumerate(delays, 1):
        waited = pause_ms if number > anchor else 0.0
        spoken.arrived(number * PIECE_MS / pace + delay + waited, number * PIECE_MS, anchors=number <= anchor)
    return spoken.when(anchor * PIECE_MS) - anchor * PIECE_MS / pace


@pytest.mark.parametrize(
    ("delays", "expected"),
    [
        pytest.param([30] * 20, 30, id="as prompt as all others"),
        pytest.param([30] * 9 + [90] + [30] * 10, 30, id="late"),
        pytest.param([30] * 6 + [90, 80, 70, 60] + [50, 40] + [30] * 8, 30, id="among late ones"),
        pytest.param([30] * 9 + [90] * 11, 90, id="all behind it are late, too: the client has paused"),
        pytest.param([90] * 10 + [30] * 10, 90, id="all before it are late, too"),
        pytest.param([30] * 9 + [90], 90, id="nothing comes behind it"),
    ],
)
def test_only_a_late_piece_is_earlier_than_its_arrival(delays: list[float], expected: float) -> None:
    assert ended(delays, anchor=10) == pytest.approx(expected)


def test_a_file_and_a_client_that_sends_nothing_in_silence_have_no_late_pieces() -> None:
    assert ended([0] * 20, anchor=10, pace=8) == pytest.approx(0)
    assert ended([0] * 20, anchor=10, pause_ms=400) == pytest.approx(0)
