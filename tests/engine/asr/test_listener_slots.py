"""ListenerSlots of a recogniser: how many there are, who shares one, who waits, and for how long."""

from __future__ import annotations

import asyncio

import pytest

from omni_ws.engine.asr.recogniser import MAX_WAIT_SEC, ListenerSlots
from omni_ws.errors import EngineOverloaded

pytestmark = pytest.mark.virtual_clock


async def full() -> ListenerSlots:
    slots = ListenerSlots(1)
    await slots.take()
    return slots


async def some_passes() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("past", [False, True])
async def test_who_finds_no_seat_waits_for_so_long_and_is_refused(past: bool) -> None:
    slots = await full()
    waiting = asyncio.create_task(slots.take())
    await some_passes()
    asyncio.get_running_loop().call_later(MAX_WAIT_SEC + (0.001 if past else -0.001), slots.leave)
    if past:
        with pytest.raises(EngineOverloaded, match="all 1 recognisers are in use") as refusal:
            await waiting
        assert refusal.value.retry_after_ms
        assert slots.taken == 1
    else:
        await waiting
        assert slots.taken == 1


@pytest.mark.counts_passes  # they ask in the order in which they were made
async def test_seats_are_given_in_the_order_in_which_they_were_asked_for() -> None:
    slots = await full()
    given: list[str] = []

    async def take(name: str) -> None:
        await slots.take()
        given.append(name)

    waiting = [asyncio.create_task(take("a")), asyncio.create_task(take("b"))]
    await some_passes()
    slots.leave()
    late = asyncio.create_task(take("late"))  # asks in the moment in which one is free
    await some_passes()
    assert given == ["a"]
    for one in waiting:
        await one
        slots.leave()
    await late
    assert given == ["a", "b", "late"]


async def test_requests_of_one_holder_share_a_seat_and_wait_for_nobody() -> None:
    slots = ListenerSlots(1)
    await slots.take("session")
    waiting = asyncio.create_task(slots.take("another"))
    await some_passes()
    await slots.take("session")
    assert slots.taken == 1
    slots.leave("session")
    await some_passes()
    assert not waiting.done()
    slots.leave("session")
    await waiting
    assert slots.taken == 1


async def test_who_waits_with_its_own_earlier_part_is_given_the_seat_with_it() -> None:
    slots = await full()
    parts = [asyncio.create_task(slots.take("session")) for _ in range(2)]
    await some_passes()
    slots.leave()
    for part in parts:
        await part
    assert slots.taken == 1


@pytest.mark.parametrize("in_the_same_moment", [False, True])
async def test_who_goes_while_waiting_leaves_nothing(in_the_same_moment: bool) -> None:
    slots = await full()
    waiting = asyncio.create_task(slots.take("session"))
    await some_passes()
    if in_the_same_moment:
        slots.leave()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if not in_the_same_moment:
        slots.leave()
    assert slots.taken == 0
    await slots.take()


async def test_who_is_cancelled_before_its_turn_is_passed_over() -> None:
    slots = await full()
    gone, there = asyncio.create_task(slots.take()), asyncio.create_task(slots.take())
    await some_passes()
    gone.cancel()
    slots.leave()
    await there
    await asyncio.gather(gone, return_exceptions=True)
    assert slots.taken == 1


@pytest.mark.parametrize("taken", [1, 2, 3])
async def test_interim_texts_are_given_up_before_anybody_is_refused(taken: int) -> None:
    slots = ListenerSlots(32, lambda interims: 2 if interims else 3)
    for _ in range(taken):
        await slots.take()
    assert slots.crowded is (taken > 2)


async def test_there_are_as_many_as_are_carried_without_interim_texts() -> None:
    slots = ListenerSlots(32, lambda interims: 2 if interims else 3)
    for _ in range(3):
        await slots.take()
    with pytest.raises(EngineOverloaded):
        await slots.take()


@pytest.mark.parametrize("cut_sec", [0.0, MAX_WAIT_SEC - 0.001])
async def test_who_has_gone_on_waits_as_long_as_it_takes(cut_sec: float) -> None:
    """The words of an answer that was cut off are still wanted."""
    slots = await full()
    cut = asyncio.Event()
    waiting = asyncio.create_task(slots.take(may_wait=cut.is_set))
    asyncio.get_running_loop().call_later(cut_sec, cut.set)
    await asyncio.sleep(10 * MAX_WAIT_SEC)
    assert not waiting.done()
    slots.leave()
    await waiting
    assert slots.taken == 1


async def test_who_goes_on_too_late_is_refused() -> None:
    slots = await full()
    cut = asyncio.Event()
    asyncio.get_running_loop().call_later(MAX_WAIT_SEC + 0.001, cut.set)
    with pytest.raises(EngineOverloaded):
        await slots.take(may_wait=cut.is_set)


async def test_who_waits_on_and_is_cancelled_leaves_the_queue() -> None:
    slots = await full()
    waiting = asyncio.create_task(slots.take(may_wait=lambda: True))
    await asyncio.sleep(2 * MAX_WAIT_SEC)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    slots.leave()
    assert slots.taken == 0
    await slots.take()
    assert slots.taken == 1
