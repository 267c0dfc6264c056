"""The order of RTP packets, and what counts as lost."""

from __future__ import annotations

import random

import pytest

from omni_ws.core.jitter_buffer import (
    CAPACITY,
    MAX_JUMP,
    MAX_WAIT_SEC,
    MIN_WAIT_SEC,
    JitterBuffer,
    MediaPacket,
    PacketOutcome,
)

TICKS = 960


def arrive(buffer: JitterBuffer, number: int, *, now: float | None = None) -> list[int]:
    """The numbers of the packets that are in their place when this one has arrived."""
    when = number / 50 if now is None else now
    return numbers(buffer.receive(number % 65_536, number * TICKS % 2**32, str(number).encode(), now=when))


def numbers(packets: list[MediaPacket]) -> list[int]:
    return [int(packet.payload) for packet in packets]


def test_packets_in_order_pass_at_once() -> None:
    buffer = JitterBuffer()
    assert [arrive(buffer, number) for number in range(65_530, 65_545)] == [
        [number] for number in range(65_530, 65_545)
    ]
    assert buffer.get_timer() is None
    assert buffer.counts == {PacketOutcome.ON_TIME: 15}


def test_a_gap_is_closed_by_the_packet_that_was_overtaken() -> None:
    buffer = JitterBuffer()
    assert arrive(buffer, 0) == [0]
    assert arrive(buffer, 2) == []
    assert arrive(buffer, 2) == []
    assert arrive(buffer, 3) == []
    assert arrive(buffer, 1, now=0.07) == [1, 2, 3]
    assert buffer.get_timer() is None
    assert buffer.counts == {PacketOutcome.ON_TIME: 2, PacketOutcome.REORDERED: 2, PacketOutcome.DUPLICATE: 1}


def test_a_packet_that_does_not_come_is_lost() -> None:
    buffer = JitterBuffer()
    arrive(buffer, 0)
    arrive(buffer, 3, now=0.06)
    due = buffer.get_timer()
    assert due is not None
    assert due == pytest.approx(0.06 + MIN_WAIT_SEC)
    assert buffer.pass_over(due - 0.001) == []
    (behind,) = buffer.pass_over(due)
    assert (behind.lost, behind.timestamp) == (2, 3 * TICKS)
    assert arrive(buffer, 1) == []
    assert buffer.counts[PacketOutcome.LOST] == 2
    assert buffer.counts[PacketOutcome.LATE] == 1
    assert arrive(buffer, 4) == [4]


def test_the_wait_follows_the_jitter_up_to_its_bound() -> None:
    dice, buffer = random.Random(1), JitterBuffer()
    for number in range(200):
        arrive(buffer, number, now=number / 50 + dice.uniform(0, 0.1))
    arrive(buffer, 201, now=4.1)
    due = buffer.get_timer()
    assert due is not None
    assert 4.1 + 0.1 < due <= 4.1 + MAX_WAIT_SEC
    for number in range(202, 220):
        arrive(buffer, number, now=number / 50 + dice.uniform(0, 0.9))
    assert buffer.get_timer() == pytest.approx(4.1 + MAX_WAIT_SEC)


def test_no_more_than_the_capacity_waits() -> None:
    buffer = JitterBuffer()
    arrive(buffer, 0)
    assert not any(arrive(buffer, number, now=0) for number in range(2, CAPACITY + 2))
    assert arrive(buffer, CAPACITY + 2, now=0) == list(range(2, CAPACITY + 3))


def test_a_jump_begins_a_new_stream() -> None:
    buffer = JitterBuffer()
    arrive(buffer, 0)
    assert arrive(buffer, MAX_JUMP, now=0) == []
    assert arrive(buffer, MAX_JUMP + 2, now=0) == [MAX_JUMP, MAX_JUMP + 2]
    assert arrive(buffer, MAX_JUMP + 3, now=0) == [MAX_JUMP + 3]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_network_does_the_order_is_kept(seed: int) -> None:
    dice, buffer = random.Random(seed), JitterBuffer()
    arrivals = sorted((number / 50 + dice.uniform(0, 0.1), number) for number in range(300) if dice.random() > 0.05)
    passed: list[int] = []
    for now, number in arrivals:
        if (due := buffer.get_timer()) is not None and due <= now:
            passed += numbers(buffer.pass_over(due))
        passed += arrive(buffer, number, now=now)
    passed += numbers(buffer.pass_over(100))
    assert passed == sorted(set(passed))
    counts = buffer.counts
    assert len(passed) + counts.get(PacketOutcome.LATE, 0) == len(arrivals)
