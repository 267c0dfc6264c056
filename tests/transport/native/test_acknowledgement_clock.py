"""One timer for the acknowledgements of all connections."""

from __future__ import annotations

import asyncio
import math

import pytest

from omni_ws.transport.native.acknowledgement_clock import AcknowledgementClock


class Connection:
    def __init__(self) -> None:
        self.ack_at = math.inf
        self.acknowledged = asyncio.Event()

    def wait(self, clock: AcknowledgementClock, when: float) -> None:
        self.ack_at = when
        clock.wait(when, self)

    def acknowledge(self) -> None:
        self.ack_at = math.inf
        self.acknowledged.set()


@pytest.mark.virtual_clock
async def test_each_is_told_at_its_time_and_no_sooner() -> None:
    clock, loop = AcknowledgementClock(), asyncio.get_running_loop()
    first, second = Connection(), Connection()
    begin = loop.time()
    first.wait(clock, begin + 0.01)
    second.wait(clock, begin + 0.03)
    await first.acknowledged.wait()
    assert not second.acknowledged.is_set()
    await second.acknowledged.wait()
    assert loop.time() >= begin + 0.029  # loops round


@pytest.mark.virtual_clock
async def test_what_went_out_earlier_is_passed_over() -> None:
    clock, now = AcknowledgementClock(), asyncio.get_running_loop().time()
    early, other = Connection(), Connection()
    early.wait(clock, now + 0.01)
    early.acknowledge()
    early.acknowledged.clear()
    other.wait(clock, now + 0.01)
    early.wait(clock, now + 0.02)
    await other.acknowledged.wait()
    assert not early.acknowledged.is_set()
    await early.acknowledged.wait()


async def test_a_time_that_has_come() -> None:
    clock, connection = AcknowledgementClock(), Connection()
    connection.wait(clock, asyncio.get_running_loop().time())
    await connection.acknowledged.wait()


async def test_it_goes_on_when_all_were_told() -> None:
    clock, connection = AcknowledgementClock(), Connection()
    for _ in range(3):
        connection.acknowledged.clear()
        connection.wait(clock, asyncio.get_running_loop().time() + 0.002)
        await connection.acknowledged.wait()
