"""When a connection acknowledges its input, and one timer for all connections."""

from __future__ import annotations

import asyncio
import math
from typing import cast

import pytest
from support.checked_input_stream import AcknowledgedStream

from omni_ws.core.chunks import InputChunk, InputMode, Modality
from omni_ws.core.input_stream import StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.core.request_input import InputSettings
from omni_ws.core.start_policy import ON_FIRST_CHUNK
from omni_ws.errors import OutOfOrder
from omni_ws.transport.native.endpoint import (
    ACK_DELAY_SEC,
    ACK_EARLY_SEC,
    ACK_EVERY_CHUNKS,
    AcknowledgementClock,
    Acknowledgements,
)


class Connection:
    def __init__(self) -> None:
        self.due_at = math.inf
        self.acknowledged = asyncio.Event()

    def wait(self, clock: AcknowledgementClock, when: float) -> None:
        self.due_at = when
        clock.wait(when, cast("Acknowledgements", self))

    def acknowledge(self) -> None:
        self.due_at = math.inf
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


# one connection


def text(number: int, *, end: bool = False) -> InputChunk:
    return InputChunk(Modality.TEXT, b"x", number, end_of_input=end)


def make() -> AcknowledgedStream:
    settings = InputSettings(start_policy=ON_FIRST_CHUNK, mode=InputMode.EXTEND)
    return AcknowledgedStream(StreamLimits(), lambda: settings, budget=ByteBudget(1 << 20), now=0)


def ack_due(stream: AcknowledgedStream) -> bool:
    """A call, so that a type checker does not take the answer for a constant."""
    return stream.ack_due


def test_an_ack_is_due_after_so_many_chunks() -> None:
    stream = make()
    for number in range(ACK_EVERY_CHUNKS - 1):
        stream.receive_chunk(text(number), now=0)
    assert not ack_due(stream)
    stream.receive_chunk(text(ACK_EVERY_CHUNKS - 1), now=0)
    assert ack_due(stream)
    assert stream.take_ack() == (ACK_EVERY_CHUNKS, 0, ACK_EVERY_CHUNKS)
    assert not ack_due(stream)


def test_an_ack_is_due_after_a_while() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=5)
    stream.receive_chunk(text(1), now=5.05)
    assert stream.acks_at == 5 + ACK_DELAY_SEC
    stream.handle_timer(now=5 + ACK_DELAY_SEC - 0.001)
    assert not ack_due(stream)
    stream.handle_timer(now=5 + ACK_DELAY_SEC)
    assert ack_due(stream)
    stream.take_ack()
    assert stream.acks_at == math.inf


def test_what_one_filled_gap_releases_counts_as_one() -> None:
    stream = make()
    for number in range(1, 5):
        stream.receive_chunk(text(number), now=0)
    assert not ack_due(stream)
    stream.receive_chunk(text(0), now=0)
    assert ack_due(stream)
    assert stream.take_ack()[0] == 5
    for number in range(5, 5 + ACK_EVERY_CHUNKS - 1):
        stream.receive_chunk(text(number), now=0)
    assert not ack_due(stream)


@pytest.mark.parametrize("chunk", [text(0), text(1, end=True)])
def test_an_ack_is_due_at_once_after_a_duplicate_and_after_the_end(chunk: InputChunk) -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    assert not ack_due(stream)
    stream.receive_chunk(chunk, now=0)
    assert ack_due(stream)


def test_an_ack_is_due_at_once_after_a_bare_end() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    stream.finish(now=0)
    assert ack_due(stream)


def test_an_ack_goes_early_with_a_chunk() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=5)
    stream.receive_chunk(text(1), now=5 + ACK_DELAY_SEC - ACK_EARLY_SEC - 0.001)
    assert not ack_due(stream)
    stream.receive_chunk(text(2), now=5 + ACK_DELAY_SEC - ACK_EARLY_SEC + 0.001)
    assert ack_due(stream)


def test_an_ack_is_due_at_once_after_what_waited_was_discarded() -> None:
    stream = make()
    stream.receive_chunk(text(1), now=0)
    stream.take_ack()
    stream.cancel(now=0)
    assert ack_due(stream)
    assert stream.take_ack() == (2, 0, 0)


def test_once_sent_all_begins_anew() -> None:
    stream = make()
    for number in range(ACK_EVERY_CHUNKS):
        stream.receive_chunk(text(number), now=5)
    stream.take_ack()
    assert not stream.acks.pending
    for number in range(ACK_EVERY_CHUNKS, 2 * ACK_EVERY_CHUNKS - 1):
        stream.receive_chunk(text(number), now=6)
    assert not ack_due(stream)
    assert stream.acks_at == 6 + ACK_DELAY_SEC


def test_what_is_refused_is_not_acknowledged() -> None:
    stream = make()
    stream.reject_out_of_order = True
    with pytest.raises(OutOfOrder):
        stream.receive_chunk(text(3), now=0)
    assert not stream.acks.pending
    assert stream.acks_at == math.inf
