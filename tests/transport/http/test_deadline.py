"""A deadline that is armed, moved and disarmed."""

from __future__ import annotations

import asyncio

import pytest

from omni_ws.transport.http.connections import Deadline

pytestmark = pytest.mark.virtual_clock


class Bell:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.rung: list[float] = []
        self.deadline = Deadline(self.loop, lambda: self.rung.append(self.loop.time()))


async def test_rings_once() -> None:
    bell = Bell()
    bell.deadline.arm(5)
    await asyncio.sleep(4.9)
    assert bell.rung == []
    await asyncio.sleep(100)
    assert bell.rung == [pytest.approx(5)]


async def test_moves_later_and_earlier() -> None:
    bell = Bell()
    bell.deadline.arm(5)
    await asyncio.sleep(4)
    bell.deadline.arm(5)
    await asyncio.sleep(100)
    assert bell.rung == [pytest.approx(9)]
    bell.deadline.arm(50)
    bell.deadline.arm(1)
    await asyncio.sleep(100)
    assert bell.rung == [pytest.approx(9), pytest.approx(105)]


@pytest.mark.parametrize("how", ["disarm", "arm with None"])
async def test_does_not_ring_when_disarmed(how: str) -> None:
    bell = Bell()
    bell.deadline.arm(5)
    if how == "disarm":
        bell.deadline.disarm()
    else:
        bell.deadline.arm(None)
    await asyncio.sleep(100)
    assert bell.rung == []
    bell.deadline.arm(1)
    await asyncio.sleep(2)
    assert bell.rung == [pytest.approx(101)]


async def test_may_be_armed_again_as_it_rings() -> None:
    loop = asyncio.get_running_loop()
    rung: list[float] = []

    def ring() -> None:
        rung.append(loop.time())
        if len(rung) < 3:
            deadline.arm(2)

    deadline = Deadline(loop, ring)
    deadline.arm(2)
    await asyncio.sleep(100)
    assert rung == [pytest.approx(2), pytest.approx(4), pytest.approx(6)]
