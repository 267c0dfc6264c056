"""OutgoingInput: numbers, flow control, and the input of a fresh session."""

from __future__ import annotations

import pytest

from omni_ws.client.halves import OutgoingInput
from omni_ws.core.chunks import InputChunk, Modality
from omni_ws.errors import EmptyInput
from omni_ws.wire.session_config import OutputAudioConfig


def audio(size: int, *, end: bool = False) -> InputChunk:
    return InputChunk(Modality.AUDIO, bytes(size), end_of_input=end)


class Outgoing(OutgoingInput):
    def put(self, chunk: InputChunk) -> int | None:
        numbered = self.add(chunk, output_audio=OutputAudioConfig())
        return None if numbered is None else numbered.sequence_id


@pytest.fixture
def outgoing() -> Outgoing:
    return Outgoing(window_bytes=100, keep_bytes=1000)


def test_the_window_at_its_limit_and_one_past_it(outgoing: Outgoing) -> None:
    assert outgoing.has_room(101), "one chunk may always be under way"
    outgoing.put(audio(60))
    assert outgoing.has_room(40)
    assert not outgoing.has_room(41)
    outgoing.acknowledge(1, credit_bytes=1000)
    assert outgoing.has_room(101)


def test_credit_counts_from_what_is_acknowledged(outgoing: Outgoing) -> None:
    outgoing.put(audio(10))
    outgoing.put(audio(10))
    outgoing.acknowledge(1, credit_bytes=30)
    assert outgoing.has_room(20)
    assert not outgoing.has_room(21)
    assert not outgoing.starved
    outgoing.acknowledge(2, credit_bytes=0)
    assert not outgoing.has_room(1)
    assert outgoing.starved


def test_an_old_acknowledgement_takes_nothing_back(outgoing: Outgoing) -> None:
    outgoing.put(audio(10))
    outgoing.acknowledge(1, credit_bytes=30)
    outgoing.acknowledge(0, credit_bytes=30)
    assert (outgoing.acknowledged_sequence_id, outgoing.unacknowledged_bytes) == (1, 0)


def test_names_are_given_by_the_chunk_that_fired(outgoing: Outgoing) -> None:
    outgoing.put(audio(1, end=True))
    outgoing.put(audio(1))
    outgoing.put(audio(1, end=True))
    first, second = outgoing.requests
    assert outgoing.started("req_b", 2) is second
    assert outgoing.started("req_a", None) is first
    assert outgoing.started("req_c", 2) is None


def test_a_final_without_a_start_ends_the_oldest_request(outgoing: Outgoing) -> None:
    outgoing.put(audio(1, end=True))
    outgoing.put(audio(1, end=True))
    first, second = outgoing.requests
    assert outgoing.final("req_never_seen") is first
    assert list(outgoing.requests) == [second]


def test_the_longest_request_is_given_up_past_the_bound(outgoing: Outgoing) -> None:
    outgoing.put(audio(100, end=True))
    outgoing.put(audio(900))
    assert outgoing.not_kept == []
    outgoing.put(audio(1))
    assert outgoing.not_kept == [outgoing.requests[1]]
    outgoing.cancel(None)
    assert outgoing.not_kept == []


def test_a_fresh_session_numbers_from_zero_without_refused_chunks(outgoing: Outgoing) -> None:
    outgoing.put(audio(1, end=True))
    outgoing.final("req_a")
    for size in (2, 3, 4):
        outgoing.put(audio(size))
    assert outgoing.refused(2) is False
    chunks, cancelled = outgoing.restart(max_chunk_bytes=100)
    assert [(chunk.sequence_id, len(chunk.payload)) for chunk in chunks] == [(0, 2), (1, 4)]
    assert cancelled == []
    assert outgoing.put(audio(5, end=True)) == 2
    assert len(outgoing.requests) == 1


def test_the_rest_of_a_request_that_ended_early_opens_no_other(outgoing: Outgoing) -> None:
    outgoing.put(audio(1))
    outgoing.final("req_a")
    outgoing.restart(max_chunk_bytes=100)
    assert outgoing.put(audio(1)) is None
    assert outgoing.put(audio(1, end=True)) is None
    assert outgoing.put(audio(1, end=True)) == 0


def test_without_a_fresh_session_the_rest_is_swallowed_by_the_server(outgoing: Outgoing) -> None:
    outgoing.put(audio(1))
    outgoing.final("req_a")
    assert outgoing.put(audio(1, end=True)) == 1
    assert not outgoing.requests


def test_finish_on_nothing_and_on_what_was_refused(outgoing: Outgoing) -> None:
    assert outgoing.finish() is False
    outgoing.put(audio(1))
    assert outgoing.refused(0) is False
    with pytest.raises(EmptyInput):
        outgoing.finish()
    assert not outgoing.requests


def test_refused_after_finish_there_is_no_request(outgoing: Outgoing) -> None:
    outgoing.put(audio(1))
    assert outgoing.finish() is True
    assert outgoing.refused(0) is True
    assert not outgoing.requests


def test_a_refused_last_chunk_does_not_undo_finish(outgoing: Outgoing) -> None:
    outgoing.put(audio(1))
    outgoing.put(audio(1))
    outgoing.finish()
    assert outgoing.refused(1) is False
    assert outgoing.receiving is None


def test_a_refusal_of_a_request_long_gone(outgoing: Outgoing) -> None:
    outgoing.put(audio(1, end=True))
    outgoing.final("req_a")
    assert outgoing.refused(0) is False


def test_cancel_takes_the_running_request_and_the_open_one(outgoing: Outgoing) -> None:
    outgoing.put(audio(1, end=True))
    outgoing.started("req_a", 0)
    outgoing.put(audio(1, end=True))
    outgoing.put(audio(1))
    outgoing.cancel("req_unknown")
    assert not any(request.cancelled for request in outgoing.requests)
    outgoing.cancel(None)
    assert [request.cancelled for request in outgoing.requests] == [True, False, True]
    assert outgoing.receiving is None
    outgoing.put(audio(1, end=True))  # of a new request
    assert [request.cancelled for request in outgoing.requests] == [True, False, True, False]
