from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ws.core.reorder import Arrival, ReorderBuffer

WINDOW = 16


def put(buffer: ReorderBuffer[int], number: int) -> list[int]:
    """What a caller does for each arrival. The items are the numbers themselves."""
    match buffer.classify(number):
        case Arrival.NEXT:
            return buffer.release(number, now=0)
        case Arrival.AHEAD:
            buffer.hold(number, number, now=0)
        case Arrival.DUPLICATE:
            pass
        case Arrival.BEYOND_WINDOW:
            raise AssertionError(f"{number} is beyond the window")
    return []


def test_in_order_passes_straight_through() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(4)
    assert [put(buffer, number) for number in range(3)] == [[0], [1], [2]]
    assert buffer.next_sequence_id == 3
    assert len(buffer) == 0
    assert buffer.missing is None
    assert buffer.highest is None


def test_a_filled_gap_releases_what_waited_up_to_the_next_gap() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(8)
    for number in (2, 1, 5):
        assert put(buffer, number) == []
    assert len(buffer) == 3
    assert buffer.missing == range(1)
    assert buffer.highest == 5
    assert put(buffer, 0) == [0, 1, 2]
    assert buffer.missing == range(3, 5)


def test_the_first_copy_counts() -> None:
    buffer: ReorderBuffer[str] = ReorderBuffer(8)
    buffer.hold(1, "first", now=0)
    assert buffer.classify(1) is Arrival.DUPLICATE
    assert buffer.release("zero", now=0) == ["zero", "first"]
    assert buffer.classify(0) is Arrival.DUPLICATE
    assert buffer.classify(1) is Arrival.DUPLICATE


@pytest.mark.parametrize("start", [0, 3])
def test_the_window_reaches_from_the_next_number(start: int) -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(WINDOW)
    for number in range(start):
        put(buffer, number)
    assert buffer.classify(start) is Arrival.NEXT
    assert buffer.classify(start + 1) is Arrival.AHEAD
    assert buffer.classify(start + WINDOW - 1) is Arrival.AHEAD
    assert buffer.classify(start + WINDOW) is Arrival.BEYOND_WINDOW


def test_discard_gives_up_the_gap_too() -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(8)
    assert buffer.discard() == []
    assert buffer.next_sequence_id == 0
    for number in (5, 3):
        put(buffer, number)
    assert buffer.discard() == [3, 5]
    assert buffer.next_sequence_id == 6
    assert len(buffer) == 0
    assert buffer.classify(4) is Arrival.DUPLICATE
    assert put(buffer, 6) == [6]


@st.composite
def arrivals(draw: st.DrawFn) -> list[int]:
    """Numbers in any order, some repeated, none ever outside the window."""
    count = draw(st.integers(1, 60))
    missing = list(range(count))
    sent: list[int] = []
    while missing:
        inside = [number for number in missing if number < missing[0] + WINDOW]
        number = draw(st.sampled_from(inside))
        missing.remove(number)
        sent.append(number)
        if draw(st.booleans()):
            sent.append(draw(st.sampled_from(sent)))
    return sent


@given(arrivals())
def test_any_order_and_repetition_comes_out_sorted_and_unique(numbers: list[int]) -> None:
    buffer: ReorderBuffer[int] = ReorderBuffer(WINDOW)
    released: list[int] = []
    seen: set[int] = set()
    for number in numbers:
        released += put(buffer, number)
        seen.add(number)
        prefix = next(n for n in range(len(seen) + 1) if n not in seen)
        assert released == list(range(prefix))
        assert len(buffer) == len(seen) - prefix
    assert released == sorted(set(numbers))


@pytest.mark.parametrize("now", [0.3, 1e3 + 0.7, 1e7 + 0.1])
def test_statistics_only_grow(now: float) -> None:
    """Even if a gap is filled at the same instant, or the clock stands still: they feed counters."""
    buffer: ReorderBuffer[str] = ReorderBuffer(window=8)
    before = buffer.statistics
    for turn in range(200):
        number = buffer.next_sequence_id
        buffer.hold(number + 1, "later", now=now)
        now += 0.1 if turn % 2 else 0
        buffer.release("sooner", now=now)
        after = buffer.statistics
        assert after.waited >= before.waited
        assert after.gaps >= before.gaps
        before = after
