"""Chunks that arrive after their session has ended."""

from __future__ import annotations

import pytest

from omni_ws.core.chunks import InputChunk, Modality, Offset
from omni_ws.errors import InvalidValue, PayloadTooLarge, SessionConflict
from omni_ws.transport.mode_b.session import InputProgress
from omni_ws.wire.frames import RefusedChunk


def chunk(
    number: int | None, size: int = 10, *, end: bool = False, modality: Modality = Modality.TEXT, at: int | None = None
) -> InputChunk:
    offset = None if at is None else Offset(at)
    return InputChunk(modality, b"x" * size, number, end_of_input=end, offset=offset)


def test_a_repeated_chunk_is_a_duplicate() -> None:
    progress = InputProgress(next_sequence_id=3, received_bytes=30, ended=True)
    for number in (0, 2):
        progress.take_late(chunk(number))
    assert (progress.duplicates, progress.next_sequence_id, progress.received_bytes) == (2, 3, 30)


@pytest.mark.parametrize("number", [None, 3, 17])
def test_another_end_changes_nothing(number: int | None) -> None:
    progress = InputProgress(next_sequence_id=3, received_bytes=30, ended=True)
    progress.take_late(chunk(number, 0, end=True))
    assert progress == InputProgress(next_sequence_id=3, received_bytes=30, ended=True)


@pytest.mark.parametrize("progress", [InputProgress(next_sequence_id=3, ended=True), InputProgress(closed=True)])
def test_input_after_the_end_is_a_conflict(progress: InputProgress) -> None:
    with pytest.raises(SessionConflict) as conflict:
        progress.take_late(chunk(3))
    assert (conflict.value.param, conflict.value.sequence_id) == ("sequence_id", 3)
    with pytest.raises(SessionConflict) as conflict:
        progress.take_late(chunk(None, at=30))
    assert (conflict.value.param, conflict.value.sequence_id) == ("offset", None)
    with pytest.raises(SessionConflict):
        progress.take_late(chunk(None))


@pytest.mark.parametrize("numbered", [True, False])
def test_the_rest_of_an_input_is_counted_up_to_its_end(numbered: bool) -> None:
    progress = InputProgress(next_sequence_id=3, received_bytes=30)
    progress.take_late(chunk(3 if numbered else None))
    progress.take_late(chunk(4 if numbered else None, end=True))
    assert (progress.next_sequence_id, progress.received_bytes, progress.ended) == (5, 50, True)
    with pytest.raises(SessionConflict):
        progress.take_late(chunk(5))


def test_the_rest_of_an_input_is_limited() -> None:
    progress = InputProgress(received_bytes=30, max_total_bytes=50)
    progress.take_late(chunk(0, 20))
    with pytest.raises(PayloadTooLarge):
        progress.take_late(chunk(1, 1))
    assert (progress.received_bytes, progress.next_sequence_id) == (50, 1)
    progress.take_late(chunk(1, 0, end=True))
    assert progress.ended


def test_offsets_instead_of_numbers() -> None:
    progress = InputProgress(next_sequence_id=1, received_bytes=10, next_offset=10)
    progress.take_late(chunk(None, 10, at=0))
    assert progress.duplicates == 1
    progress.take_late(chunk(None, 5, at=10))
    assert (progress.next_offset, progress.received_bytes, progress.duplicates) == (15, 15, 1)


def test_a_refused_chunk_uses_up_its_number() -> None:
    progress = InputProgress(next_sequence_id=3)
    refusal = InvalidValue("bad", sequence_id=3)
    with pytest.raises(InvalidValue):
        progress.take_late(RefusedChunk(3, refusal))
    assert progress.next_sequence_id == 4
    progress.take_late(RefusedChunk(3, refusal))
    assert progress.duplicates == 1
    with pytest.raises(InvalidValue):
        progress.take_late(InvalidValue("no number either"))
    assert progress.next_sequence_id == 4
