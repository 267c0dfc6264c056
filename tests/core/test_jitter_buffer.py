"""The order of RTP packets, and what counts as lost."""

from __future__ import annotations

import random

import pytest

from omni_ws.core.reorder import (
    CAPACITY,
    MAX_JUMP,
    MAX_LATE_RUN,
    MAX_LATE_SEC,
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


@pytest.mark.parametrize("behind", [1, 2, 50, 2_000, MAX_JUMP, MAX_JUMP + 1])
@pytest.mark.parametrize("timestamp", [0, 123_456, 499 * TICKS, 500 * TICKS, 2**31, 2**32 - 5_000])
def test_a_sender_that_begins_anew_is_heard(behind: int, timestamp: int) -> None:
    """Its numbers are a little lower, by chance, and its time stamps any."""
    buffer, now = JitterBuffer(), 0.0
    for number in range(500):
        buffer.receive(10_000 + number, number * TICKS, b"x", now=now)
        now += 0.02
    first = 10_500 - behind
    heard: list[MediaPacket] = []
    for number in range(60):
        sent_at = (timestamp + number * TICKS) % 2**32
        heard += buffer.receive((first + number) % 65_536, sent_at, str(number).encode(), now=now)
        now += 0.02
    if behind in (1, 2) and timestamp == 499 * TICKS:
        # This may be a repetition of the last packets, until they are behind them.
        heard = heard[-57:]
    assert numbers(heard) == list(range(60 - len(heard), 60))
    assert len(heard) >= 57
    assert [packet.begins for packet in heard] == [True, *[False] * 59][60 - len(heard) :]


def test_the_first_of_a_new_stream_is_not_lost() -> None:
    buffer = JitterBuffer()
    for number in range(500):
        arrive(buffer, number + 1_000)
    assert buffer.receive(800, 77, b"0", now=30) == []
    again = buffer.receive(801, 77 + TICKS, b"1", now=30.02)
    assert [(packet.payload, packet.begins, packet.lost) for packet in again] == [(b"0", True, 0), (b"1", False, 0)]


def test_another_source_is_another_stream_at_once() -> None:
    buffer = JitterBuffer()
    for number in range(100):
        buffer.receive(number, number * TICKS, b"x", now=number / 50, source=1)
    buffer.receive(101, 101 * TICKS, b"101", now=2, source=1)  # behind a gap
    passed = buffer.receive(99, 99 * TICKS, b"99", now=2.01, source=2)
    assert [(packet.payload, packet.begins) for packet in passed] == [(b"101", False), (b"99", True)]
    # What the former one had on its way is late, for as long as it may be; then it has come back.
    assert buffer.receive(102, 102 * TICKS, b"x", now=2.01 + MAX_WAIT_SEC - 0.001, source=1) == []
    assert buffer.counts[PacketOutcome.LATE] == 1
    (back,) = buffer.receive(103, 103 * TICKS, b"x", now=2.01 + MAX_WAIT_SEC, source=1)
    assert back.begins


@pytest.mark.parametrize("run", [2, MAX_LATE_RUN - 1, MAX_LATE_RUN])
def test_late_packets_in_sequence_are_no_new_stream(run: int) -> None:
    """They were overtaken. So many of them that nothing can have overtaken them all are a stream."""
    buffer = JitterBuffer()
    for number in range(400):
        arrive(buffer, number, now=8.0)
    passed = [arrive(buffer, number, now=8.0) for number in range(340, 340 + run)]
    assert passed[:-1] == [[]] * (run - 1)
    assert passed[-1] == ([] if run < MAX_LATE_RUN else [338 + run, 339 + run])
    assert buffer.counts[PacketOutcome.LATE] == min(run, MAX_LATE_RUN - 1)


@pytest.mark.parametrize("late", [MAX_LATE_SEC - 0.001, MAX_LATE_SEC])
def test_a_packet_is_not_later_than_that(late: float) -> None:
    buffer = JitterBuffer()
    for number in range(100):
        arrive(buffer, number)
    arrive(buffer, 50, now=50 / 50 + late)
    again = arrive(buffer, 51, now=51 / 50 + late)
    assert again == ([] if late < MAX_LATE_SEC else [50, 51])


def test_packets_of_padding_have_a_number_and_leave_no_gap() -> None:
    buffer = JitterBuffer()
    assert arrive(buffer, 0) == [0]
    (padding,) = buffer.receive(1, 0, b"", now=0.02)
    assert padding.payload == b""
    assert arrive(buffer, 2) == [2]
    assert buffer.get_timer() is None


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
