from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checked_input_stream import AcknowledgedStream

from omni_ws.core.chunks import InputChunk, InputMode, Modality, Offset, StartTrigger
from omni_ws.core.input_stream import READ_SEC, StreamLimits
from omni_ws.core.quota import ByteBudget
from omni_ws.core.reorder import RequestOpened, StreamEvent
from omni_ws.core.request_input import (
    GenerationStarted,
    InputAppended,
    InputEnded,
    InputSettings,
    InputState,
    RequestInput,
)
from omni_ws.core.start_policy import ON_END_ONLY, ON_FIRST_CHUNK, StartPolicy
from omni_ws.errors import (
    EmptyInput,
    EngineOverloaded,
    InvalidValue,
    OutOfOrder,
    PayloadTooLarge,
    ReorderWindowExceeded,
    SequenceGap,
    SessionConflict,
    SessionTimeout,
)

LIMITS = StreamLimits(
    reorder_window=16, reorder_timeout=10, session_timeout=300, max_chunk_bytes=1000, max_held_bytes=4000
)


def make(
    policy: StartPolicy | None = None,
    mode: InputMode = InputMode.EXTEND,
    *,
    limits: StreamLimits = LIMITS,
    budget: ByteBudget | None = None,
    single_request: bool = False,
) -> AcknowledgedStream:
    settings = InputSettings(start_policy=policy or ON_FIRST_CHUNK, mode=mode)
    return AcknowledgedStream(
        limits, lambda: settings, budget=budget or ByteBudget(1 << 20), now=0, single_request=single_request
    )


def text(number: int | None, content: bytes = b"x", *, end: bool = False) -> InputChunk:
    return InputChunk(Modality.TEXT, content, number, end_of_input=end)


def payload(events: Sequence[StreamEvent]) -> bytes:
    """What reaches the engine."""
    pieces: list[bytes] = []
    for event in events:
        if isinstance(event, GenerationStarted):
            pieces += [chunk.payload for chunk in event.chunks]
        elif isinstance(event, InputAppended):
            pieces.append(event.chunk.payload)
    return b"".join(pieces)


def shapes(events: Sequence[StreamEvent]) -> list[type[StreamEvent]]:
    return [type(event) for event in events]


def ack_due(stream: AcknowledgedStream) -> bool:
    """A call, so that a type checker does not take the answer for a constant."""
    return stream.ack_due


def has_gap(stream: AcknowledgedStream) -> bool:
    return stream.gap_since is not None


def opened(stream: AcknowledgedStream) -> bool:
    return stream.opened


def current(stream: AcknowledgedStream) -> RequestInput | None:
    return stream.current


# order


def test_one_request_after_the_other() -> None:
    stream = make()
    first = stream.receive_chunk(text(0, b"a"), now=0)
    assert shapes(first) == [RequestOpened, GenerationStarted]
    assert stream.current is not None
    assert shapes(stream.receive_chunk(text(1, b"b", end=True), now=0)) == [InputAppended, InputEnded]
    assert current(stream) is None
    second = stream.receive_chunk(text(2, b"c"), now=0)
    assert shapes(second) == [RequestOpened, GenerationStarted]
    assert payload(second) == b"c"
    assert isinstance(first[0], RequestOpened)
    assert isinstance(second[0], RequestOpened)
    assert first[0].session is not second[0].session


def test_a_filled_gap_releases_in_order_across_requests() -> None:
    stream = make()
    assert stream.receive_chunk(text(2, b"c"), now=0) == []
    assert stream.receive_chunk(text(1, b"b", end=True), now=0) == []
    assert has_gap(stream)
    events = stream.receive_chunk(text(0, b"a"), now=0)
    assert shapes(events) == [
        RequestOpened,
        GenerationStarted,
        InputAppended,
        InputEnded,
        RequestOpened,
        GenerationStarted,
    ]
    assert payload(events) == b"abc"
    assert not has_gap(stream)


def test_the_first_copy_counts() -> None:
    stream = make()
    stream.receive_chunk(text(1, b"first"), now=0)
    assert stream.receive_chunk(text(1, b"second"), now=0) == []
    assert payload(stream.receive_chunk(text(0, b"zero-"), now=0)) == b"zero-first"
    assert stream.receive_chunk(text(0, b"again"), now=0) == []
    assert stream.duplicates == 2


def test_the_window() -> None:
    stream = make()
    stream.receive_chunk(text(LIMITS.reorder_window - 1), now=0)
    with pytest.raises(ReorderWindowExceeded) as caught:
        stream.receive_chunk(text(LIMITS.reorder_window), now=0)
    assert caught.value.sequence_id == LIMITS.reorder_window
    assert caught.value.param == "sequence_id"


def test_out_of_order_chunks_may_be_refused_and_come_again() -> None:
    stream = make()
    stream.reject_out_of_order = True
    with pytest.raises(OutOfOrder) as caught:
        stream.receive_chunk(text(1, b"b"), now=0)
    assert caught.value.sequence_id == 1
    assert not has_gap(stream)
    assert payload(stream.receive_chunk(text(0, b"a"), now=0)) == b"a"
    assert payload(stream.receive_chunk(text(1, b"b"), now=0)) == b"b"


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[bytes], list[int]]:
    """Contents, and the order in which they arrive: any inside the window, some of them repeatedly."""
    contents = draw(st.lists(st.binary(max_size=4), min_size=1, max_size=40))
    missing, order = list(range(len(contents))), list[int]()
    while missing:
        number = draw(st.sampled_from([n for n in missing if n < missing[0] + LIMITS.reorder_window]))
        missing.remove(number)
        order.append(number)
        if draw(st.booleans()):
            order.append(draw(st.sampled_from(order)))
    return contents, order


@given(deliveries(), st.sampled_from([ON_FIRST_CHUNK, ON_END_ONLY]))
def test_any_order_and_repetition_gives_the_same_bytes(
    delivery: tuple[list[bytes], list[int]], policy: StartPolicy
) -> None:
    contents, order = delivery
    stream = make(policy)
    chunks = [InputChunk(Modality.AUDIO, content, number) for number, content in enumerate(contents)]
    events = [event for number in order for event in stream.receive_chunk(chunks[number], now=0)]
    events += stream.finish(now=0)
    assert payload(events) == b"".join(contents)
    assert stream.take_ack() == (len(contents), 0, len(b"".join(contents)))


# numbering


def test_chunks_without_numbers_come_in_order_of_arrival() -> None:
    stream = make()
    events = [*stream.receive_chunk(text(None, b"a"), now=0)]
    events += stream.receive_chunk(text(None, b"b", end=True), now=0)
    assert payload(events) == b"ab"
    assert stream.take_ack()[0] == 2


@pytest.mark.parametrize(("first", "second"), [(0, None), (None, 1)])
def test_numbers_are_given_to_all_chunks_or_to_none(first: int | None, second: int | None) -> None:
    stream = make()
    stream.receive_chunk(text(first), now=0)
    with pytest.raises(InvalidValue) as caught:
        stream.receive_chunk(text(second), now=0)
    assert caught.value.param == "sequence_id"
    assert caught.value.sequence_id == second


def test_a_refused_chunk_uses_its_number_up() -> None:
    stream = make()
    assert stream.refuse(0, now=0) == []
    assert stream.refuse(2, now=0) == []
    assert payload(stream.receive_chunk(text(1, b"b"), now=0)) == b"b"
    assert not has_gap(stream)
    assert payload(stream.receive_chunk(text(3, b"d"), now=0)) == b"d"
    assert stream.held_bytes == 2


def test_a_refused_chunk_may_fill_a_gap() -> None:
    stream = make()
    stream.receive_chunk(text(1, b"b"), now=0)
    assert payload(stream.refuse(0, now=0)) == b"b"


def test_a_refused_duplicate_is_a_duplicate() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    stream.take_ack()
    assert stream.refuse(0, now=0) == []
    assert stream.duplicates == 1
    assert ack_due(stream)


# the end of input


def test_finish_is_idempotent() -> None:
    stream = make()
    assert stream.finish(now=0) == []
    stream.receive_chunk(text(0), now=0)
    assert stream.finish(now=0) == [InputEnded()]
    assert stream.finish(now=0) == []


def test_finish_waits_for_what_is_behind_a_gap() -> None:
    stream = make()
    stream.receive_chunk(text(1, b"b"), now=0)
    assert stream.finish(now=0) == []
    assert stream.finish(now=0) == []
    events = stream.receive_chunk(text(0, b"a"), now=0)
    assert payload(events) == b"ab"
    assert shapes(events)[-1] is InputEnded
    assert current(stream) is None


def test_finish_does_not_reach_chunks_that_came_after_it() -> None:
    """Of two turns sent one behind the other, neither swallows the other."""
    stream = make()
    stream.receive_chunk(text(1, b"b"), now=0)
    stream.finish(now=0)
    stream.receive_chunk(text(3, b"d"), now=0)
    stream.finish(now=0)
    first = stream.receive_chunk(text(0, b"a"), now=0)
    assert payload(first) == b"ab"
    assert shapes(first)[-1] is InputEnded
    second = stream.receive_chunk(text(2, b"c"), now=0)
    assert payload(second) == b"cd"
    assert shapes(second) == [RequestOpened, GenerationStarted, InputAppended, InputEnded]


def test_finish_after_a_refused_chunk_behind_a_gap() -> None:
    stream = make()
    stream.refuse(1, now=0)
    stream.finish(now=0)
    assert shapes(stream.receive_chunk(text(0), now=0)) == [RequestOpened, GenerationStarted, InputEnded]


def test_an_end_that_is_said_twice_ends_once() -> None:
    stream = make()
    stream.receive_chunk(text(1, end=True), now=0)
    stream.finish(now=0)
    events = stream.receive_chunk(text(0), now=0)
    assert shapes(events).count(InputEnded) == 1
    assert current(stream) is None


def test_an_empty_end_opens_and_ends_a_request() -> None:
    stream = make()
    opened, ended = stream.receive_chunk(text(0, b"", end=True), now=0)
    assert isinstance(opened, RequestOpened)
    assert isinstance(ended, InputEnded)
    assert isinstance(ended.error, EmptyInput)
    assert current(stream) is None


@pytest.mark.parametrize("ended_by", ["chunk", "finish", "cancel"])
def test_a_single_request_is_the_only_one(ended_by: str) -> None:
    stream = make(single_request=True)
    assert not opened(stream)
    stream.receive_chunk(text(0, end=ended_by == "chunk"), now=0)
    assert opened(stream)
    if ended_by == "finish":
        stream.finish(now=0)
    elif ended_by == "cancel":
        stream.cancel(now=0)
    with pytest.raises(SessionConflict) as caught:
        stream.receive_chunk(text(1), now=0)
    assert caught.value.sequence_id == 1
    assert stream.receive_chunk(text(0), now=0) == []
    assert stream.held_bytes == 1


def test_the_end_of_a_single_request_before_what_arrived_already() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(text(2, b"c"), now=0)
    with pytest.raises(SessionConflict) as caught:
        stream.receive_chunk(text(1, b"b", end=True), now=0)
    assert (caught.value.sequence_id, caught.value.param) == (1, "sequence_id")
    assert stream.held_bytes == 1
    # Nothing has changed: the same number may come without the end, and the end with the last.
    stream.receive_chunk(text(1, b"b"), now=0)
    assert payload(stream.receive_chunk(text(0, b"a"), now=0)) == b"abc"


def make_ended_behind_a_gap(ended_by: str) -> AcknowledgedStream:
    """A single request whose end, chunk 2, waits for chunks 0 and 1."""
    stream = make(single_request=True)
    stream.receive_chunk(text(2, b"c", end=ended_by == "chunk"), now=0)
    if ended_by == "finish":
        stream.finish(now=0)
    return stream


@pytest.mark.parametrize("ended_by", ["chunk", "finish"])
def test_a_chunk_behind_the_end_of_a_single_request_that_waits_itself(ended_by: str) -> None:
    stream = make_ended_behind_a_gap(ended_by)
    stream.receive_chunk(text(1, b"b"), now=0)  # the last that may come
    with pytest.raises(SessionConflict) as caught:
        stream.receive_chunk(text(3), now=0)
    assert caught.value.sequence_id == 3
    events = stream.receive_chunk(text(0, b"a"), now=0)
    assert (payload(events), shapes(events)[-1]) == (b"abc", InputEnded)


@pytest.mark.parametrize("ended_by", ["chunk", "finish"])
def test_of_two_ends_of_a_single_request_the_first_counts(ended_by: str) -> None:
    stream = make_ended_behind_a_gap(ended_by)
    stream.refuse(4, now=0)  # uses up a number behind the end, and is no input
    stream.finish(now=0)
    with pytest.raises(SessionConflict) as caught:
        stream.receive_chunk(text(3), now=0)
    assert caught.value.sequence_id == 3
    stream.receive_chunk(text(1, b"b"), now=0)
    events = stream.receive_chunk(text(0, b"a"), now=0)
    assert (payload(events), shapes(events)[-1]) == (b"abc", InputEnded)


def test_a_chunk_far_behind_the_end_of_a_single_request() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(text(0, end=True), now=0)
    with pytest.raises(SessionConflict):
        stream.receive_chunk(text(2), now=0)
    assert stream.gap_since is None


def test_a_single_request_that_found_no_room_may_still_come() -> None:
    budget = ByteBudget(1)
    budget.take(1)
    stream = make(budget=budget, single_request=True)
    with pytest.raises(EngineOverloaded):
        stream.receive_chunk(text(0), now=0)
    assert not opened(stream)
    budget.give(1)
    assert shapes(stream.receive_chunk(text(0), now=0)) == [RequestOpened, GenerationStarted]


# cancel and abandon


def test_cancel_drops_what_waits_behind_a_gap() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    session = stream.current
    assert session is not None
    stream.receive_chunk(text(2), now=0)
    stream.refuse(4, now=0)
    stream.finish(now=0)
    stream.cancel(now=0)
    assert session.state is InputState.CANCELLED
    assert stream.held_bytes == session.held_bytes == 1
    assert not has_gap(stream)
    assert ack_due(stream)
    assert stream.take_ack()[0] == 5
    # Late copies of what was dropped are duplicates, and the pending end of input went with it.
    assert stream.receive_chunk(text(3), now=0) == []
    assert shapes(stream.receive_chunk(text(5), now=0)) == [RequestOpened, GenerationStarted]
    stream.handle_timer(now=299)


def test_cancel_without_input_changes_nothing() -> None:
    stream = make()
    stream.cancel(now=0)
    assert not ack_due(stream)
    assert stream.take_ack()[0] == 0


def test_dropping_what_waits_leaves_the_request_open() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    stream.receive_chunk(text(2), now=0)
    stream.drop_waiting(now=0)
    assert stream.held_bytes == 1
    assert shapes(stream.receive_chunk(text(3), now=0)) == [InputAppended]


def test_the_rest_of_an_abandoned_request_is_swallowed() -> None:
    stream = make()
    stream.receive_chunk(text(0, b"abc"), now=0)
    session = stream.current
    assert session is not None
    stream.abandon(session)
    assert session.state is InputState.FAILED
    assert stream.receive_chunk(text(1, b"d"), now=0) == []
    assert stream.held_bytes == 3
    stream.take_ack()
    assert stream.receive_chunk(text(2, b"e", end=True), now=0) == []
    assert ack_due(stream)
    assert shapes(stream.receive_chunk(text(3, b"f"), now=0)) == [RequestOpened, GenerationStarted]


def test_finish_ends_the_swallowing() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    assert stream.current is not None
    stream.abandon(stream.current)
    assert stream.finish(now=0) == []
    assert shapes(stream.receive_chunk(text(1), now=0)) == [RequestOpened, GenerationStarted]


# what is held


def test_a_chunk_at_the_limit_and_one_past_it() -> None:
    stream = make()
    stream.receive_chunk(text(0, bytes(LIMITS.max_chunk_bytes)), now=0)
    with pytest.raises(PayloadTooLarge) as caught:
        stream.receive_chunk(text(1, bytes(LIMITS.max_chunk_bytes + 1)), now=0)
    assert caught.value.sequence_id == 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_held_bytes_at_the_limit_and_one_past_it(ahead: int) -> None:
    stream = make()
    for number in range(4):
        stream.receive_chunk(text(number + ahead, bytes(1000)), now=0)
    assert stream.held_bytes == LIMITS.max_held_bytes
    with pytest.raises(PayloadTooLarge):
        stream.receive_chunk(text(4 + ahead), now=0)
    assert stream.held_bytes == LIMITS.max_held_bytes


def test_what_the_engine_took_makes_room() -> None:
    stream = make()
    for number in range(100):
        stream.receive_chunk(text(number, bytes(1000)), now=0)
        assert stream.current is not None
        stream.taken(stream.current, 1000)
    assert stream.held_bytes == 0
    assert stream.received_bytes == 100_000


def test_snapshot_holds_nothing_after_the_start() -> None:
    stream = make(mode=InputMode.SNAPSHOT)
    stream.receive_chunk(text(0, b"ab"), now=0)
    stream.receive_chunk(text(2, b"cd"), now=0)
    assert stream.held_bytes == 4
    assert stream.receive_chunk(text(1, b"ef"), now=0) == []
    assert stream.held_bytes == 2


def test_the_budget_is_shared() -> None:
    budget = ByteBudget(10)
    first, second = make(budget=budget), make(budget=budget)
    first.receive_chunk(text(0, bytes(6)), now=0)
    with pytest.raises(EngineOverloaded):
        second.receive_chunk(text(0, bytes(5)), now=0)
    assert budget.used == 6
    first.close()
    assert budget.used == 0
    assert shapes(second.receive_chunk(text(0, bytes(5)), now=0)) == [RequestOpened, GenerationStarted]


@pytest.mark.parametrize("waiting", [False, True])
def test_a_chunk_that_found_no_room_may_come_again(waiting: bool) -> None:
    budget = ByteBudget(10)
    budget.take(5)
    stream = make(budget=budget)
    if waiting:
        stream.receive_chunk(text(1, b"c"), now=0)
    with pytest.raises(EngineOverloaded):
        stream.receive_chunk(text(0, bytes(6)), now=0)
    assert current(stream) is None
    assert stream.take_ack() == (0, int(waiting), 0)
    budget.give(5)
    assert payload(stream.receive_chunk(text(0, bytes(6)), now=0)) == bytes(6) + b"c" * waiting
    assert budget.used == stream.held_bytes == 6 + waiting


def test_nothing_is_given_back_twice() -> None:
    budget = ByteBudget(100)
    budget.take(50)
    stream = make(budget=budget)
    stream.receive_chunk(text(0, bytes(8)), now=0)
    session = stream.current
    assert session is not None
    stream.taken(session, 3)
    stream.forget(session)
    for _ in range(2):
        assert (session.held_bytes, stream.held_bytes, budget.used) == (0, 0, 50)
        stream.taken(session, 5)


def test_after_close_nothing_is_counted() -> None:
    budget = ByteBudget(100)
    budget.take(50)
    stream = make(budget=budget)
    stream.receive_chunk(text(0, bytes(8)), now=0)
    stream.receive_chunk(text(2, bytes(8)), now=0)
    session = stream.current
    assert session is not None
    stream.close()
    stream.taken(session, 8)
    stream.receive_chunk(text(4, bytes(8)), now=0)
    stream.receive_chunk(text(1, bytes(8)), now=0)
    stream.cancel(now=0)
    stream.close()
    assert (stream.held_bytes, budget.used) == (0, 50)


def test_what_waits_is_counted() -> None:
    stream = make()
    stream.receive_chunk(text(2), now=0)
    stream.receive_chunk(text(4), now=0)
    assert (stream.buffered_chunks, stream.received_bytes) == (2, 0)


def test_asking_for_the_timer_changes_nothing() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=5)
    before = stream.buffered_chunks, stream.notable_events, stream.acks.pending
    assert stream.get_timer() == stream.get_timer() == 5 + LIMITS.session_timeout
    assert (stream.buffered_chunks, stream.notable_events, stream.acks.pending) == before


# time


def test_a_gap_has_its_time() -> None:
    stream = make()
    stream.receive_chunk(text(3), now=100)
    stream.receive_chunk(text(5), now=105)
    assert stream.get_timer() == 110
    stream.handle_timer(now=109.999)
    with pytest.raises(SequenceGap, match="chunk 0 to 2 did") as caught:
        stream.handle_timer(now=110)
    assert caught.value.sequence_id == 0


def test_one_missing_chunk_is_named_alone() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    stream.receive_chunk(text(2), now=0)
    assert str(stream.gap_error()) == "chunk 1 did not arrive"


def test_a_gap_behind_a_filled_gap_has_a_clock_of_its_own() -> None:
    stream = make()
    stream.receive_chunk(text(1), now=0)
    stream.receive_chunk(text(3), now=0)
    stream.receive_chunk(text(0), now=9)
    stream.take_ack()
    assert stream.get_timer() == 19
    stream.handle_timer(now=18)
    stream.receive_chunk(text(2), now=18)
    stream.take_ack()
    assert stream.get_timer() == 318


def test_a_gap_that_shrinks_keeps_its_clock() -> None:
    stream = make()
    stream.receive_chunk(text(3), now=0)
    stream.receive_chunk(text(0), now=9)
    with pytest.raises(SequenceGap, match="chunk 1 to 2 did"):
        stream.handle_timer(now=10)


def test_silence_has_its_time() -> None:
    stream = make()
    assert stream.get_timer() == 300
    stream.receive_chunk(text(0), now=10)
    session = stream.current
    assert session is not None
    stream.take_ack()
    assert stream.get_timer() == 310
    stream.handle_timer(now=309.999)
    with pytest.raises(SessionTimeout, match="300 seconds"):
        stream.handle_timer(now=310)
    assert session.state is InputState.EXPIRED


@pytest.mark.parametrize("abandoned", [False, True])
def test_silence_without_open_input(abandoned: bool) -> None:
    stream = make()
    if abandoned:
        stream.receive_chunk(text(0), now=0)
        assert stream.current is not None
        stream.abandon(stream.current)
    with pytest.raises(SessionTimeout):
        stream.handle_timer(now=300)


def test_every_sign_of_life_counts() -> None:
    stream = make()
    stream.touch(now=1)
    assert stream.get_timer() == 301
    stream.finish(now=2)
    assert stream.get_timer() == 302
    stream.cancel(now=3)
    assert stream.get_timer() == 303
    stream.refuse(0, now=4)
    stream.take_ack()
    assert stream.get_timer() == 304


def test_nothing_is_idle_while_an_answer_runs() -> None:
    stream = make()
    stream.answering = True
    assert stream.get_timer() is None
    stream.handle_timer(now=1000)
    stream.receive_chunk(text(1), now=1000)
    assert stream.get_timer() == 1010
    with pytest.raises(SequenceGap):
        stream.handle_timer(now=1010)


def test_clocks_stand_still_while_nothing_is_read() -> None:
    stream = make()
    stream.receive_chunk(text(1), now=100)
    stream.hold_clocks(now=104)
    stream.hold_clocks(now=106)
    assert stream.get_timer() is None
    stream.handle_timer(now=10_000)
    stream.release_clocks(now=204)
    stream.release_clocks(now=9_999)
    assert stream.get_timer() == 210
    stream.handle_timer(now=209.999)
    with pytest.raises(SequenceGap):
        stream.handle_timer(now=210)
    stream.receive_chunk(text(0), now=208)
    stream.take_ack()
    assert stream.get_timer() == 508


def test_silence_stands_still_too() -> None:
    stream = make()
    stream.hold_clocks(now=100)
    stream.touch(now=150)
    stream.release_clocks(now=1_000)
    assert stream.get_timer() == 1_300


def test_a_gap_found_while_the_clocks_stand_still_has_its_whole_time() -> None:
    stream = make()
    stream.hold_clocks(now=50)
    stream.receive_chunk(text(1), now=60)
    stream.release_clocks(now=100)
    assert stream.get_timer() == 110


def test_what_was_sent_meanwhile_can_be_read() -> None:
    stream = make()
    stream.receive_chunk(text(1), now=0)
    stream.hold_clocks(now=9.999)
    stream.release_clocks(now=20)
    assert stream.get_timer() == 20 + READ_SEC
    stream.unheard(now=21)
    assert stream.get_timer() == 31


def test_another_connection_is_read() -> None:
    stream = make()
    stream.hold_clocks(now=0)
    stream.unheard(now=5)
    assert stream.get_timer() == 305


def test_the_chunk_that_started_the_work_is_named() -> None:
    stream = make(ON_END_ONLY)
    stream.receive_chunk(text(0), now=0)
    started, _ = stream.receive_chunk(text(1, end=True), now=0)
    assert isinstance(started, GenerationStarted)
    assert (started.trigger, started.sequence_id) == (StartTrigger.END_OF_INPUT, 1)


# ends that are repeated


def end(number: int | None = None) -> InputChunk:
    return InputChunk(Modality.TEXT, b"", number, end_of_input=True)


@pytest.mark.parametrize("number", [0, 1, 2, 7, 100_000, None])
@pytest.mark.parametrize("ended_by", ["chunk", "finish", "gap"])
def test_a_bare_end_after_the_end_of_a_single_request_changes_nothing(number: int | None, ended_by: str) -> None:
    stream = make(single_request=True)
    if ended_by == "gap":
        stream.receive_chunk(text(1, b"b", end=True), now=0)
        if number in (0, 1):
            return  # not after the end, or a copy of it
    else:
        stream.receive_chunk(text(0, b"a", end=ended_by == "chunk"), now=0)
        stream.finish(now=0)
    before = stream.take_ack()
    assert stream.receive_chunk(end(number), now=0) == []
    assert ack_due(stream)
    assert stream.take_ack() == before
    with pytest.raises(SessionConflict):
        stream.receive_chunk(text(2), now=0)
    if ended_by == "gap":
        assert payload(stream.receive_chunk(text(0, b"a"), now=0)) == b"ab"


def test_bare_ends_that_overtake_each_other_are_one_end() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(text(0, b"a"), now=0)
    assert stream.receive_chunk(end(3), now=0) == []
    assert stream.receive_chunk(end(2), now=0) == []
    assert shapes(stream.receive_chunk(end(1), now=0)) == [InputEnded]
    assert (has_gap(stream), len(stream.reorder)) == (False, 0)


def test_a_bare_end_that_overtook_the_end_leaves_no_gap() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(end(3), now=0)
    assert shapes(stream.receive_chunk(text(0, b"a", end=True), now=0))[-1] is InputEnded
    assert (has_gap(stream), len(stream.reorder)) == (False, 0)


def test_a_bare_end_before_content_that_is_here_is_a_conflict() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(text(1, b""), now=0)  # empty, and no end
    with pytest.raises(SessionConflict):
        stream.receive_chunk(end(0), now=0)


def test_an_empty_result_of_a_tool_is_content() -> None:
    stream = make(single_request=True)
    stream.receive_chunk(text(0, end=True), now=0)
    with pytest.raises(SessionConflict):
        stream.receive_chunk(InputChunk(Modality.TEXT, b"", 1, end_of_input=True, tool_call_id="call"), now=0)


def test_a_bare_end_after_an_ended_input_uses_its_number_up_and_opens_nothing() -> None:
    stream = make()
    assert shapes(stream.receive_chunk(end(0), now=0)) == [RequestOpened, InputEnded]  # without any input
    stream.receive_chunk(text(1, end=True), now=0)
    for number in (2, 3):
        assert stream.receive_chunk(end(number), now=0) == []
        assert ack_due(stream)
        assert stream.take_ack()[0] == number + 1
    assert shapes(stream.receive_chunk(text(4), now=0))[0] is RequestOpened


def test_a_bare_end_after_a_cancel_opens_nothing() -> None:
    stream = make()
    stream.receive_chunk(text(0), now=0)
    stream.cancel(now=0)
    assert stream.receive_chunk(end(1), now=0) == []
    assert stream.take_ack()[0] == 2


@pytest.mark.parametrize("limit", ["budget", "held", "total"])
def test_a_chunk_that_waited_is_not_refused_for_the_character_that_it_completes(limit: str) -> None:
    room = 10
    limits = StreamLimits(
        max_held_bytes=room if limit == "held" else 4000, max_total_bytes=room if limit == "total" else None
    )
    budget = ByteBudget(room if limit == "budget" else 1 << 20)
    stream = make(limits=limits, budget=budget, single_request=limit == "total")
    assert stream.receive_chunk(text(1, b"\x82\xac" + b"x" * 8), now=0) == []
    assert payload(stream.receive_chunk(text(0, b"\xe2"), now=0)) == "€xxxxxxxx".encode()
    assert stream.take_ack() == (2, 0, 11)
    assert (stream.held_bytes, stream.waiting_bytes, budget.used) == (11, 0, 11)


def test_bytes_that_wait_for_an_offset_are_not_refused_for_the_character_that_they_complete() -> None:
    budget = ByteBudget(10)
    stream = make(budget=budget)
    waits = InputChunk(Modality.TEXT, b"\x82\xac" + b"x" * 7, offset=Offset(1))
    assert stream.receive_chunk(waits, now=0) == []
    first = InputChunk(Modality.TEXT, b"\xe2", offset=Offset(0))
    assert payload(stream.receive_chunk(first, now=0)) == "€xxxxxxx".encode()
    more = InputChunk(Modality.TEXT, b"\xe2", offset=Offset(10))
    with pytest.raises(EngineOverloaded):
        stream.receive_chunk(more, now=0)
    assert (stream.received_bytes, stream.held_bytes, budget.used) == (10, 10, 10)


def test_a_chunk_for_which_there_is_no_room_can_come_again_while_others_wait() -> None:
    budget = ByteBudget(10)
    stream = make(budget=budget)
    stream.receive_chunk(text(1, b"x" * 8), now=0)
    with pytest.raises(EngineOverloaded):
        stream.receive_chunk(text(0, b"abc"), now=0)
    assert stream.take_ack() == (0, 1, 0)
    assert (stream.held_bytes, stream.waiting_bytes, budget.used) == (8, 8, 8)
    assert payload(stream.receive_chunk(text(0, b"ab"), now=0)) == b"abxxxxxxxx"
