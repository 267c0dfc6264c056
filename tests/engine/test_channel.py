from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.patience import until

from omni_ws.engine.channel import Channel, ChannelClosed

pytestmark = pytest.mark.usefixtures("no_task_left")


def channel(capacity: float = 10, taken: list[float] | None = None) -> Channel[bytes]:
    return Channel(capacity, cost=len, on_take=None if taken is None else taken.append)


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_goes_in_comes_out_in_order() -> None:
    taken: list[float] = []
    subject = channel(taken=taken)
    for item in (b"a", b"bc", b"def"):
        await subject.put(item)
    assert subject.queued == 6
    subject.close()
    assert [item async for item in subject] == [b"a", b"bc", b"def"]
    assert taken == [1, 2, 3]
    assert subject.queued == 0


async def test_a_reader_waits_for_items_and_for_the_end() -> None:
    subject = channel()
    got: list[bytes] = []

    async def read() -> None:
        async for item in subject:
            got.append(item)

    reader = asyncio.create_task(read())
    await settle()
    subject.put_nowait(b"a")
    await until(lambda: got == [b"a"])
    subject.put_nowait(b"b")
    subject.put_nowait(b"c")
    subject.close()
    await reader
    assert got == [b"a", b"b", b"c"]


async def test_capacity_at_the_limit_and_one_past_it() -> None:
    subject = channel(10)
    full = []
    for size in (9, 1):
        await subject.put(bytes(size))
        full.append(subject.full)
    assert full == [False, True]
    writer = asyncio.create_task(subject.put(b"x"))
    await settle()
    assert not writer.done()
    assert subject.queued == 10
    assert subject.take_nowait() == bytes(9)
    await writer
    assert subject.queued == 2


async def test_a_writer_waits_until_there_is_room_for_all_of_its_item() -> None:
    subject = channel(10)
    await subject.put(bytes(3))
    await subject.put(bytes(7))
    writer = asyncio.create_task(subject.put(bytes(4)))
    await settle()
    subject.take_nowait()
    await settle()
    assert not writer.done()
    subject.take_nowait()
    await writer


async def test_an_item_larger_than_the_capacity_goes_through_alone() -> None:
    subject = channel(10)
    await subject.put(bytes(50))
    writer = asyncio.create_task(subject.put(bytes(60)))
    await settle()
    assert not writer.done()
    assert subject.take_nowait() == bytes(50)
    await writer
    assert subject.take_nowait() == bytes(60)


@pytest.mark.counts_passes  # the writers ask in the order in which they were made
async def test_all_writers_get_their_turns_in_order() -> None:
    subject = channel(2)
    await subject.put(b"..")
    writers = [asyncio.create_task(subject.put(item)) for item in (b"aa", b"b", b"cc", b"d")]
    await settle()
    assert not any(writer.done() for writer in writers)
    assert await anext(subject) == b".."
    assert [await anext(subject) for _ in writers] == [b"aa", b"b", b"cc", b"d"]
    await asyncio.gather(*writers)


async def test_a_writer_that_gives_up_holds_up_no_other() -> None:
    subject = channel(1)
    await subject.put(b"a")
    first, second, third = (asyncio.create_task(subject.put(item)) for item in (b"b", b"c", b"d"))
    await settle()
    for gone in (first, second):
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
    assert await anext(subject) == b"a"
    assert await anext(subject) == b"d"
    await third


async def test_room_is_there_below_the_limit() -> None:
    subject = channel(10)
    await subject.put(bytes(9))
    await subject.room()
    subject.put_nowait(bytes(1))
    waiting = [asyncio.create_task(subject.room()) for _ in range(2)]
    await settle()
    assert not any(one.done() for one in waiting)
    subject.take_nowait()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("queued", [0, 1])
async def test_a_closed_channel_has_no_room(queued: int) -> None:
    subject = channel(1)
    subject.put_nowait(bytes(queued))
    waiting = asyncio.create_task(subject.room())
    await settle()
    subject.close()
    if queued:
        with pytest.raises(ChannelClosed):
            await waiting
    await asyncio.gather(waiting, return_exceptions=True)
    with pytest.raises(ChannelClosed):
        await subject.room()


async def test_put_nowait_never_refuses() -> None:
    subject = channel(10)
    for _ in range(5):
        subject.put_nowait(bytes(9))
    assert subject.full
    assert subject.queued == 45


async def test_nothing_there_is_none() -> None:
    assert channel().take_nowait() is None


@pytest.mark.parametrize("end", ["close", "discard"])
async def test_a_closed_channel_takes_nothing(end: str) -> None:
    subject = channel()
    getattr(subject, end)()
    getattr(subject, end)()
    assert subject.closed
    with pytest.raises(ChannelClosed):
        subject.put_nowait(b"a")
    with pytest.raises(ChannelClosed):
        await subject.put(b"a")
    assert [item async for item in subject] == []


async def test_closing_wakes_a_writer_that_waits() -> None:
    subject = channel(1)
    await subject.put(b"a")
    writer = asyncio.create_task(subject.put(b"b"))
    await settle()
    subject.close()
    with pytest.raises(ChannelClosed):
        await writer
    assert [item async for item in subject] == [b"a"]


async def test_an_error_comes_after_what_is_queued() -> None:
    subject = channel()
    subject.put_nowait(b"a")
    subject.fail(ValueError("broken"))
    reader = aiter(subject)
    assert await anext(reader) == b"a"
    with pytest.raises(ValueError, match="broken"):
        await anext(reader)
    with pytest.raises(ChannelClosed):
        subject.put_nowait(b"b")


async def test_an_error_wakes_a_reader_that_waits() -> None:
    subject = channel()

    async def read() -> list[bytes]:
        return [item async for item in subject]

    reader = asyncio.create_task(read())
    await settle()
    subject.fail(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        await reader


async def test_what_is_discarded_counts_as_taken() -> None:
    taken: list[float] = []
    subject = channel(10, taken)
    await subject.put(bytes(4))
    await subject.put(bytes(6))
    writer = asyncio.create_task(subject.put(bytes(1)))
    await settle()
    subject.discard()
    with pytest.raises(ChannelClosed):
        await writer
    assert sum(taken) == 10
    subject.discard()
    assert sum(taken) == 10
    assert (subject.queued, subject.take_nowait()) == (0, None)


async def test_discarding_without_anyone_who_counts() -> None:
    subject = channel()
    subject.put_nowait(b"a")
    subject.discard()
    assert subject.queued == 0


async def test_a_cancelled_writer_leaves_nothing_behind() -> None:
    subject = channel(1)
    await subject.put(b"a")
    writer = asyncio.create_task(subject.put(b"b"))
    await settle()
    writer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await writer
    assert subject.take_nowait() == b"a"
    await subject.put(b"c")
    assert subject.take_nowait() == b"c"


async def test_a_cancelled_reader_loses_nothing() -> None:
    subject = channel()

    async def read() -> bytes:
        async for item in subject:
            return item
        raise AssertionError("the channel is open")

    reader = asyncio.create_task(read())
    await settle()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    subject.put_nowait(b"a")
    assert await read() == b"a"


@given(st.lists(st.binary(max_size=6), max_size=30), st.integers(1, 8))
async def test_every_byte_passes_whatever_the_capacity(items: list[bytes], capacity: int) -> None:
    taken: list[float] = []
    subject = channel(capacity, taken)
    largest = max((len(item) for item in items), default=0)

    async def write() -> None:
        for item in items:
            await subject.put(item)
            assert subject.queued <= max(capacity, largest)
        subject.close()

    writer = asyncio.create_task(write())
    assert [item async for item in subject] == items
    await writer
    assert sum(taken) == sum(map(len, items))
