"""Chunks with offsets: however they are cut, lost, repeated and reordered, the engine gets the original stream."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ws.core.chunks import InputChunk, InputMode, Modality, Offset
from omni_ws.core.input_stream import InputStream, StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import OffsetBuffer
from omni_ws.core.request_input import GenerationStarted, InputAppended, InputEnded, InputSettings
from omni_ws.core.start_policy import ON_FIRST_CHUNK
from omni_ws.errors import (
    EngineOverloaded,
    InvalidValue,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
)

SETTINGS = InputSettings(start_policy=ON_FIRST_CHUNK, mode=InputMode.EXTEND)


class Intake:
    """An InputStream of one request, and the events that it returned."""

    def __init__(self, *, budget: int = 1 << 30, **limits: Any) -> None:
        self.budget = ByteBudget(budget)
        self.stream = InputStream(
            StreamLimits(**limits), lambda: SETTINGS, budget=self.budget, now=0, single_request=True
        )
        self.passed_on = b""
        self.ends = 0

    @property
    def next(self) -> int | None:
        return None if self.stream.offsets is None else self.stream.offsets.next_offset

    def take(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case GenerationStarted(chunks=chunks):
                    self.passed_on += b"".join(chunk.payload for chunk in chunks)
                case InputAppended(chunk=chunk):
                    self.passed_on += chunk.payload
                case InputEnded():
                    self.ends += 1

    def audio(self, start: int, payload: bytes, *, end: bool = False, now: float = 0, **fields: Any) -> None:
        offset = Offset(start)
        chunk = InputChunk(Modality.AUDIO, payload, offset=offset, end_of_input=end, **fields)
        self.take(self.stream.receive_chunk(chunk, now=now))

    def text(self, start: int, text: str, *, end: bool = False) -> None:
        offset = Offset(start, in_characters=True)
        chunk = InputChunk(Modality.TEXT, text.encode(), offset=offset, end_of_input=end)
        self.take(self.stream.receive_chunk(chunk, now=0))


# any order of arrival


@st.composite
def deliveries(draw: st.DrawFn, units: st.SearchStrategy[Any]) -> tuple[Any, list[tuple[int, int]]]:
    """A stream, and pieces that cover it: cut anywhere, overlapping, repeated, in any order."""
    stream = draw(units)
    size = len(stream)
    cuts = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=8))})
    pieces = list(itertools.pairwise(cuts))
    ranges = st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))
    return stream, draw(st.permutations(pieces + draw(st.lists(ranges, max_size=6))))


@given(delivery=deliveries(st.binary(min_size=1, max_size=40)), end_first=st.booleans())
@settings(deadline=None, max_examples=400)
def test_the_bytes_of_the_plain_stream(delivery: tuple[bytes, list[tuple[int, int]]], end_first: bool) -> None:
    plain, pieces = delivery
    intake = Intake()
    covered: set[int] = set()
    if end_first:
        intake.audio(len(plain), b"", end=True)
    repeated = 0
    for start, stop in pieces:
        repeated += start < stop and covered >= set(range(start, stop))
        intake.audio(start, plain[start:stop])
        covered |= set(range(start, stop))
        whole = next(place for place in itertools.count() if place not in covered)
        # Exactly what has no gap before it was passed on, and what waits is accounted for.
        assert intake.passed_on == plain[:whole]
        assert intake.next == intake.stream.received_bytes == whole
        assert intake.stream.held_bytes == len(covered)
        assert intake.stream.duplicates == repeated
        assert (intake.stream.buffered_chunks > 0) == (len(covered) > whole)
        assert (intake.stream.gap_since is None) == (len(covered) == whole and (not end_first or whole == len(plain)))
    assert intake.ends == end_first
    if not end_first:
        intake.audio(len(plain), b"", end=True)
    assert (intake.passed_on, intake.ends) == (plain, 1)
    assert intake.stream.gap_since is None
    intake.stream.close()
    assert intake.budget.used == 0


@given(delivery=deliveries(st.text(st.sampled_from("aé€😀"), min_size=1, max_size=20)))
@settings(deadline=None)
def test_the_characters_of_the_plain_text(delivery: tuple[str, list[tuple[int, int]]]) -> None:
    plain, pieces = delivery
    intake = Intake()
    for start, stop in pieces:
        intake.text(start, plain[start:stop], end=stop == len(plain))
    assert (intake.passed_on.decode(), intake.ends) == (plain, 1)
    intake.stream.close()
    assert intake.budget.used == 0


@given(delivery=deliveries(st.binary(min_size=1, max_size=30)), room=st.integers(1, 30))
@settings(deadline=None)
def test_what_finds_no_room_may_come_again(delivery: tuple[bytes, list[tuple[int, int]]], room: int) -> None:
    plain, pieces = delivery
    intake = Intake(budget=room)
    for start, stop in pieces:
        while True:
            before = intake.budget.used
            try:
                intake.audio(start, plain[start:stop])
                break
            except EngineOverloaded:
                assert intake.budget.used <= intake.budget.capacity
                current = intake.stream.current
                taken = current.held_bytes if current is not None else 0
                if not taken:
                    assert intake.budget.used == before
                    intake.budget.capacity += 1
                else:
                    assert current is not None
                    intake.stream.taken(current, taken)
    assert intake.passed_on == plain


# the window, the clocks, the caps


def test_as_many_pieces_as_wait_and_one_more() -> None:
    intake = Intake(reorder_window=3)
    for start in (2, 4, 6):
        intake.audio(start, b"x")
    intake.audio(4, b"x")
    assert (intake.stream.buffered_chunks, intake.stream.duplicates) == (3, 1)
    with pytest.raises(ReorderWindowExceeded) as caught:
        intake.audio(8, b"x")
    assert caught.value.param == "offset"
    intake.audio(0, b"0123456")
    assert (intake.passed_on, intake.stream.buffered_chunks) == (b"01x3x5x", 0)


def test_one_chunk_may_fill_several_gaps_and_leave_several_pieces() -> None:
    intake = Intake(reorder_window=4)
    intake.audio(3, b"d")
    intake.audio(6, b"g")
    with pytest.raises(ReorderWindowExceeded):
        intake.audio(1, b"bcdefgh")  # three pieces around the two that wait
    assert intake.stream.held_bytes == 2
    intake.audio(1, b"bcdef")
    assert intake.stream.buffered_chunks == 4
    intake.audio(0, b"a")
    assert intake.passed_on == b"abcdefg"


def test_a_gap_has_its_time_and_another_gap_a_time_of_its_own() -> None:
    intake = Intake(reorder_timeout=10, session_timeout=1000)
    intake.audio(2, b"c", now=1)
    intake.audio(4, b"e", now=2)
    intake.audio(0, b"a", now=5)  # the same gap, only shorter
    assert intake.stream.get_timer() == 11
    intake.audio(1, b"b", now=9)
    assert intake.stream.get_timer() == 19
    with pytest.raises(SequenceGap, match="1 bytes from offset 3") as caught:
        intake.stream.handle_timer(now=19)
    assert caught.value.param == "offset"


def test_an_end_that_was_announced_waits_for_what_is_before_it() -> None:
    intake = Intake(reorder_timeout=10, session_timeout=1000)
    intake.audio(3, b"", end=True, now=1)
    assert intake.stream.get_timer() == 11
    intake.audio(0, b"ab", now=2)
    with pytest.raises(SequenceGap, match="1 bytes from offset 2"):
        intake.stream.handle_timer(now=11)
    intake.audio(2, b"c", now=11)
    assert (intake.passed_on, intake.ends) == (b"abc", 1)


def test_no_gaps_where_what_is_ahead_is_refused() -> None:
    intake = Intake()
    intake.stream.reject_out_of_order = True
    with pytest.raises(OutOfOrder, match="byte 0") as caught:
        intake.audio(1, b"b")
    assert (caught.value.param, intake.stream.held_bytes) == ("offset", 0)
    intake.audio(0, b"ab")
    assert intake.passed_on == b"ab"


def test_what_waits_is_held_and_counts_to_the_total() -> None:
    intake = Intake(max_held_bytes=4, max_total_bytes=5)
    intake.audio(2, b"1234")
    with pytest.raises(PayloadTooLarge):
        intake.audio(6, b"5")
    assert intake.stream.current is None
    intake = Intake(max_total_bytes=5)
    intake.audio(2, b"1234")
    intake.audio(2, b"1234")
    with pytest.raises(PayloadTooLarge):
        intake.audio(0, b"12")


def test_a_little_of_a_large_chunk_keeps_no_more_of_it() -> None:
    intake = Intake()
    intake.audio(1, bytes(1000))
    intake.audio(1, bytes(1001))
    assert intake.stream.held_bytes == 1001
    assert intake.stream.offsets is not None
    assert sum(len(piece.chunk.payload) for piece in intake.stream.offsets._waiting) == 0


def test_giving_up_on_what_waits_gives_it_back() -> None:
    intake = Intake()
    intake.audio(5, b"abc")
    intake.stream.cancel(now=1)
    assert (intake.budget.used, intake.stream.gap_since, intake.next) == (0, None, 8)


# ends and conflicts


def test_the_end_is_idempotent_and_content_behind_it_is_a_conflict() -> None:
    intake = Intake()
    intake.audio(0, b"abc", end=True)
    intake.audio(0, b"abc", end=True)
    intake.audio(3, b"", end=True)
    intake.audio(9, b"", end=True)
    intake.take(intake.stream.finish(now=0))
    assert (intake.passed_on, intake.ends, intake.stream.duplicates) == (b"abc", 1, 1)
    for start, payload in ((3, b"d"), (2, b"cd"), (7, b"h")):
        with pytest.raises(SessionConflict) as caught:
            intake.audio(start, payload)
        assert caught.value.param == "offset"


def test_an_end_before_what_is_here_is_a_conflict() -> None:
    intake = Intake()
    intake.audio(4, b"e")
    with pytest.raises(SessionConflict, match="cannot end at 3"):
        intake.audio(2, b"c", end=True)
    assert intake.stream.buffered_chunks == 1


def test_a_finish_ends_behind_the_last_of_what_came() -> None:
    intake = Intake()
    intake.audio(2, b"c")
    intake.take(intake.stream.finish(now=0))
    assert intake.ends == 0
    with pytest.raises(SessionConflict):
        intake.audio(3, b"d")
    intake.take(intake.stream.receive_chunk(InputChunk.end(), now=0))
    intake.audio(0, b"ab")
    assert (intake.passed_on, intake.ends) == (b"abc", 1)


def test_an_end_without_any_input() -> None:
    intake = Intake()
    intake.audio(0, b"", end=True)
    assert (intake.passed_on, intake.ends) == (b"", 1)


def test_offsets_and_numbers_do_not_go_together() -> None:
    numbered, unnumbered, by_offset = Intake(), Intake(), Intake()
    numbered.take(numbered.stream.receive_chunk(InputChunk(Modality.AUDIO, b"a", 0), now=0))
    unnumbered.take(unnumbered.stream.receive_chunk(InputChunk(Modality.AUDIO, b"a"), now=0))
    for intake in (numbered, unnumbered):
        with pytest.raises(InvalidValue) as caught:
            intake.audio(1, b"b")
        assert caught.value.param == "offset"
    by_offset.audio(0, b"a")
    for payload, number in ((b"b", 1), (b"b", None), (b"", None)):
        chunk = InputChunk(Modality.AUDIO, payload, number)
        with pytest.raises(InvalidValue) as caught:
            by_offset.stream.receive_chunk(chunk, now=0)
        assert caught.value.param == "offset"
    assert by_offset.stream.refuse(5, now=0) == []
    by_offset.audio(1, b"b")
    assert by_offset.passed_on == b"ab"


def test_one_modality_and_one_unit() -> None:
    intake = Intake()
    intake.text(0, "é")
    with pytest.raises(InvalidValue) as caught:
        intake.audio(1, b"a")
    assert caught.value.param == "modality"
    chunk = InputChunk(Modality.TEXT, b"b", offset=Offset(2))
    with pytest.raises(InvalidValue, match="characters") as caught:
        intake.stream.receive_chunk(chunk, now=0)
    assert caught.value.param == "offset"
    intake.audio(1, b"", end=True)  # a chunk without content has no modality
    assert (intake.passed_on.decode(), intake.ends) == ("é", 1)


def test_a_refused_chunk_does_not_determine_what_others_may_be() -> None:
    numbered, text = Intake(), Intake()
    for intake in (numbered, text):
        intake.stream.reject_out_of_order = True
        with pytest.raises(OutOfOrder):
            intake.audio(1, b"b")
    numbered.take(numbered.stream.receive_chunk(InputChunk(Modality.AUDIO, b"a", 0), now=0))
    assert (numbered.passed_on, numbered.stream.numbered) == (b"a", True)
    text.text(0, "é")
    assert text.passed_on.decode() == "é"
    crowded = Intake(budget=3)
    crowded.audio(2, b"abc")
    with pytest.raises(EngineOverloaded):
        crowded.audio(0, b"d")
    crowded.stream.drop_waiting(now=0)
    assert crowded.stream.offsets is not None  # a chunk was accepted, and so offsets stay


def test_a_piece_whose_taker_fails_waits_and_those_before_it_are_over() -> None:
    buffer = OffsetBuffer(window=8)
    for start, payload in ((2, b"cd"), (4, b"ef"), (0, b"ab")):
        chunk = InputChunk(Modality.AUDIO, payload, offset=Offset(start))
        buffer.receive(chunk, in_order=False, hold=lambda size: None)
    pieces = buffer.pass_on()
    assert (next(pieces).payload, next(pieces).payload) == (b"ab", b"cd")
    del pieces  # the taker of the second piece has failed
    assert (len(buffer), buffer.next_offset) == (2, 2)
    assert [one.payload for one in buffer.pass_on()] == [b"cd", b"ef"]
