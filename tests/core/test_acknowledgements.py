"""When what has come is acknowledged; tests/core/test_input_stream.py says what counts as having come."""

from __future__ import annotations

from omni_ws.core.acknowledgements import ACK_DELAY_SEC, ACK_EVERY_CHUNKS, Acknowledgements


def test_after_so_many_chunks_and_not_one_before() -> None:
    acks = Acknowledgements()
    for _ in range(ACK_EVERY_CHUNKS - 1):
        acks.accepted(5)
    assert not acks.due
    acks.accepted(5)
    assert acks.due


def test_a_while_after_the_first_chunk_whatever_comes_later() -> None:
    acks = Acknowledgements()
    assert acks.get_timer() is None
    acks.handle_timer(now=1000)
    assert not acks.due
    acks.accepted(5)
    acks.accepted(5 + ACK_DELAY_SEC / 2)
    due = acks.get_timer()
    assert due == 5 + ACK_DELAY_SEC
    acks.handle_timer(now=due - 0.001)
    assert not acks.due
    acks.handle_timer(now=due)
    assert acks.due


def test_once_sent_all_begins_anew() -> None:
    acks = Acknowledgements()
    for _ in range(ACK_EVERY_CHUNKS):
        acks.accepted(5)
    acks.sent()
    assert (acks.due, acks.since, acks.get_timer()) == (False, None, None)
    for _ in range(ACK_EVERY_CHUNKS - 1):
        acks.accepted(6)
    assert (acks.due, acks.since) == (False, 6)
