import asyncio
import threading

import pytest

from omni_ws.core.quota import ByteBudget, Reservation, reserved
from omni_ws.engine.decoding import DECODING_THREADS
from omni_ws.engine.threads import (
    DECODING_SLOTS,
    MAX_WAIT_SEC,
    MediaRoom,
)
from omni_ws.errors import EngineOverloaded, PayloadTooLarge


def test_what_can_never_fit_and_what_does_not_fit_now() -> None:
    room = MediaRoom(ByteBudget(100))
    with room.share() as share, room.share() as other:
        share.take(100)
        with pytest.raises(EngineOverloaded) as overloaded:
            other.take(1)
        assert overloaded.value.retry_after_ms == 1000
        with pytest.raises(PayloadTooLarge):
            share.take(1)
        assert (share.size, other.size, room.budget.held) == (100, 0, 100)
        share.give(40)
        other.take(40)
        with pytest.raises(PayloadTooLarge):
            other.take(61)
    assert (share.size, room.budget.held) == (0, 0)


def test_input_and_media_have_one_budget() -> None:
    budget = ByteBudget(100)
    budget.take(60)
    with MediaRoom(budget).share() as share:
        share.take(40)
        with pytest.raises(EngineOverloaded):
            share.take(1)
        with pytest.raises(EngineOverloaded):
            budget.take(1)
    budget.take(40)


def test_a_closed_share_counts_nothing() -> None:
    room = MediaRoom(ByteBudget(100))
    share = room.share()
    share.take(50)
    share.close()
    share.take(70)
    share.give(50)
    share.close()
    assert (share.size, room.budget.held) == (0, 0)


def test_bytes_are_counted_from_many_threads() -> None:
    room = MediaRoom(ByteBudget(1 << 40))
    share = room.share()

    def work() -> None:
        for _ in range(5000):
            with reserved(share, 3), Reservation(share) as reservation:
                reservation.raise_to(5)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (share.size, room.budget.held) == (0, 0)


def test_what_is_kept_stays_counted_unless_it_fails() -> None:
    with MediaRoom(ByteBudget(100)).share() as share:
        with reserved(share, 30, keep=True):
            pass
        assert share.size == 30
        with pytest.raises(ZeroDivisionError), reserved(share, 30, keep=True):
            raise ZeroDivisionError
        assert share.size == 30


@pytest.mark.virtual_clock
@pytest.mark.usefixtures("no_task_left")
class TestPlaces:
    @pytest.mark.counts_passes  # they ask in the order of their numbers
    async def test_they_are_taken_in_turn(self) -> None:
        room, seen = MediaRoom(slots=2), []
        inside = most = 0

        async def decode(number: int) -> None:
            nonlocal inside, most
            async with room.share().slot(10):
                inside += 1
                most = max(most, inside)
                seen.append(number)
                await asyncio.sleep(1)
                inside -= 1

        await asyncio.gather(*map(decode, range(7)))
        assert (seen, most, inside) == ([*range(7)], 2, 0)

    @pytest.mark.parametrize("size", [0, 60])
    async def test_a_wait_has_an_end(self, size: int) -> None:
        """For a slot, and for memory."""
        room = MediaRoom(ByteBudget(100), slots=2 if size else 1)
        loop = asyncio.get_running_loop()
        with room.share() as first, room.share() as second:
            async with first.slot(size):
                began = loop.time()
                with pytest.raises(EngineOverloaded, match="for decoding") as overloaded:
                    async with second.slot(size):
                        pass
                assert loop.time() - began == pytest.approx(MAX_WAIT_SEC)
                assert overloaded.value.retry_after_ms == 1000
            first.give(size)
            async with second.slot(size):
                pass

    async def test_it_waits_until_others_give_room_back(self) -> None:
        room = MediaRoom(ByteBudget(100), slots=4)
        loop = asyncio.get_running_loop()
        with room.share() as first, room.share() as second:
            async with first.slot(60):
                pass
            loop.call_later(MAX_WAIT_SEC - 1, lambda: threading.Thread(target=first.give, args=(20,)).start())
            began = loop.time()
            async with second.slot(60):
                assert room.budget.held == 100
            assert loop.time() - began >= MAX_WAIT_SEC - 1

    async def test_nothing_is_waited_for_that_others_cannot_give(self) -> None:
        budget = ByteBudget(100)
        budget.take(50)
        room = MediaRoom(budget)
        with room.share() as share:
            share.take(10)
            with pytest.raises(EngineOverloaded, match="memory for decoded media is full"):
                async with share.slot(41):
                    pass
            with pytest.raises(PayloadTooLarge):
                async with share.slot(91):
                    pass
            async with share.slot(40):
                pass
        assert budget.held == 50

    @pytest.mark.parametrize("granted", [False, True])
    async def test_cancelled_waiter_leaves_no_slot_taken(self, granted: bool) -> None:
        room = MediaRoom(ByteBudget(100), slots=1)

        async def decode() -> None:
            with room.share() as share:
                async with share.slot(100):
                    await asyncio.sleep(1)

        async with room.share().slot(0):
            waiting = [asyncio.create_task(decode()) for _ in range(2)]
            await asyncio.sleep(0)
            if not granted:
                waiting[0].cancel()
        if granted:
            waiting[0].cancel()  # it was granted its slot, but has not run since
        await waiting[1]
        assert waiting[0].cancelled()
        assert (room._free_slots, room.budget.held, len(room._waiting)) == (1, 0, 0)

    def test_there_are_fewer_slots_than_decoding_threads(self) -> None:
        assert DECODING_SLOTS < DECODING_THREADS
